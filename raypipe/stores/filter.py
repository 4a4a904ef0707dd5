"""Filters: the samples of a store for which an expression is true, such as `width >= 256 and label != 3`.

The expression is a subset of Python: comparisons, `and`, `or`, `not`, `in`, arithmetic, names of columns, numbers,
texts, True, False and None. It never runs as Python: its syntax tree is evaluated by pyarrow.compute over columns,
with numbers as int64 or float64. (A pyarrow expression would compare in the smallest type that fits a constant,
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


def _quotient(left: Any, right: Any) -> Any:
    no_value = pc.if_else(
        pc.equal(right, pa.scalar(0)), pa.scalar(None, pa.float64()), right
    )
    return pc.divide(pc.multiply(left, pa.scalar(1.0)), no_value)


def _equal(left: Any, right: Any) -> Any:
    if isinstance(right, pa.NullScalar):
        return pc.is_null(left)
    return (
        pc.is_null(right) if isinstance(left, pa.NullScalar) else pc.equal(left, right)
    )


def _unequal(left: Any, right: Any) -> Any:
    return pc.invert(_equal(left, right))


_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: pc.add_checked,
    ast.Sub: pc.subtract_checked,
    ast.Mult: pc.multiply_checked,
    ast.Div: _quotient,
    ast.USub: pc.negate_checked,
    ast.And: pc.and_kleene,
    ast.Or: pc.or_kleene,
    ast.Not: pc.invert,
    ast.Eq: _equal,
    ast.NotEq: _unequal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_LISTS = (ast.List, ast.Tuple, ast.Set)
_NODES = (ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Constant, *_LISTS)
_ALLOWED = "comparisons, and, or, not, in, + - * /, names of columns, numbers, texts, True, False and None"
_SETTING = "store.filter"


def matching(store: Store, expression: str) -> np.ndarray:
    """Return whether an expression is true, for each sample: bool (N,).

    Raises:
        ConfigError: the expression is invalid, true for no sample, or names a missing column or one of a wrong
            type.
    """
    text = f"{_SETTING} {shown(expression)}"
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        names = tuple(dict.fromkeys(_names_in(tree)))
        if not names:
            raise ConfigError("it names no column")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _invalid(text, error) from None
    parts = list[np.ndarray]()
    present = store.schema.names
    paths = {name: path_in(present, name) or (name,) for name in names}
    stored = tuple(dict.fromkeys(path[0] for path in paths.values()))
    for columns in scan(store, stored, _SETTING):
        try:
            arrays = {name: _values(columns, *path) for name, path in paths.items()}
            parts.append(_evaluated(tree, arrays))
        except (ConfigError, RecursionError) as error:
            raise _invalid(text, error) from None
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


def _invalid(text: str, error: BaseException) -> ConfigError:
    reason = error.msg if isinstance(error, SyntaxError) else str(error)
    if isinstance(error, RecursionError | MemoryError):
        reason = "nested too deeply"
    return ConfigError(f"{text}: {reason}; it may contain {_ALLOWED}")


def _values(columns: Columns, column: str, *path: str) -> pa.Array:
    """Return a column, or a field of its values, which are structs or JSON; none where a value is neither."""
    if not path:
        return _array(columns.table[column])
    if is_number(columns.table[column].type):
        name = ".".join((column, *path))
        raise TypeError(f"{name!r} is not allowed: {column!r} has numbers")
    fields: list[Any] = [None] * len(columns[column])
    for row, value in enumerate(columns[column]):
        with contextlib.suppress(ValueError):
            fields[row] = field_at(value, path)
    found = pa.chunked_array([fields])
    return _array(found.cast(pa.float64()) if pa.types.is_null(found.type) else found)


def _array(column: pa.ChunkedArray) -> pa.Array:
    """Return a column; numbers as int64 or float64, or as uint64 if int64 is too small; dates as text."""
    array = column.combine_chunks()
    kind = array.type
    if pa.types.is_integer(kind):
        is_large = kind == pa.uint64() and (pc.max(array).as_py() or 0) >= 1 << 63
        kind = kind if is_large else pa.int64()
    elif pa.types.is_floating(kind):
        kind = pa.float64()
    elif pa.types.is_dictionary(kind):
        kind = kind.value_type
    elif pa.types.is_temporal(kind):
        kind = pa.string()
    return array.cast(kind)


def _names_in(node: ast.expr) -> list[str]:
    """Return the columns that an expression names, and fields in them, such as json.caption."""
    if isinstance(node, ast.Name | ast.Attribute):
        return [ast.unparse(node)]
    if not isinstance(node, _NODES):
        raise ConfigError(f"{shown(ast.unparse(node))} is not allowed")
    names = list[str]()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            names += _names_in(child)
    return names


def _value(node: ast.expr, columns: Mapping[str, pa.Array]) -> pa.Array | pa.Scalar:
    """Return the value of an expression for each sample, or one for all."""

    def value(of: ast.expr) -> Any:
        return _value(of, columns)

    match node:
        case ast.Name() | ast.Attribute():
            return columns[ast.unparse(node)]
        case ast.Constant(value=None | int() | float() | str() as constant):
            return _scalar(constant)
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return _scalar(-number)
        case ast.BoolOp(op, operands) if type(op) in _OPERATIONS:
            return reduce(_OPERATIONS[type(op)], map(value, operands))
        case (
            ast.UnaryOp(ast.USub(), ast.Constant())
            | ast.BinOp(ast.Constant(None))
            | ast.BinOp(right=ast.Constant(None))
        ):
            pass  # what is computed from None has no value, but would compare as None does
        case ast.UnaryOp(op, operand) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](value(operand))
        case ast.BinOp(left, op, right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](value(left), value(right))
        case ast.Compare(left, ops, rights):
            # a chain such as 0 < label < 5 compares neighbours
            pairs = zip([left, *rights], ops, rights, strict=False)
            return reduce(
                pc.and_kleene, (_compared(node, *pair, value) for pair in pairs)
            )
    raise ConfigError(f"{shown(ast.unparse(node))} is not allowed")


def _compared(
    node: ast.expr,
    left: ast.expr,
    op: ast.cmpop,
    right: ast.expr,
    value: Callable[[ast.expr], Any],
) -> Any:
    """Return the result of one comparison of an expression; `value` gives that of its sides."""
    is_search = isinstance(op, ast.In | ast.NotIn)
    if is_search and isinstance(right, _LISTS):
        are_equal = (_equal(value(left), value(each)) for each in right.elts)
        found = reduce(pc.or_kleene, are_equal, pa.scalar(False))
        return found if isinstance(op, ast.In) else pc.invert(found)
    if type(op) in _OPERATIONS:
        return _OPERATIONS[type(op)](value(left), value(right))
    takes = ": `in` takes a list" if is_search else ""
    raise ConfigError(f"{shown(ast.unparse(node))} is not allowed{takes}")


def _scalar(value: Any) -> pa.Scalar:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ConfigError(f"{shown(value)} is beyond 64 bits")
    return pa.scalar(value)


def _evaluated(tree: ast.expr, columns: dict[str, pa.Array]) -> np.ndarray:
    kept = _value(tree, columns)
    if not pa.types.is_boolean(kept.type):
        raise TypeError("its value is not true or false")
    # an expression of constants has one value for all
    of_each = pc.and_kleene(kept, pa.repeat(True, len(next(iter(columns.values())))))
    return np.asarray(of_each.fill_null(False))
