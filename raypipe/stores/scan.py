"""Columns of a whole store, except its images, 65,536 samples at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from raypipe.errors import ConfigError
from raypipe.stores.arrow_values import is_number
from raypipe.stores.base import NAME, Columns, Store, missing

SIZE_COLUMNS = ("width", "height")
"""Size of an image in pixels, int64; -1 if its header cannot be read. `raypipe convert` writes them."""

_CHUNK = 1 << 16
_NUM_MEASURED = 64


def scan(store: Store, columns: tuple[str, ...], setting: str) -> Iterator[Columns]:
    """Yield the values of columns in stored order, in parts.

    Args:
        setting: the setting that names the columns, for the error.

    Raises:
        ConfigError: the store lacks a column, or a column is `image`.
    """
    for name in columns:
        if name == "image" or name not in store.schema.names:
            allowed = [column for column in store.schema.names if column != "image"]
            add = "; `raypipe convert` adds it" if name in SIZE_COLUMNS else ""
            raise ConfigError(f"{missing(store.address, name, allowed, setting)}{add}")
    for first in range(0, len(store), _CHUNK):
        yield store.read(np.arange(first, min(len(store), first + _CHUNK)), columns)


def spread(num_rows: int, num: int) -> np.ndarray:
    """Return up to `num` rows, int64 (n,), evenly spread over all."""
    return np.unique(np.linspace(0, num_rows - 1, min(num_rows, num)).astype(np.int64))


def mean_image_bytes(store: Store) -> int:
    """Return the mean size of a store's images, by some that are spread over it; 0 if it has no samples."""
    images = store.read(spread(len(store), _NUM_MEASURED), ("image",))["image"]
    return sum(len(image or b"") for image in images) // max(1, len(images))


def sample_names(store: Store) -> Iterator[str | None]:
    """Yield the names of all samples; none of a store without a column `name`."""
    if NAME in store.schema.names:
        for columns in scan(store, (NAME,), ""):
            yield from columns[NAME]


def numbers_of(store: Store, column: str, setting: str) -> np.ndarray:
    """Return a column of numbers, (N,); raise ConfigError if it has other values."""
    if column in store.schema.names:
        kind = store.schema.field(column).type
        if not is_number(kind) and not pa.types.is_null(kind):
            raise ConfigError(
                f"{setting} must name a column of numbers, got {column!r} of {store.address}"
            )
    parts = [np.empty(0)]
    for columns in scan(store, (column,), setting):
        numbers = columns[column]
        if isinstance(numbers, list):
            numbers = np.array(
                [np.nan if value is None else value for value in numbers]
            )
        parts.append(numbers)
    return np.concatenate(parts[1:] or parts)
