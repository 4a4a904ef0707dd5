"""Columns of a whole store, a few thousand samples at a time, but never its images."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from raypipe.errors import ConfigError
from raypipe.stores.base import Columns, Store
from raypipe.stores.joined import JoinedStore
from raypipe.stores.sizes import SIZE_COLUMNS, read_sizes

_CHUNK = 1 << 16


def scan(store: Store, columns: tuple[str, ...], setting: str) -> Iterator[Columns]:
    """Values of columns, in stored order, in parts; sizes may stand beside the store, see `raypipe.stores.sizes`.

    Args:
        setting: that names the columns, for the error.

    Raises:
        ConfigError: the store lacks one, or it is the images'.
    """
    lacking = set(columns) - set(store.columns)
    if lacking & set(SIZE_COLUMNS) and isinstance(store, JoinedStore):
        for part in store.parts.values():
            yield from scan(part, columns, setting)
        return
    beside = read_sizes(store) if lacking & set(SIZE_COLUMNS) else {}
    for name in columns:
        if name == "image" or name not in (*store.columns, *beside):
            others = ", ".join(each for each in store.columns if each != "image")
            add = (
                f"; `raypipe inspect {store.address} --add-sizes` finds out sizes" if name in SIZE_COLUMNS else ""
            )
            raise ConfigError(
                f"{setting} names {name!r}; the columns that {store.address} has for it are: {others}{add}"
            )
    inside = tuple(name for name in columns if name in store.columns)
    for first in range(0, len(store), _CHUNK):
        stop = min(len(store), first + _CHUNK)
        found = store.read(np.arange(first, stop), inside) if inside else {}
        yield {name: found[name] if name in found else beside[name][first:stop] for name in columns}


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
