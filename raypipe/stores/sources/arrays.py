"""Arrays of a whole data set, one row for each sample: HDF5, .npz, and .pt of tensors.

    images   encoded bytes (N), or pixels, uint8 (N, H, W, 3), (N, H, W, 1), (N, H, W), (N, 3, H, W), (N, 1, H, W)
    labels   numbers (N), (N, 1), or (N, …)
    others   of N rows: columns

The usual names are found, such as images and labels, x and y, train_images and train_labels.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.read_limit import check_read
from raypipe.stores.base import (
    MAX_SAMPLE_BYTES,
    RENAMED,
    ColumnValues,
    others,
    stored_names,
)
from raypipe.stores.sources.format_source import (
    MAX_CHUNK_BYTES,
    Asked,
    Source,
    explained,
)

logger = logging.getLogger(__name__)

_IMAGES = {"image", "images", "img", "imgs", "x", "data", "pixels"}
_LABELS = {"label", "labels", "target", "targets", "y", "class", "classes"}
_SPLIT = re.compile(r"(.*?)_?(train|training|val|valid|validation|test)(?:_set)?_?(.*)")
_CHANNELS = (1, 3)
_MAX_ROWS = 1024


@dataclass(frozen=True)
class ArrayRows:
    """An array of a file.

    Attributes:
        kind: "numbers", "bytes" or "text"; or, in other words, why its values cannot be read.
        shape: the samples are the first axis.
        dtype: type of values of one size; None = their sizes differ.
        read: some of the first axis → these rows, which are asked for once, in order; None = they cannot be read.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None = None
    read: Callable[[slice], Any] | None = None

    @property
    def num(self) -> int:
        return self.shape[0] if self.shape else 0

    @property
    def row_bytes(self) -> int:
        if self.dtype is not None:
            return self.dtype.itemsize * math.prod(self.shape[1:])
        return MAX_CHUNK_BYTES  # rows whose sizes differ are read one by one

    def __str__(self) -> str:
        return f"{self.dtype if self.kind == 'numbers' else self.kind} {self.shape}"


def arrays_source(where: str, arrays: Mapping[str, ArrayRows], asked: Asked) -> Source:
    """Return the samples of arrays by name.

    Args:
        where: the file, for errors.
    """
    names = _names_of(where, arrays, asked)
    images = arrays[names["image"]]
    as_hwc = _axes_of(where, names["image"], images)
    label = arrays.get(names.get("label", ""))
    if label is not None and (label.kind != "numbers" or label.num != images.num):
        raise StoreError(
            f"{where}: {names['label']!r} is {label}; labels are numbers, one row for each of the {images.num} "
            "images: set store.target_column"
        )
    columns = {column: arrays[name] for column, name in names.items()}
    for name in others(arrays, names):
        rows = arrays[name]
        column = name.replace("/", ".")
        is_of_images = rows.num == images.num and rows.row_bytes < MAX_SAMPLE_BYTES
        if rows.read is None or not is_of_images:
            logger.warning(
                "%s: left out, as they have no row for each image: %s (%s)",
                where,
                name,
                rows,
            )
        elif column in columns:
            raise StoreError(
                f"{where}: two arrays would be the column {column!r}, {name!r} among them: rename one"
            )
        else:
            columns[column] = rows
    wide = [
        column
        for column, rows in columns.items()
        if _row_shape(column, rows) and column != "image"
    ]
    samples = _samples(where, columns, as_hwc)
    return Source(samples, num_samples=images.num, arrays=wide)


def _samples(
    where: str, columns: Mapping[str, ArrayRows], as_hwc: tuple[int, ...]
) -> Iterator[ColumnValues]:
    row_bytes = sum(rows.row_bytes for rows in columns.values())
    check_read(f"{where}: a row of {', '.join(columns)}", row_bytes)
    num_rows = columns["image"].num
    step = max(1, min(_MAX_ROWS, MAX_CHUNK_BYTES // row_bytes))
    for start in range(0, num_rows, step):
        stop = min(num_rows, start + step)
        with explained(f"{where}, rows {start} to {stop - 1},"):
            values = [
                rows.read(slice(start, stop)) for rows in columns.values() if rows.read
            ]
        for of_sample in zip(*values, strict=True):
            sample = {
                column: _value(column, rows, value)
                for (column, rows), value in zip(
                    columns.items(), of_sample, strict=True
                )
            }
            if as_hwc:
                sample["image"] = np.transpose(sample["image"], as_hwc)
            yield sample


def _value(column: str, rows: ArrayRows, value: Any) -> Any:
    if rows.kind == "text":
        return value if isinstance(value, str) else bytes(value).decode()
    if rows.kind == "bytes":
        return bytes(value)
    if column == "image":
        return value
    return np.asarray(value).reshape(_row_shape(column, rows))[()]


def _row_shape(column: str, rows: ArrayRows) -> tuple[int, ...]:
    """Return the shape of a column's values; a label of one number is a number."""
    shape = rows.shape[1:]
    return () if column == "label" and math.prod(shape) == 1 else shape


def _axes_of(where: str, name: str, images: ArrayRows) -> tuple[int, ...]:
    """Return the order of axes that makes pixels (H, W, C); empty if they are so, or are encoded."""
    shape = images.shape
    if images.kind == "bytes" and len(shape) == 1:
        return ()
    if (
        images.kind == "numbers"
        and images.dtype == np.uint8
        and images.row_bytes <= MAX_SAMPLE_BYTES
        and images.num
    ):
        if len(shape) == 3 or (len(shape) == 4 and shape[3] in _CHANNELS):
            return ()
        if len(shape) == 4 and shape[1] in _CHANNELS:
            return (1, 2, 0)
    raise StoreError(
        f"{where}: {name!r} is {images}; images are encoded bytes (N), or uint8 (N, H, W, C), (N, C, H, W) or "
        "(N, H, W), where C is 1 or 3: set store.image_column, or yield such samples from your own function, "
        "MODULE:NAME"
    )


def _names_of(
    where: str, arrays: Mapping[str, ArrayRows], asked: Asked
) -> dict[str, str]:
    """Return `image`, and `label` if there is one, → the name of its array.

    Raises:
        StoreError: a name does not exist, or several are as likely; the message lists all arrays.
    """
    kinds = {name: str(rows) for name, rows in arrays.items()}
    names: dict[str, str] = {}
    split: str | None = None
    for column, usual in (("image", _IMAGES), ("label", _LABELS)):
        likely = [
            name
            for name in arrays
            if (found := _split_of(name, usual)) and split in (None, found)
        ]
        name = getattr(asked, column)
        if name == column and len(likely) > 1:
            listed = ", ".join(f"{array} ({kind})" for array, kind in kinds.items())
            raise StoreError(
                f"{where} has several arrays that may be the {column}s: set store.{RENAMED[column]}; its "
                f"arrays are {listed:.1000}"
            )
        names |= stored_names(where, kinds, {column: name}, {column: likely})
        split = _split_of(names["image"], _IMAGES)
    return names


def _split_of(name: str, usual: set[str]) -> str | None:
    """Return the split that a usual name has in it, "all" for none; None for a name that is not usual."""
    plain = name.lower().replace("/", "_").strip("_")
    if plain in usual:
        return "all"
    match = _SPLIT.fullmatch(plain)
    if match and f"{match[1]}{match[3]}" in usual:
        return match[2]
    return None
