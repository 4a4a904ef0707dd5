"""Filters: for which samples of a store an expression is true, such as `width >= 256 and label != 3`.

The expression is Python's, of a few kinds: comparisons, `and`, `or`, `not`, `in`, arithmetic, names of columns,
numbers, texts, True, False and None. It is never run as Python: it becomes an expression of pyarrow.compute, which
is evaluated over columns. A sample without a value is one for which a comparison is not true.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import ConfigError
from raypipe.stores.base import Columns, Store
from raypipe.stores.scan import scan

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left.cast(pa.float64()) / right,
}
_ALLOWED = "comparisons, and, or, not, in, + - * /, names of columns, numbers, texts, True, False and None"


def matching(store: Store, expression: str, setting: str = "store.filter") -> np.ndarray:
    """For which samples an expression is true: bool (N,).

    Args:
        setting: whose value it is, for errors.

    Raises:
        ConfigError: it is no such expression, a column is missing or of the wrong type, or it is true for none.
    """
    compiled, names = parse(expression, setting)
    parts = []
    for columns in scan(store, names, setting):
        try:
            parts.append(_evaluated(compiled, columns))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise ConfigError(
                f"{setting} {expression!r} cannot be evaluated on {store.address}: {error}"
            ) from None
    keep = np.concatenate(parts) if parts else np.empty(0, bool)
    if not keep.any():
        raise ConfigError(
            f"{setting} {expression!r} is true for none of the {len(store)} samples of {store.address}"
        )
    return keep


def parse(expression: str, setting: str) -> tuple[pc.Expression, tuple[str, ...]]:
    """The expression as pyarrow's, and the columns that it names; raises ConfigError where there are none."""
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        names = tuple(dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)))
        if not names:
            raise ConfigError("it names no column")
        return _compiled(tree), names
    except (SyntaxError, ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(f"{setting} {expression!r}: {reason}; allowed are {_ALLOWED}") from None


def _compiled(node: ast.expr) -> pc.Expression:
    match node:
        case ast.Name(id=name):
            return pc.field(name)
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return pc.scalar(value)
        case ast.BoolOp(op=op, values=values):
            joined, *others = map(_compiled, values)
            for each in others:
                joined = joined & each if isinstance(op, ast.And) else joined | each
            return joined
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return ~_compiled(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return pc.scalar(0) - _compiled(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _ARITHMETIC[type(op)](_compiled(left), _compiled(right))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = [left, *comparators]
            found = [_compared(a, op, b) for a, op, b in zip(sides, ops, comparators, strict=False)]
            joined = found[0]
            for each in found[1:]:
                joined = joined & each
            return joined
    raise ConfigError(f"{ast.unparse(node)!r} is not allowed")


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr) -> pc.Expression:
    if type(op) in _COMPARISONS:
        if isinstance(left, ast.Constant) and left.value is None:
            left, right = right, left
        if isinstance(right, ast.Constant) and right.value is None and isinstance(op, ast.Eq | ast.NotEq):
            is_null = _compiled(left).is_null()
            return is_null if isinstance(op, ast.Eq) else ~is_null
        return _COMPARISONS[type(op)](_compiled(left), _compiled(right))
    if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple | ast.Set):
        is_in = _compiled(left).isin([ast.literal_eval(value) for value in right.elts])
        return is_in if isinstance(op, ast.In) else ~is_in
    raise ConfigError(f"{ast.unparse(ast.Compare(left, [op], [right]))!r} is not allowed: `in` takes a list")


def _evaluated(compiled: pc.Expression, columns: Columns) -> np.ndarray:
    import pyarrow.dataset

    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    kept = pyarrow.dataset.dataset(table).to_table(columns={"keep": compiled})["keep"]
    if not pa.types.is_boolean(kept.type):
        raise TypeError("it is neither true nor false")
    return np.asarray(kept.fill_null(False).combine_chunks().to_numpy(zero_copy_only=False), bool)
