"""Filters: the samples of a store for which an expression is true, such as `width >= 256 and label != 3`.

The expression is a subset of Python: comparisons, `and`, `or`, `not`, `in`, arithmetic, names of columns, numbers,
texts, True, False and None. It never runs as Python: it becomes calls of pyarrow.compute over columns, with
numbers as int64 or float64. (A pyarrow expression would compare in the smallest type that fits a constant,
whatever the column's type, and recurse once per term.) If a sample has no value, neither a comparison nor its
opposite is true, except with None; a quotient by zero has no value.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import ConfigError
from raypipe.section import shown
from raypipe.stores.arrow_values import is_number
from raypipe.stores.base import Columns, Store
from raypipe.stores.nested import field_at, path_in
from raypipe.stores.scan import scan

Compiled = Callable[[Mapping[str, pa.Array]], pa.Array | pa.Scalar]
"""Function of columns, by name, that returns the value of an expression for each sample, or one for all."""

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}


def _quotient(left: Any, right: Any) -> Any:
    no_value = pc.if_else(
        pc.equal(right, pa.scalar(0)), pa.scalar(None, pa.float64()), right
    )
    return pc.divide(pc.multiply(left, pa.scalar(1.0)), no_value)


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: pc.add_checked,
    ast.Sub: pc.subtract_checked,
    ast.Mult: pc.multiply_checked,
    ast.Div: _quotient,
}
_ALLOWED = "comparisons, and, or, not, in, + - * /, names of columns, numbers, texts, True, False and None"
_NESTED = "nested too deeply"


def matching(
    store: Store, expression: str, setting: str = "store.filter"
) -> np.ndarray:
    """Return whether an expression is true, for each sample: bool (N,).

    Args:
        setting: the expression's setting, for errors.

    Raises:
        ConfigError: the expression is invalid, true for no sample, or names a missing column or one of a wrong
            type.
    """
    compiled, names = parse(expression, setting)
    parts = list[np.ndarray]()
    text = f"{setting} {shown(expression)}"
    present = store.schema.names
    paths = {name: path_in(present, name) or (name,) for name in names}
    stored = tuple(dict.fromkeys(path[0] for path in paths.values()))
    for columns in scan(store, stored, setting):
        try:
            arrays = {name: _values(columns, *path) for name, path in paths.items()}
            parts.append(_evaluated(compiled, arrays))
        except RecursionError:
            raise ConfigError(f"{text}: {_NESTED}") from None
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"{text} cannot be evaluated on {store.address}: {error}"
            ) from None
    keep = np.concatenate(parts) if parts else np.empty(0, bool)
    if not keep.any():
        raise ConfigError(
            f"{text} is true for none of the {len(store)} samples of {store.address}"
        )
    return keep


def _values(columns: Columns, column: str, *path: str) -> pa.Array:
    """Return a column, or a field of its values, which are structs or JSON; none where a value is neither."""
    if not path:
        return _array(columns.table[column])
    if is_number(columns.table[column].type):
        name = ".".join((column, *path))
        raise TypeError(f"{name!r} is not allowed: {column!r} has numbers")
    fields = []
    for value in columns[column]:
        field = None
        with contextlib.suppress(ValueError):
            field = field_at(value, path)
        fields.append(field)
    array = pa.array(fields)
    return array.cast(pa.float64()) if pa.types.is_null(array.type) else _array(array)


def _array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column; numbers as int64 or float64, or as uint64 if int64 is too small; dates as text."""
    kind = column.type
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_integer(kind):
        if kind == pa.uint64() and (pc.max(array).as_py() or 0) >= 1 << 63:
            return array
        return array.cast(pa.int64())
    if pa.types.is_floating(kind):
        return array.cast(pa.float64())
    if pa.types.is_dictionary(kind):
        return array.cast(kind.value_type)
    if pa.types.is_temporal(kind):
        return array.cast(pa.string())
    return array


def parse(expression: str, setting: str) -> tuple[Compiled, tuple[str, ...]]:
    """Return the expression as a function of columns, and the columns that it names.

    Raises:
        ConfigError: the expression is invalid, or names no column.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        names = tuple(dict.fromkeys(_names_in(tree)))
        if not names:
            raise ConfigError("it names no column")
        return _compiled(tree), names
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        if isinstance(error, RecursionError | MemoryError):
            reason = _NESTED
        raise ConfigError(
            f"{setting} {shown(expression)}: {reason}; it may contain {_ALLOWED}"
        ) from None


def _names_in(node: ast.AST) -> list[str]:
    """Return the columns that an expression names, and fields in them, such as json.caption."""
    if isinstance(node, ast.Name | ast.Attribute):
        return [ast.unparse(node)]
    return [name for child in ast.iter_child_nodes(node) for name in _names_in(child)]


def _compiled(node: ast.expr) -> Compiled:
    match node:
        case ast.Name() | ast.Attribute():
            name = ast.unparse(node)
            return lambda columns: columns[name]
        case ast.Constant() | ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            constant = pa.scalar(_constant(node))
            return lambda columns: constant
        case ast.BoolOp(op=op, values=values):
            join = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
            return _joined(join, list(map(_compiled, values)))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _applied(pc.invert, operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _applied(pc.negate_checked, operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            return _applied(_ARITHMETIC[type(op)], left, right)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = zip([left, *comparators], ops, comparators, strict=False)
            return _joined(pc.and_kleene, [_compared(*side) for side in sides])
    raise ConfigError(f"{shown(ast.unparse(node))} is not allowed")


def _applied(function: Callable[..., Any], *nodes: ast.expr) -> Compiled:
    arguments = list(map(_compiled, nodes))
    return lambda columns: function(*[argument(columns) for argument in arguments])


def _joined(join: Callable[[Any, Any], Any], terms: list[Compiled]) -> Compiled:
    return lambda columns: reduce(join, (term(columns) for term in terms))


def _constant(node: ast.expr) -> bool | int | float | str | None:
    match node:
        case ast.UnaryOp(
            op=ast.USub(), operand=ast.Constant(value=int() | float() as number)
        ):
            value: Any = -number
        case ast.Constant(value=None | int() | float() | str() as value):
            pass
        case _:
            raise ConfigError(f"{shown(ast.unparse(node))} must be a number or a text")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ConfigError(f"{shown(value)} is beyond 64 bits")
    return value


def _compared(left: ast.expr, op: ast.cmpop, right: ast.expr) -> Compiled:
    match left, op, right:
        case (side, ast.Eq(), ast.Constant(value=None)):
            return _applied(pc.is_null, side)
        case (side, ast.NotEq(), ast.Constant(value=None)):
            return _applied(pc.is_valid, side)
        case (ast.Constant(value=None), ast.Eq() | ast.NotEq(), _):
            return _compared(right, op, left)
        case _ if type(op) in _COMPARISONS:
            return _applied(_COMPARISONS[type(op)], left, right)
        case (_, ast.In(), ast.List(elts) | ast.Tuple(elts) | ast.Set(elts)):
            list(map(_constant, elts))  # nothing else is allowed
            equal = [_compared(left, ast.Eq(), value) for value in elts]
            return _joined(pc.or_kleene, [lambda _: pa.scalar(False), *equal])
        case (_, ast.NotIn(), _):
            is_in = _compared(left, ast.In(), right)
            return lambda columns: pc.invert(is_in(columns))
    text = shown(ast.unparse(ast.Compare(left, [op], [right])))
    raise ConfigError(f"{text} is not allowed: `in` takes a list")


def _evaluated(compiled: Compiled, columns: dict[str, pa.Array]) -> np.ndarray:
    kept = compiled(columns)
    if not pa.types.is_boolean(kept.type):
        raise TypeError("its value is not true or false")
    if isinstance(kept, pa.Scalar):  # the expression has only constants
        return np.full(len(next(iter(columns.values()))), bool(kept.as_py()))
    return np.asarray(kept.fill_null(False).to_numpy(zero_copy_only=False), bool)
