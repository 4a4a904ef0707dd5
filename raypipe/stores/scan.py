"""Columns of a whole store, a few thousand samples at a time, but never its images."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raypipe.errors import ConfigError
from raypipe.stores.base import Columns, Store

_CHUNK = 1 << 16


def scan(store: Store, columns: tuple[str, ...], setting: str) -> Iterator[Columns]:
    """Values of columns, in stored order, in parts.

    Args:
        setting: that names the columns, for the error.

    Raises:
        ConfigError: the store lacks one, or it is the images'.
    """
    for name in columns:
        if name == "image" or name not in store.columns:
            others = ", ".join(each for each in store.columns if each != "image")
            raise ConfigError(
                f"{setting} names {name!r}; the columns that {store.address} has for it are: {others}"
            )
    for first in range(0, len(store), _CHUNK):
        yield store.read(np.arange(first, min(len(store), first + _CHUNK)), columns)


def numbers_of(store: Store, column: str, setting: str) -> np.ndarray:
    """A column of numbers, (N,); raises ConfigError where it is none."""
    parts = []
    for found in scan(store, (column,), setting):
        values = found[column]
        if isinstance(values, list) and all(isinstance(value, int | float | np.number | None) for value in values):
            values = np.array([np.nan if value is None else value for value in values])  # some have no value
        if not (isinstance(values, np.ndarray) and values.dtype.kind in "iufb" and values.ndim == 1):
            raise ConfigError(f"{setting} names {column!r} of {store.address}, which is no column of numbers")
        parts.append(values)
    return np.concatenate(parts) if parts else np.empty(0)
