"""Columns of Arrow tables as columns of a store: which become image and label, and their values.

Two layouts of images are understood: binary, and that of Hugging Face, `struct{bytes: binary, path: string}`.
Images are views of their column's buffer, which stays in memory as long as one of them does.
"""

from __future__ import annotations

import itertools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import StoreError
from raypipe.stores.base import MAX_SAMPLE_BYTES, Columns, by_part, stored_names
from raypipe.stores.numbers import labels_of


class StoredColumn(NamedTuple):
    """A column of a part of a store.

    Attributes:
        take: rows, int64 (n,), → their values.
        num_bytes: of its buffers.
    """

    take: Callable[[np.ndarray], Any]
    num_bytes: int


class TableColumns:
    """The columns of a store whose files have one Arrow schema.

    Args:
        schemas: path, for errors, and schema of each file; one at least.
        image_column: the column that becomes `image`.
        target_column: the column that becomes `label`.

    Attributes:
        fields: name in the store → field in the files, `image` and `label` first.

    Raises:
        StoreError: schemas differ, or image and label are not in them.
    """

    def __init__(self, schemas: Sequence[tuple[str, pa.Schema]], image_column: str, target_column: str) -> None:
        first_path, first = schemas[0]
        self.classes = class_names(first, target_column)
        for path, schema in schemas[1:]:
            if not schema.equals(first) or class_names(schema, target_column) != self.classes:
                raise StoreError(f"{path} and {first_path} differ in schema or classes: a store has one schema")
        self.fields = _columns_of(first_path, first, image_column, target_column)
        self.columns = tuple(self.fields)
        self.label_is_class = "label" not in self.fields or pa.types.is_integer(self.fields["label"].type)

    def is_hf_image(self, name: str) -> bool:
        """Whether a column's bytes are in a struct."""
        return name == "image" and pa.types.is_struct(self.fields[name].type)

    def opened(self, name: str, column: pa.ChunkedArray, path: str) -> StoredColumn:
        """A column as it stands in a file, to take rows of."""
        if self.is_hf_image(name):
            column = pc.struct_field(column, "bytes")
        return StoredColumn(self._taker(name, column, path), column.get_total_buffer_size())

    def _taker(self, name: str, column: pa.ChunkedArray, path: str) -> Callable[[np.ndarray], Any]:
        """What takes rows of a column: numbers, and arrays of one shape, as arrays, others as lists.

        Numbers of which some are null are a list too; a null label raises StoreError.
        """
        if name == "image":
            return _chunked_taker(column)
        array_of = _array_of(column.type)
        if not _is_number(column.type) and array_of is None:
            return lambda rows: [_python_value(column[row]) for row in rows.tolist()]
        if isinstance(column.type, pa.BaseExtensionType):
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        shape = () if array_of is None else array_of[1]
        numbers = _in_place(column, shape)
        if numbers is not None:
            return numbers.__getitem__
        return partial(self._numbers, name, column, shape, path)

    def _numbers(
        self, name: str, column: pa.ChunkedArray, shape: tuple[int, ...], path: str, rows: np.ndarray
    ) -> np.ndarray | list[Any]:
        """Rows of a column of numbers, or of arrays of them."""
        column = column.take(pa.array(rows))
        if name == "label" and column.null_count:
            raise StoreError(
                f"{path}, column {self.fields[name].name!r}: a label is null; training on a made-up one would not "
                "be noticed"
            )
        values = _flat(column.combine_chunks())
        if values is None:
            return _with_none(column)
        return np.asarray(values.to_numpy(zero_copy_only=False).reshape(len(rows), *shape))

    def join(self, name: str, parts: list[Any], places: np.ndarray) -> Any:
        """Put the parts together as they were asked for: value i is number places[i] of them all."""
        kind = self.fields[name].type
        array_of = _array_of(kind)
        if (not _is_number(kind) and array_of is None) or any(isinstance(part, list) for part in parts):
            values = list(itertools.chain.from_iterable(parts))
            return [values[place] for place in places.tolist()]
        value_type, shape = array_of or (kind, ())
        nothing = np.empty((0, *shape), value_type.to_pandas_dtype())
        joined = np.concatenate(parts)[places] if parts else nothing
        return labels_of(joined) if name == "label" and pa.types.is_integer(kind) else joined


class TableParts(TableColumns, ABC):
    """Parts of Arrow tables, one after the other.

    Attributes:
        bounds: int64 (parts + 1,), where each begins.
        view_bytes: what parts may hold together whose images one read gives as views: who keeps a single image
            keeps its part in memory. Images of further parts are copied.
    """

    bounds: np.ndarray
    view_bytes: float = math.inf

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @abstractmethod
    def _part(self, number: int, names: tuple[str, ...]) -> dict[str, StoredColumn]:
        """Columns of a part."""

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        parts: dict[str, list[Any]] = {name: [] for name in columns}
        num_viewed = 0
        for number, positions in by_part(indices, self.bounds):
            part, rows = self._part(number, columns), indices[positions] - self.bounds[number]
            for name in columns:
                parts[name].append(part[name].take(rows))
            if "image" in columns:
                num_viewed += part["image"].num_bytes
                if num_viewed > self.view_bytes:
                    images = parts["image"]
                    images[-1] = [None if image is None else bytes(image) for image in images[-1]]
        places = np.argsort(np.argsort(indices, kind="stable"))
        return {name: self.join(name, parts[name], places) for name in columns}


def _columns_of(path: str, schema: pa.Schema, image_column: str, target_column: str) -> dict[str, pa.Field]:
    """Name in the store → field in the file, `image` and `label` first; raises StoreError where those are none."""
    stored = stored_names(path, schema.names, {"image": image_column, "label": target_column})
    columns = {name: schema.field(place) for name, place in stored.items()}
    image = columns["image"].type
    if pa.types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image = image.field("bytes").type
    if not (pa.types.is_binary(image) or pa.types.is_large_binary(image)):
        raise StoreError(
            f"{path}, column {image_column!r} has type {columns['image'].type}; an image is binary, "
            "large_binary or struct{bytes, path}"
        )
    if "label" in columns and not is_target(columns["label"].type):
        raise StoreError(
            f"{path}, column {target_column!r} has type {columns['label'].type}; a label is a number, or a "
            "list of numbers; set target_column"
        )
    return columns


def class_names(schema: pa.Schema, target_column: str) -> tuple[str, ...] | None:
    """The names in the label's ClassLabel of Hugging Face, None without one; older files leave out its `_type`."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][target_column]
        if feature.get("_type", "ClassLabel") != "ClassLabel":
            return None
        return tuple(str(name) for name in feature["names"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def is_target(kind: pa.DataType) -> bool:
    """Whether a column of this type may be labels."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return is_target(kind.value_type)
    return _is_number(kind) or pa.types.is_boolean(kind) or _array_of(kind) is not None


def _array_of(kind: pa.DataType) -> tuple[pa.DataType, tuple[int, ...]] | None:
    """The type and the shape of the numbers that each value of a column is; None if they are no arrays of one."""
    shape: tuple[int, ...] = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        order = kind.permutation
        if order is not None and list(order) != sorted(order):  # rare, and its axes lie otherwise than they are
            return None
        kind, shape = kind.value_type, tuple(kind.shape)
    while pa.types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, (*shape, kind.list_size)
    known = _is_number(kind) or pa.types.is_boolean(kind)
    return (kind, shape) if shape and known else None


def _chunked_taker(column: pa.ChunkedArray) -> Callable[[np.ndarray], list[memoryview | None]]:
    """What takes rows of a column of images."""
    takers = list(map(image_taker, column.chunks))
    if len(takers) == 1:
        return takers[0]
    bounds = np.cumsum([0, *map(len, column.chunks)])

    def take(rows: np.ndarray) -> list[memoryview | None]:
        images: list[memoryview | None] = [None] * len(rows)
        for number, positions in by_part(rows, bounds):
            of_chunk = takers[number](rows[positions] - bounds[number])
            for position, image in zip(positions.tolist(), of_chunk, strict=True):
                images[position] = image
        return images

    return take


def image_taker(images: pa.Array) -> Callable[[np.ndarray], list[memoryview | None]]:
    """What takes images of an array of binaries, as views; None for those that are null."""
    _, offset_buffer, contents = images.buffers()
    content = memoryview(contents or b"").cast("B").toreadonly()
    dtype = np.dtype(np.int64 if pa.types.is_large_binary(images.type) else np.int32)
    # An array of no rows need have no buffers.
    offsets = np.frombuffer(offset_buffer or bytes(dtype.itemsize), dtype)[images.offset :]
    is_null = np.asarray(images.is_null()) if images.null_count else None

    def take(rows: np.ndarray) -> list[memoryview | None]:
        bounds = zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
        views: list[memoryview | None] = [content[start:end] for start, end in bounds]
        if is_null is not None:
            for position in np.flatnonzero(is_null[rows]).tolist():
                views[position] = None
        return views

    return take


def _in_place(column: pa.ChunkedArray, shape: tuple[int, ...]) -> np.ndarray | None:
    """The numbers of a column, (rows, *shape), where they lie; None: in several chunks, packed, or with nulls."""
    values = _flat(column.chunk(0)) if column.num_chunks == 1 else None
    if values is None or not _is_number(values.type):
        return None
    return np.asarray(values.to_numpy().reshape(len(column), *shape))


def _flat(values: pa.Array) -> pa.Array | None:
    """The numbers in an array of numbers, or of lists of them; None where one is null."""
    while not values.null_count and pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    return None if values.null_count else values


def _with_none(column: pa.ChunkedArray) -> list[Any]:
    """Values of which some are null, or hold a null."""
    if not _is_number(column.type):
        values = column.to_pylist()
        return [None if value is None or _holds_none(value) else np.asarray(value) for value in values]
    dtype = column.type.to_pandas_dtype()
    return [None if value is None else dtype(value) for value in column.to_pylist()]


def _holds_none(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_holds_none, value)))


def _python_value(scalar: pa.Scalar) -> Any:
    """Return the value; None for text that is no UTF-8, as from a damaged record, and for a list over 512 MiB."""
    if isinstance(scalar, pa.ListScalar | pa.LargeListScalar) and _num_bytes_of(scalar.values) > MAX_SAMPLE_BYTES:
        return None
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return None


def _num_bytes_of(values: pa.Array | None) -> int:
    """The most that values may take in Python, where each of a dictionary's may be all that is in it."""
    if values is None:
        return 0
    if pa.types.is_nested(values.type):
        return sum(map(_num_bytes_of, values.flatten() if pa.types.is_struct(values.type) else [values.flatten()]))
    if pa.types.is_dictionary(values.type):
        return len(values) * values.dictionary.nbytes
    return values.nbytes
