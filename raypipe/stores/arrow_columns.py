"""Columns of Arrow tables as columns of a store: which become image and label, and their values.

Two layouts of images are understood: binary, and that of Hugging Face, `struct{bytes: binary, path: string}`.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import StoreError
from raypipe.stores.base import MAX_SAMPLE_BYTES, Columns, by_part, stored_names
from raypipe.stores.numbers import labels_of


class TableColumns:
    """The columns of a store whose files have one Arrow schema.

    Args:
        schemas: path, for errors, and schema of each file; one at least.
        image_column: the column that becomes `image`.
        label_column: the column that becomes `label`.

    Attributes:
        fields: name in the store → field in the files, `image` and `label` first.

    Raises:
        StoreError: schemas differ, or image and label are not in them.
    """

    def __init__(self, schemas: Sequence[tuple[str, pa.Schema]], image_column: str, label_column: str) -> None:
        first_path, first = schemas[0]
        self.classes = class_names(first, label_column)
        for path, schema in schemas[1:]:
            if not schema.equals(first) or class_names(schema, label_column) != self.classes:
                raise StoreError(f"{path} and {first_path} differ in schema or classes: a store has one schema")
        self.fields = _columns_of(first_path, first, image_column, label_column)
        self.columns = tuple(self.fields)
        self.label_is_class = "label" not in self.fields or pa.types.is_integer(self.fields["label"].type)

    def is_hf_image(self, name: str) -> bool:
        """Whether a column's bytes are in a struct."""
        return name == "image" and pa.types.is_struct(self.fields[name].type)

    def take(self, name: str, column: pa.ChunkedArray, rows: np.ndarray, path: str) -> Any:
        """Rows of a column as it stands in a file: numbers, and arrays of one shape, as arrays, others as lists.

        Numbers of which some are null are a list too; a null label raises StoreError.
        """
        if self.is_hf_image(name):
            column = pc.struct_field(column, "bytes")
        array_of = _array_of(column.type)
        if not _is_number(column.type) and array_of is None:
            return [_python_value(column[row]) for row in rows.tolist()]
        if isinstance(column.type, pa.BaseExtensionType):
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        column = column.take(pa.array(rows))
        if name == "label" and column.null_count:
            raise StoreError(
                f"{path}, column {self.fields[name].name!r}: a label is null; training on a made-up one would not "
                "be noticed"
            )
        if array_of is None:
            return _with_none(column) if column.null_count else column.to_numpy()
        values: Any = column.combine_chunks()
        while pa.types.is_fixed_size_list(values.type) or pa.types.is_list(values.type):
            if values.null_count:
                return _with_none(column)
            values = values.flatten()
        if values.null_count:
            return _with_none(column)
        return values.to_numpy(zero_copy_only=False).reshape(len(rows), *array_of[1])

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
    """Parts of Arrow tables, one after the other; `bounds`, int64 (parts + 1,), has where each begins."""

    bounds: np.ndarray

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @abstractmethod
    def _part(self, number: int, names: tuple[str, ...]) -> tuple[str, dict[str, pa.ChunkedArray]]:
        """The file of a part, for errors, and columns of the part."""

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        parts: dict[str, list[Any]] = {name: [] for name in columns}
        for number, positions in by_part(indices, self.bounds):
            path, part = self._part(number, columns)
            for name in columns:
                parts[name].append(self.take(name, part[name], indices[positions] - self.bounds[number], path))
        places = np.argsort(np.argsort(indices, kind="stable"))
        return {name: self.join(name, parts[name], places) for name in columns}


def _columns_of(path: str, schema: pa.Schema, image_column: str, label_column: str) -> dict[str, pa.Field]:
    """Name in the store → field in the file, `image` and `label` first; raises StoreError where those are none."""
    stored = stored_names(path, schema.names, {"image": image_column, "label": label_column})
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
            f"{path}, column {label_column!r} has type {columns['label'].type}; a label is a number, or a list of "
            "numbers; set label_column"
        )
    return columns


def class_names(schema: pa.Schema, label_column: str) -> tuple[str, ...] | None:
    """The names in the label's ClassLabel of Hugging Face, None without one; older files leave out its `_type`."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label_column]
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
