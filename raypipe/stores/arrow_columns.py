"""Columns of Arrow tables as columns of a store: which of them are image and label, and images as views.

An encoded file, such as an image or a mask, is bytes, of any of Arrow's physical types for bytes, or Hugging
Face's `struct{bytes, path}` of such. Each image is a view of its column's buffer, so one image keeps the whole
buffer in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import StoreError
from raypipe.stores.arrow_values import (
    array_of,
    as_classes,
    is_bytes,
    is_integer,
    is_list,
    is_number,
)
from raypipe.stores.base import NAME, others, stored_names


class TableColumns:
    """The columns of a store whose files have one Arrow schema.

    Args:
        schemas: path, for errors, and schema of each file; at least one.
        image_column: the column that becomes `image`.
        target_column: the column that becomes `label`; empty = `label`, if it has the type of a target.

    Attributes:
        schema: the columns of the store, `image` and `label` first; integer labels are int64.
        fields: name in the store → field in the files.
        leaves: name in the store → which part of a Hugging Face file, "bytes" or "path", the column is. The paths
            of the files of column X are a column `X.path`, those of the images `name`.

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
                differing = ", ".join(
                    f"{field.name}: {field.type}"
                    for field in schema
                    if field not in list(first)
                )
                raise StoreError(
                    f"{path} and {first_path} differ in schema or classes "
                    f"({differing or 'the order of columns, or class names':.300}): a store needs one schema"
                )
        self.fields = _columns_of(first_path, first, image_column, target_column)
        self.leaves: dict[str, str] = {}
        for name, field in list(self.fields.items()):
            is_file = _is_file(field.type)
            is_image = name == "image" and pa.types.is_struct(field.type)
            if is_file or is_image:
                self.leaves[name] = "bytes"
            path = NAME if name == "image" else f"{name}.path"
            if is_file and path not in first.names:
                self.leaves[path] = "path"
                self.fields[path] = field
        self.schema = pa.schema(
            [
                (name, self._type_of(name, field.type))
                for name, field in self.fields.items()
            ]
        )
        self._needs_labels = bool(target_column)

    def _type_of(self, name: str, kind: pa.DataType) -> pa.DataType:
        if name in self.leaves:
            kind = kind.field(self.leaves[name]).type
        if name == "label" and is_integer(kind):
            return pa.int64()
        if pa.types.is_string_view(kind):  # few functions of pyarrow take views
            return pa.large_string()
        return pa.large_binary() if pa.types.is_binary_view(kind) else kind

    def stored_path(self, name: str) -> str:
        """Return the path of a column in its file's schema: the field, or a part of its struct."""
        return ".".join(filter(None, (self.fields[name].name, self.leaves.get(name))))

    def opened(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return a file's column as one of the store."""
        if leaf := self.leaves.get(name):
            return pc.struct_field(column, leaf)
        return column

    def table_of(self, table: pa.Table, path_of: Callable[[int], str]) -> pa.Table:
        """Return rows of opened columns besides the image, in the store's types.

        Args:
            path_of: row → the path of its file.

        Raises:
            StoreError: a label is null.
        """
        names = table.column_names
        if "label" in names:
            labels = table["label"]
            if labels.null_count and self._needs_labels:
                label = self.fields["label"].name
                path = path_of(int(np.flatnonzero(labels.is_null().to_numpy())[0]))
                raise StoreError(
                    f"{path}, column {label!r} has a null label, and raypipe makes up none: write the file again "
                    f"without such rows (table.filter(pyarrow.compute.is_valid(table[{label!r}]))), or set "
                    "target_column to '' if no labels are needed"
                )
            if is_integer(labels.type):
                place = names.index("label")
                table = table.set_column(place, "label", as_classes(labels))
        return table.cast(pa.schema([self.schema.field(name) for name in names]))


def _columns_of(
    path: str, schema: pa.Schema, image_column: str, target_column: str
) -> dict[str, pa.Field]:
    """Return name in the store → field in the file, image and label first; raise StoreError for wrong types."""
    if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise StoreError(
            f"{path} has several columns called {twice[0]!r}: write it with one name for each"
        )
    asked = {"image": image_column, "label": target_column or "label"}
    stored = stored_names(path, schema.names, asked)
    stored |= {name: name for name in others(schema.names, stored)}
    columns = {name: schema.field(column) for name, column in stored.items()}
    image = columns["image"].type
    if pa.types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image = image.field("bytes").type
    if not is_bytes(image):
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


def _is_file(kind: pa.DataType) -> bool:
    """Return whether a type is Hugging Face's of an encoded file, struct{bytes, path}."""
    if not pa.types.is_struct(kind) or {field.name for field in kind} != {
        "bytes",
        "path",
    }:
        return False
    return is_bytes(kind.field("bytes").type)


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


def is_target(kind: pa.DataType) -> bool:
    """Return whether labels may have this type."""
    if is_list(kind):
        return is_target(kind.value_type)
    return is_number(kind) or array_of(kind) is not None


def chunked_taker(
    column: pa.ChunkedArray,
) -> Callable[[np.ndarray], list[memoryview | None]]:
    """Return a function that takes rows of a column of images, as views; None for nulls."""
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.large_binary())  # all of them may exceed 2 GiB
    is_one = column.num_chunks == 1
    return image_taker(column.chunk(0) if is_one else column.combine_chunks())


def image_taker(images: pa.Array) -> Callable[[np.ndarray], list[memoryview | None]]:
    """Return a function that takes images of an array of bytes, as views; None for nulls, and for row -1."""
    if pa.types.is_dictionary(images.type):
        # decoded, it might take far more memory than the file
        places = images.indices.cast(pa.int64()).fill_null(-1).to_numpy()
        take_entries = image_taker(images.dictionary)
        return lambda rows: take_entries(places[rows])
    images = images.cast(pa.large_binary())  # of bytes with offsets, none are copied
    _, offset_buffer, contents = images.buffers()
    content = memoryview(contents or b"").cast("B").toreadonly()
    # An array without rows may have no buffers.
    offsets = np.frombuffer(offset_buffer or bytes(8), np.int64)[images.offset :]
    is_null = np.append(np.asarray(images.is_null()), True)  # behind: row -1

    def take(rows: np.ndarray) -> list[memoryview | None]:
        starts = offsets[rows].tolist()
        ends = offsets[rows + 1].tolist()
        return [
            None if without else content[start:end]
            for start, end, without in zip(
                starts, ends, is_null[rows].tolist(), strict=True
            )
        ]

    return take
