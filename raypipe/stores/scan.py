"""Columns of a whole store, except its images, 65,536 samples at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raypipe.errors import ConfigError
from raypipe.stores.base import Columns, Store, missing

SIZE_COLUMNS = ("width", "height")
"""Size of an image in pixels, int64; -1 if its header cannot be read. `raypipe convert` writes them."""

_CHUNK = 1 << 16


def scan(store: Store, columns: tuple[str, ...], setting: str) -> Iterator[Columns]:
    """Yield the values of columns in stored order, in parts.

    Args:
        setting: the setting that names the columns, for the error.

    Raises:
        ConfigError: the store lacks a column, or a column is `image`.
    """
    for name in columns:
        if name == "image" or name not in store.columns:
            others = [other for other in store.columns if other != "image"]
            if name in SIZE_COLUMNS:
                add = "; `raypipe convert` adds it"
            else:
                add = ""
            raise ConfigError(f"{missing(store.address, name, others, setting)}{add}")
    for first in range(0, len(store), _CHUNK):
        yield store.read(np.arange(first, min(len(store), first + _CHUNK)), columns)


def numbers_of(store: Store, column: str, setting: str) -> np.ndarray:
    """Return a column of numbers, (N,); raise ConfigError if it has other values."""
    parts = []
    for part in scan(store, (column,), setting):
        values = part[column]
        if isinstance(values, list) and all(
            isinstance(value, int | float | np.number | None) for value in values
        ):
            values = np.array([np.nan if value is None else value for value in values])
        if not (
            isinstance(values, np.ndarray)
            and values.dtype.kind in "iufb"
            and values.ndim == 1
        ):
            raise ConfigError(
                f"{setting} must name a column of numbers, got {column!r} of {store.address}"
            )
        parts.append(values)
    return np.concatenate(parts) if parts else np.empty(0)
