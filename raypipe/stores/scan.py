"""Columns of a whole store, except its images, 65,536 samples at a time; and image sizes in a separate file, for
stores without the columns `width` and `height`.

`raypipe add-sizes STORE` writes the sizes to `_NAME.sizes.parquet`, in the folder that contains the store; the
underscore hides the file from folders of shards. It has the columns `width` and `height`, int32, -1 for an image
of unknown size, and in its schema's metadata the store's fingerprint. Only `scan` reads the file, if it is asked
for a size that the store lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from raypipe.errors import ConfigError
from raypipe.storage.files import read_whole, write_bytes
from raypipe.storage.filesystem import is_remote, join, split
from raypipe.stores.base import Columns, FileStore, Store, missing
from raypipe.stores.joined import JoinedStore

SIZE_COLUMNS = ("width", "height")
"""Size of an image in pixels, int64; -1 if its header cannot be read."""

_KEY = b"raypipe.sizes_of"
_PATTERN = re.compile(r"[*{}]")
_CHUNK = 1 << 16


def scan(store: Store, columns: tuple[str, ...], setting: str) -> Iterator[Columns]:
    """Yield the values of columns in stored order, in parts; sizes may come from the file next to the store.

    Args:
        setting: the setting that names the columns, for the error.

    Raises:
        ConfigError: the store lacks a column, or a column is `image`.
    """
    lacking = set(columns) - set(store.columns)
    if lacking & set(SIZE_COLUMNS) and isinstance(store, JoinedStore):
        for part in store.parts.values():
            yield from scan(part, columns, setting)
        return
    sizes = read_sizes(store) if lacking & set(SIZE_COLUMNS) else {}
    for name in columns:
        if name == "image" or name not in (*store.columns, *sizes):
            others = [other for other in store.columns if other != "image"]
            add = f"; `raypipe add-sizes {store.address}` adds it" if name in SIZE_COLUMNS else ""
            raise ConfigError(f"{missing(store.address, name, others, setting)}{add}")
    inside = tuple(name for name in columns if name in store.columns)
    for first in range(0, len(store), _CHUNK):
        stop = min(len(store), first + _CHUNK)
        stored = store.read(np.arange(first, stop), inside) if inside else {}
        yield {name: stored[name] if name in stored else sizes[name][first:stop] for name in columns}


def numbers_of(store: Store, column: str, setting: str) -> np.ndarray:
    """Return a column of numbers, (N,); raise ConfigError if it has other values."""
    parts = []
    for part in scan(store, (column,), setting):
        values = part[column]
        if isinstance(values, list) and all(isinstance(value, int | float | np.number | None) for value in values):
            values = np.array([np.nan if value is None else value for value in values])
        if not (isinstance(values, np.ndarray) and values.dtype.kind in "iufb" and values.ndim == 1):
            raise ConfigError(f"{setting} must name a column of numbers, got {column!r} of {store.address}")
        parts.append(values)
    return np.concatenate(parts) if parts else np.empty(0)


def sizes_address(store: Store) -> str:
    """Return the address of a store's sizes; "" for a store that is not at a path or URI."""
    if not isinstance(store, FileStore):
        return ""
    folder, name = split(store.address)
    if is_remote(store.address) and folder.endswith(":/"):  # a whole bucket
        folder = store.address
    return join(folder, f"_{_PATTERN.sub('_', name)}.sizes.parquet")


def write_sizes(store: Store, sizes: np.ndarray) -> str:
    """Write a store's sizes, int (N, 2) of width and height, and return the address; raises like `write_bytes`."""
    import pyarrow.parquet as pq

    assert sizes.shape == (len(store), 2)
    columns = {name: pa.array(sizes[:, axis], pa.int32()) for axis, name in enumerate(SIZE_COLUMNS)}
    table = pa.table(columns).replace_schema_metadata({_KEY: store.fingerprint.encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    address = sizes_address(store)
    write_bytes(address, sink.getvalue().to_pybytes())
    return address


def read_sizes(store: Store) -> dict[str, np.ndarray]:
    """Return the columns of sizes, int64 (N,), from the file next to a store; empty without such a file.

    Raises:
        ConfigError: the file cannot be read, or belongs to other contents than the store's.
    """
    address = sizes_address(store)
    content = read_whole(address) if address else None
    if content is None:
        return {}
    import pyarrow.parquet as pq  # 50 ms, in every process that makes a plan

    again = f"write it again with `raypipe add-sizes {store.address}`"
    try:
        table = pq.read_table(pa.BufferReader(content))
        columns = {name: table[name].to_numpy().astype(np.int64) for name in SIZE_COLUMNS}
        written_for = (table.schema.metadata or {})[_KEY].decode()
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{address} has no sizes ({type(error).__name__}: {error}): {again}") from None
    if written_for != store.fingerprint or table.num_rows != len(store):
        raise ConfigError(
            f"{address} has the sizes of a store with fingerprint {written_for}, but {store.address} has "
            f"{store.fingerprint}: {again}"
        )
    return columns
