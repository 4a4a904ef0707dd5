"""Columns of a whole store, a few thousand samples at a time, but never its images; and the sizes of its images,
which stand beside a store that has no columns `width` and `height`.

`raypipe add-sizes STORE` writes them to `_NAME.sizes.parquet`, in the folder that the store is in; the
underscore hides the file from folders of shards. It has the columns `width` and `height`, int32, -1 where an image
has none, and in its schema's metadata the fingerprint of the store whose sizes they are. `scan` looks for it when
it is asked for a column that the store itself lacks; nothing else does.
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
"""Pixels of an image, int64; -1 where its header does not tell."""

_KEY = b"raypipe.sizes_of"
_PATTERN = re.compile(r"[*{}]")
_CHUNK = 1 << 16


def scan(store: Store, columns: tuple[str, ...], setting: str) -> Iterator[Columns]:
    """Values of columns, in stored order, in parts; sizes may stand beside the store.

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
            others = [other for other in store.columns if other != "image"]
            add = f"; `raypipe add-sizes {store.address}` adds it" if name in SIZE_COLUMNS else ""
            raise ConfigError(f"{missing(store.address, name, others, setting)}{add}")
    inside = tuple(name for name in columns if name in store.columns)
    for first in range(0, len(store), _CHUNK):
        stop = min(len(store), first + _CHUNK)
        stored = store.read(np.arange(first, stop), inside) if inside else {}
        yield {name: stored[name] if name in stored else beside[name][first:stop] for name in columns}


def numbers_of(store: Store, column: str, setting: str) -> np.ndarray:
    """A column of numbers, (N,); raises ConfigError where it is none."""
    parts = []
    for part in scan(store, (column,), setting):
        values = part[column]
        if isinstance(values, list) and all(isinstance(value, int | float | np.number | None) for value in values):
            values = np.array([np.nan if value is None else value for value in values])  # some have no value
        if not (isinstance(values, np.ndarray) and values.dtype.kind in "iufb" and values.ndim == 1):
            raise ConfigError(f"{setting} names {column!r} of {store.address}, which is no column of numbers")
        parts.append(values)
    return np.concatenate(parts) if parts else np.empty(0)


def sizes_address(store: Store) -> str:
    """Where a store's sizes are; "" for one that is at no path or URI, or has no folder beside it."""
    if not isinstance(store, FileStore):
        return ""
    folder, name = split(store.address)
    if is_remote(store.address) and folder.endswith(":/"):  # a whole bucket
        folder = store.address
    return join(folder, f"_{_PATTERN.sub('_', name)}.sizes.parquet")


def write_sizes(store: Store, sizes: np.ndarray) -> str:
    """Write a store's sizes, int (N, 2) of width and height, and return where; see `write_bytes` for errors."""
    import pyarrow.parquet as pq

    assert sizes.shape == (len(store), 2)
    columns = {name: pa.array(sizes[:, at], pa.int32()) for at, name in enumerate(SIZE_COLUMNS)}
    table = pa.table(columns).replace_schema_metadata({_KEY: store.fingerprint.encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    address = sizes_address(store)
    write_bytes(address, sink.getvalue().to_pybytes())
    return address


def read_sizes(store: Store) -> dict[str, np.ndarray]:
    """The columns, int64 (N,), that stand beside a store; empty where none do.

    Raises:
        ConfigError: they cannot be read, or do not fit the store's contents.
    """
    address = sizes_address(store)
    content = read_whole(address) if address else None
    if content is None:
        return {}
    import pyarrow.parquet as pq  # 50 ms, in every process that makes a plan

    again = f"write it again by `raypipe add-sizes {store.address}`"
    try:
        table = pq.read_table(pa.BufferReader(content))
        columns = {name: table[name].to_numpy().astype(np.int64) for name in SIZE_COLUMNS}
        written_for = (table.schema.metadata or {})[_KEY].decode()
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{address} holds no sizes ({type(error).__name__}: {error}): {again}") from None
    if written_for != store.fingerprint or table.num_rows != len(store):
        raise ConfigError(
            f"{address} has the sizes of a store with fingerprint {written_for}, and {store.address} has "
            f"{store.fingerprint}: {again}"
        )
    return columns
