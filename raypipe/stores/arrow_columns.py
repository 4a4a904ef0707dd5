"""Columns of Arrow tables as columns of a store: which become image and label, and their values.

Two layouts of images are understood: binary, and that of Hugging Face, `struct{bytes: binary, path: string}`.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.stores.base import MAX_SAMPLE_BYTES


def columns_of(path: str, schema: pa.Schema, image_column: str, label_column: str) -> dict[str, pa.Field]:
    """Name in the store → field in the file, `image` and `label` first; raises StoreError where those are none."""
    there = ", ".join(schema.names)
    renamed = {"image": image_column, "label": label_column}
    columns: dict[str, pa.Field] = {}
    for name, stored in renamed.items():
        if stored in schema.names:
            columns[name] = schema.field(stored)
        elif name == "image" or stored != "label":
            raise StoreError(f"{path} has no column {stored!r} for {name}, only: {there}; set {name}_column")
    image = columns["image"].type
    if pa.types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image = image.field("bytes").type
    if not (pa.types.is_binary(image) or pa.types.is_large_binary(image)):
        raise StoreError(
            f"{path}, column {image_column!r} has type {columns['image'].type}; an image is binary, "
            "large_binary or struct{bytes, path}"
        )
    if "label" in columns and not pa.types.is_integer(columns["label"].type):
        raise StoreError(
            f"{path}, column {label_column!r} has type {columns['label'].type}; a label is an integer; "
            "set label_column"
        )
    for field in schema:
        if field.name not in renamed.values():
            columns.setdefault(field.name, field)
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


def is_hf_image(name: str, column: pa.Field) -> bool:
    return name == "image" and pa.types.is_struct(column.type)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def take(column: pa.ChunkedArray, rows: np.ndarray, is_label: bool, where: str) -> Any:
    """Return the rows of a column: numbers as an array, other values as a list."""
    if not _is_number(column.type):
        return [_python_value(column[row]) for row in rows.tolist()]
    taken = column.take(pa.array(rows))
    if is_label and taken.null_count:
        raise StoreError(f"{where}: a label is null; training on a made-up one would not be noticed")
    return taken.to_numpy()


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


def join(parts: list[Any], places: np.ndarray, kind: pa.DataType, is_label: bool) -> Any:
    """Put the parts, one per group, together as they were asked for: value i is number places[i] of them all."""
    if not _is_number(kind):
        values = list(itertools.chain.from_iterable(parts))
        return [values[place] for place in places.tolist()]
    joined = np.concatenate(parts)[places] if parts else np.empty(0, kind.to_pandas_dtype())
    return joined.astype(np.int64) if is_label else joined
