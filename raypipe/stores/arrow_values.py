"""Values of Arrow columns as NumPy and Python have them, and the way back.

Arrow                                            NumPy, Python
numbers                                          (n,), of their dtype
lists of fixed sizes, tensors of one shape       (n, …), of their dtype
anything else, and either of these with nulls    a list of n values, None for nulls
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.stores.numbers import MAX_LABEL, MAX_SAMPLE_BYTES

_LISTS = (
    pa.ListType
    | pa.LargeListType
    | pa.FixedSizeListType
    | pa.ListViewType
    | pa.LargeListViewType
)
_TEXTS = ("string", "large_string", "string_view")
_BYTES = ("binary", "large_binary", "binary_view")


def is_integer(kind: pa.DataType) -> bool:
    """Return whether values are integers."""
    return bool(pa.types.is_integer(kind))


def is_number(kind: pa.DataType) -> bool:
    """Return whether values are integers, floats or booleans."""
    return (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Return whether values are lists, in any of Arrow's physical types."""
    return isinstance(kind, _LISTS)


def is_text(kind: pa.DataType) -> bool:
    """Return whether values are text, in any of Arrow's physical types."""
    return str(_decoded(kind)) in _TEXTS


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether values are bytes, in any of Arrow's physical types."""
    kind = _decoded(kind)
    return str(kind) in _BYTES or pa.types.is_fixed_size_binary(kind)


def _decoded(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def array_of(kind: pa.DataType) -> tuple[pa.DataType, tuple[int, ...]] | None:
    """Return the type of numbers, and the shape that all values have, () for numbers; None for other values."""
    shape: tuple[int, ...] = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        order = kind.permutation
        if order is not None and list(order) != sorted(order):
            return None  # rare: the axes are stored in another order
        shape = tuple(kind.shape)
        kind = kind.value_type
    while pa.types.is_fixed_size_list(kind):
        shape = (*shape, kind.list_size)
        kind = kind.value_type
    return (kind, shape) if is_number(kind) else None


def array_type(dtype: Any, shape: tuple[int, ...] = ()) -> pa.DataType:
    """Return the Arrow type of numbers, or of arrays of one shape."""
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return kind


def to_arrow(numbers: np.ndarray, is_null: np.ndarray | None = None) -> pa.Array:
    """Return numbers, (n, …), as an Arrow array of `array_type`.

    Args:
        is_null: bool (n,), which of them have no value; None = all have one.
    """
    shape = numbers.shape[1:]
    kind = array_type(numbers.dtype.newbyteorder("="), shape)
    if is_null is not None and not is_null.any():
        is_null = None
    if not shape:
        return pa.array(numbers, kind, mask=is_null)
    if not math.prod(shape):
        return pa.array(numbers.tolist(), kind, mask=is_null)
    values = to_arrow(numbers.reshape(-1))
    for size in reversed(shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    mask = None if is_null is None else pa.array(is_null)
    return pa.FixedSizeListArray.from_arrays(values, shape[0], mask=mask)


def to_values(column: pa.ChunkedArray) -> np.ndarray | list[Any]:
    """Return a column's values, see above. Text that is not UTF-8, as in a damaged record, is None; a list over
    512 MiB is None too."""
    numbers = array_of(column.type)
    if numbers is None:
        return _python_values(column)
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.cast(column.type.storage_type)
    kind, shape = numbers
    try:
        flat = numbers_in(column.combine_chunks())
        return np.array(flat.reshape(len(column), *shape))
    except ValueError:
        return _with_none(column, kind.to_pandas_dtype(), shape)


def _python_values(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        try:
            return column.to_pylist()
        except UnicodeDecodeError:
            pass  # one of them is not UTF-8
    return [_python_value(scalar) for scalar in column]


def numbers_in(values: pa.Array) -> np.ndarray:
    """Return numbers without nulls, (n, …), of `array_type`, as a view if Arrow has them so."""
    _, shape = array_of(values.type) or (None, ())
    flat = values
    while not flat.null_count and pa.types.is_fixed_size_list(flat.type):
        flat = flat.flatten()
    if flat.null_count:
        raise ValueError("a number is missing")
    return flat.to_numpy(zero_copy_only=False).reshape(len(values), *shape)


def as_classes(labels: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return integer labels as int64, null where int64 cannot hold one."""
    if labels.type == pa.uint64():
        fits = pc.less_equal(labels, pa.scalar(MAX_LABEL, pa.uint64()))
        labels = pc.if_else(fits, labels, pa.scalar(None, pa.uint64()))
    return labels.cast(pa.int64())


def _with_none(
    column: pa.ChunkedArray, dtype: Any, shape: tuple[int, ...]
) -> list[Any]:
    """Return a column's values, None for those that are or contain a null."""
    return [
        None if _has_none(value) else np.asarray(value, dtype).reshape(shape)[()]
        for value in column.to_pylist()
    ]


def _has_none(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_has_none, value)))


def _python_value(scalar: pa.Scalar) -> Any:
    if is_list(scalar.type) and _num_bytes_of(scalar.values) > MAX_SAMPLE_BYTES:
        return None
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return None


def _num_bytes_of(values: pa.Array | None) -> int:
    """Return an upper bound of the bytes of values in Python: each dictionary index may be the largest entry."""
    if values is None:
        return 0
    if pa.types.is_struct(values.type):
        return sum(map(_num_bytes_of, values.flatten()))
    if pa.types.is_nested(values.type):
        return _num_bytes_of(values.flatten())
    if pa.types.is_dictionary(values.type):
        return len(values) * values.dictionary.nbytes
    return values.nbytes


# Tables


def take(column: pa.ChunkedArray, rows: np.ndarray) -> pa.ChunkedArray:
    """Return rows, int64 (n,), of a column."""
    try:
        return column.take(pa.array(rows))
    except pa.ArrowNotImplementedError:
        # pyarrow takes no views of text and bytes, and no run ends
        chunks = [
            chunk for row in rows.tolist() for chunk in column.slice(row, 1).chunks
        ]
        return pa.chunked_array(chunks, column.type)
