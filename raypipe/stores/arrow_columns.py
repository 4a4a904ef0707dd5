"""Columns of Arrow tables as columns of a store: which of them are image and label, and their values.

An encoded file, such as an image or a mask, is bytes, of any of Arrow's physical types for bytes, or Hugging
Face's `struct{bytes, path}` of such. Each image is a view of its column's buffer, so one image keeps the whole
buffer in memory.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import StoreError
from raypipe.stores.base import MAX_SAMPLE_BYTES, by_part, stored_names
from raypipe.stores.numbers import labels_of

_LIST_SCALARS = (
    pa.ListScalar | pa.LargeListScalar | pa.ListViewScalar | pa.LargeListViewScalar
)


class StoredColumn(NamedTuple):
    """A column of a part of a store.

    Attributes:
        take: rows, int64 (n,), → values of these rows.
        num_bytes: size of its buffers.
    """

    take: Callable[[np.ndarray], Any]
    num_bytes: int


class TableColumns:
    """The columns of a store whose files have one Arrow schema.

    Args:
        schemas: path, for errors, and schema of each file; at least one.
        image_column: the column that becomes `image`.
        target_column: the column that becomes `label`; empty = `label`, if it has the type of a target.

    Attributes:
        fields: name in the store → field in the files, `image` and `label` first.
        leaves: name in the store → which part of a Hugging Face file, "bytes" or "path", the column is. The paths
            of the files of column X, other than the image, are a column `X.path`.

    Raises:
        StoreError: schemas differ, or lack the image or the label column.
    """

    def __init__(
        self,
        schemas: Sequence[tuple[str, pa.Schema]],
        image_column: str,
        target_column: str,
    ) -> None:
        first_path, first = schemas[0]
        self.classes = class_names(first, target_column)
        for path, schema in schemas[1:]:
            if (
                not schema.equals(first)
                or class_names(schema, target_column) != self.classes
            ):
                lines = [
                    set(each.remove_metadata().to_string().split("\n"))
                    for each in (schema, first)
                ]
                differing = (
                    ", ".join(sorted(lines[0] ^ lines[1]))
                    or "the order of columns, or class names"
                )
                raise StoreError(
                    f"{path} and {first_path} differ in schema or classes ({differing:.300}): a store needs one "
                    "schema"
                )
        self.fields = _columns_of(first_path, first, image_column, target_column)
        self.leaves: dict[str, str] = {}
        for name, field in list(self.fields.items()):
            if name == "image" and pa.types.is_struct(field.type):
                self.leaves[name] = "bytes"
            elif _is_file(field.type):
                self.leaves[name] = "bytes"
                if f"{name}.path" not in first.names:
                    self.leaves[f"{name}.path"] = "path"
                    self.fields[f"{name}.path"] = field
        self.columns = tuple(self.fields)
        self.label_is_class = "label" not in self.fields or pa.types.is_integer(
            self.fields["label"].type
        )
        self._needs_labels = bool(target_column)

    def stored_path(self, name: str) -> str:
        """Return the path of a column in its file's schema: the field, or a part of its struct."""
        return ".".join(filter(None, (self.fields[name].name, self.leaves.get(name))))

    def opened(self, name: str, column: pa.ChunkedArray, path: str) -> StoredColumn:
        """Return a file's column as one to take rows from."""
        if leaf := self.leaves.get(name):
            column = pc.struct_field(column, leaf)
        return StoredColumn(
            self._taker(name, column, path), column.get_total_buffer_size()
        )

    def element_type(self, name: str) -> str | None:
        """Return the type of a column's numbers, or of those in its lists, "int64", "float64" or "bool", by the
        schema; None if it has others."""
        if name in self.fields and name not in self.leaves:
            kind = self.fields[name].type
        else:
            kind = pa.null()
        while _is_list(kind):
            kind = kind.value_type
        if pa.types.is_boolean(kind):
            return "bool"
        if pa.types.is_integer(kind):
            return "int64"
        return "float64" if pa.types.is_floating(kind) else None

    def _taker(
        self, name: str, column: pa.ChunkedArray, path: str
    ) -> Callable[[np.ndarray], Any]:
        """Return a function that takes rows of a column.

        It returns numbers, and arrays of one shape, as an array; other values, and numbers with nulls among them,
        as a list. A null label raises StoreError.
        """
        if name == "image":
            return _chunked_taker(column)
        if self.leaves.get(name) == "bytes":
            take = _chunked_taker(column)
            return lambda rows: [
                None if view is None else bytes(view) for view in take(rows)
            ]
        array_of = _array_of(column.type)
        if not _is_number(column.type) and array_of is None:
            return lambda rows: [_python_value(column[row]) for row in rows.tolist()]
        if isinstance(column.type, pa.BaseExtensionType):
            column = pa.chunked_array(
                [chunk.storage for chunk in column.chunks], column.type.storage_type
            )
        shape = () if array_of is None else array_of[1]
        numbers = _in_place(column, shape)
        if numbers is not None:
            return numbers.__getitem__
        return partial(self._numbers, name, column, shape, path)

    def _numbers(
        self,
        name: str,
        column: pa.ChunkedArray,
        shape: tuple[int, ...],
        path: str,
        rows: np.ndarray,
    ) -> np.ndarray | list[Any]:
        """Return rows of a column of numbers, or of arrays of numbers."""
        column = column.take(pa.array(rows))
        if name == "label" and column.null_count and self._needs_labels:
            label = self.fields[name].name
            raise StoreError(
                f"{path}, column {label!r} has a null label, and raypipe makes up none: write the file again "
                f"without such rows (table.filter(pyarrow.compute.is_valid(table[{label!r}]))), or set "
                "target_column to '' if no labels are needed"
            )
        values = _flat(column.combine_chunks())
        if values is None:
            return _with_none(column)
        return np.asarray(
            values.to_numpy(zero_copy_only=False).reshape(len(rows), *shape)
        )

    def join(self, name: str, parts: list[Any], places: np.ndarray) -> Any:
        """Join the parts and restore the requested order: value i is value places[i] of the joined parts."""
        if name in self.leaves:
            kind = pa.null()
        else:
            kind = self.fields[name].type
        array_of = _array_of(kind)
        if (not _is_number(kind) and array_of is None) or any(
            isinstance(part, list) for part in parts
        ):
            values = list(itertools.chain.from_iterable(parts))
            return [values[place] for place in places.tolist()]
        value_type, shape = array_of or (kind, ())
        nothing = np.empty((0, *shape), value_type.to_pandas_dtype())
        joined = np.concatenate(parts)[places] if parts else nothing
        if name == "label" and pa.types.is_integer(kind):
            return labels_of(joined)
        return joined


def _columns_of(
    path: str, schema: pa.Schema, image_column: str, target_column: str
) -> dict[str, pa.Field]:
    """Return name in the store → field in the file, image and label first; raise StoreError for wrong types."""
    if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise StoreError(
            f"{path} has several columns called {twice[0]!r}: write it with one name for each"
        )
    stored = stored_names(
        path, schema.names, {"image": image_column, "label": target_column or "label"}
    )
    columns = {name: schema.field(place) for name, place in stored.items()}
    image = columns["image"].type
    if pa.types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image = image.field("bytes").type
    if not _is_bytes(image):
        raise StoreError(
            f"{path}, column {image_column!r} has type {columns['image'].type}; images must be bytes (binary, "
            "large_binary, binary_view, fixed_size_binary, or a dictionary of these) or struct{bytes, path}"
        )
    if "label" in columns and not is_target(columns["label"].type):
        if not target_column:
            del columns["label"]
            return columns
        raise StoreError(
            f"{path}, column {target_column!r} has type {columns['label'].type}; labels must be numbers, or lists "
            "of numbers: set target_column to another column, or to '' for batches without a target, or number "
            "the classes"
        )
    return columns


def _is_bytes(kind: pa.DataType) -> bool:
    """Return whether values are bytes, in any of Arrow's physical types."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    views = pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or views


def _is_file(kind: pa.DataType) -> bool:
    """Return whether a type is Hugging Face's of an encoded file, struct{bytes, path}."""
    if not pa.types.is_struct(kind) or {field.name for field in kind} != {
        "bytes",
        "path",
    }:
        return False
    return _is_bytes(kind.field("bytes").type)


def _is_list(kind: pa.DataType) -> bool:
    views = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or views
    )


def class_names(schema: pa.Schema, target_column: str) -> tuple[str, ...] | None:
    """Return the names in the label's Hugging Face ClassLabel; None without one. Older files omit its `_type`."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"][
            "features"
        ][target_column]
        if feature.get("_type", "ClassLabel") != "ClassLabel":
            return None
        return tuple(str(name) for name in feature["names"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def is_target(kind: pa.DataType) -> bool:
    """Return whether labels may have this type."""
    if _is_list(kind):
        return is_target(kind.value_type)
    return _is_number(kind) or pa.types.is_boolean(kind) or _array_of(kind) is not None


def _array_of(kind: pa.DataType) -> tuple[pa.DataType, tuple[int, ...]] | None:
    """Return type and shape of a column's arrays; None if its values are not arrays of numbers of one shape."""
    shape: tuple[int, ...] = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        order = kind.permutation
        if order is not None and list(order) != sorted(
            order
        ):  # rare: the axes are stored in another order
            return None
        kind, shape = kind.value_type, tuple(kind.shape)
    while pa.types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, (*shape, kind.list_size)
    known = _is_number(kind) or pa.types.is_boolean(kind)
    return (kind, shape) if shape and known else None


def _chunked_taker(
    column: pa.ChunkedArray,
) -> Callable[[np.ndarray], list[memoryview | None]]:
    """Return a function that takes rows of a column of images."""
    takers = list(map(image_taker, column.chunks))
    if len(takers) == 1:
        return takers[0]
    bounds = np.cumsum([0, *map(len, column.chunks)])

    def take(rows: np.ndarray) -> list[memoryview | None]:
        images: list[memoryview | None] = [None] * len(rows)
        for number, positions in by_part(rows, bounds):
            chunk_images = takers[number](rows[positions] - bounds[number])
            for position, image in zip(positions.tolist(), chunk_images, strict=True):
                images[position] = image
        return images

    return take


def image_taker(images: pa.Array) -> Callable[[np.ndarray], list[memoryview | None]]:
    """Return a function that takes images of an array of bytes, as views; None for nulls."""
    if pa.types.is_dictionary(
        images.type
    ):  # decoded, it might take far more memory than the file
        return _dictionary_taker(images)
    if pa.types.is_binary_view(images.type) or pa.types.is_fixed_size_binary(
        images.type
    ):
        images = images.cast(pa.large_binary())
    _, offset_buffer, contents = images.buffers()
    content = memoryview(contents or b"").cast("B").toreadonly()
    dtype = np.dtype(np.int64 if pa.types.is_large_binary(images.type) else np.int32)
    # An array without rows may have no buffers.
    offsets = np.frombuffer(offset_buffer or bytes(dtype.itemsize), dtype)[
        images.offset :
    ]
    if images.null_count:
        is_null = np.asarray(images.is_null())
    else:
        is_null = None

    def take(rows: np.ndarray) -> list[memoryview | None]:
        bounds = zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
        views: list[memoryview | None] = [content[start:end] for start, end in bounds]
        if is_null is not None:
            for position in np.flatnonzero(is_null[rows]).tolist():
                views[position] = None
        return views

    return take


def _dictionary_taker(
    images: pa.DictionaryArray,
) -> Callable[[np.ndarray], list[memoryview | None]]:
    is_null = np.asarray(images.indices.is_null())
    places = images.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    take_value = image_taker(images.dictionary)

    def take(rows: np.ndarray) -> list[memoryview | None]:
        views: list[memoryview | None] = [None] * len(rows)
        positions = np.flatnonzero(~is_null[rows])
        for position, view in zip(
            positions.tolist(), take_value(places[rows[positions]]), strict=True
        ):
            views[position] = view
        return views

    return take


def _in_place(column: pa.ChunkedArray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return a column's numbers, (rows, *shape), as a view; None for several chunks, packed bits, or nulls."""
    values = _flat(column.chunk(0)) if column.num_chunks == 1 else None
    if values is None or not _is_number(values.type):
        return None
    return np.asarray(values.to_numpy().reshape(len(column), *shape))


def _flat(values: pa.Array) -> pa.Array | None:
    """Return the numbers in an array of numbers, or of lists of numbers; None if one is null."""
    while not values.null_count and pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    return None if values.null_count else values


def _with_none(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values, None for those that are or contain a null."""
    if not _is_number(column.type):
        values = column.to_pylist()
        return [
            None if value is None or _holds_none(value) else np.asarray(value)
            for value in values
        ]
    dtype = column.type.to_pandas_dtype()
    return [None if value is None else dtype(value) for value in column.to_pylist()]


def _holds_none(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(map(_holds_none, value)))


def _python_value(scalar: pa.Scalar) -> Any:
    """Return the value; None for text that is not UTF-8, as in a damaged record, and for a list over 512 MiB."""
    if (
        isinstance(scalar, _LIST_SCALARS)
        and _num_bytes_of(scalar.values) > MAX_SAMPLE_BYTES
    ):
        return None
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return None


def _num_bytes_of(values: pa.Array | None) -> int:
    """Return an upper bound of the bytes of values in Python: each dictionary index may be the largest entry."""
    if values is None:
        return 0
    if pa.types.is_nested(values.type):
        return sum(
            map(
                _num_bytes_of,
                values.flatten()
                if pa.types.is_struct(values.type)
                else [values.flatten()],
            )
        )
    if pa.types.is_dictionary(values.type):
        return len(values) * values.dictionary.nbytes
    return values.nbytes
