"""A store whose samples are in a file of the node's memory, made once by the first process that streams it.

    images, end to end | Arrow's stream of one table: the other columns, and the size of each image | 8 bytes

The last bytes are the number of those before the table.

The whole store is copied before the first sample is read, so a limit that it exceeds is found at once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from raypipe.storage.retries import in_threads, report_progress
from raypipe.storage.shared_memory import open_shared, reserve
from raypipe.stores.arrow_values import take
from raypipe.stores.base import (
    Columns,
    Store,
    check_columns,
    check_indices,
    forwards,
    hash_of_facts,
    other_contents,
)
from raypipe.stores.joined import JoinedStore

logger = logging.getLogger(__name__)

_LAYOUT = 1
_NUM_COPIED = 256  # samples at a time
_NUM_THREADS = 4  # read a store without groups, such as a folder of images
_ALIGNED = 64
_TAIL_BYTES = 8
# A column of the table besides the store's: bytes of the image, -1 for no value, which then ends before it begins.
_SIZE = "image.size"


class InMemoryStore:
    """The samples of another store, which is read only once per node.

    All other attributes are those of the store. Until `hold` is called, and where no images are read, it reads the
    store itself: a process that only looks at some samples copies nothing.

    Args:
        inner: the store; its fingerprint must show its contents.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self._is_held = False
        self._is_received = False
        self._copy: _Copy | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.inner,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            # copy and pickle ask before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def hold(self) -> None:
        """Read from memory from now on; the next read of images makes the node's copy, if there is none."""
        self._is_held = True

    def close(self) -> None:
        """Release the memory, which is freed when no process uses it, and the store's files."""
        if self._copy:
            _kept_copies.pop(self._copy.key, None)
        self._copy = None
        self.inner.close()

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        """Read samples, see `Store.read`; images are views of the shared memory."""
        if self._copy is None and self._is_held and "image" in columns:
            self._copy = self._opened()
        if self._copy is None:
            return self.inner.read(indices, columns)
        rows = check_indices(indices, len(self), self.inner.address)
        check_columns(columns, self.inner.schema.names, self.inner.address)
        return self._copy.read(rows, columns)

    def _opened(self) -> _Copy:
        inner = self.inner
        written = getattr(inner, "written", "")  # in place, maybe
        names = tuple(inner.schema.names)
        key = hash_of_facts((_LAYOUT, inner.fingerprint, written, names, len(inner)))
        copy = _kept_copies.get(key) or _Copy(inner, key)
        if self._is_received:
            _kept_copies[key] = copy
        return copy


def hold(stores: Iterable[Store]) -> None:
    """Call `hold` of the stores that are kept in memory; the caller streams them."""
    for store in stores:
        if isinstance(store, JoinedStore):
            hold(store.parts.values())
        elif isinstance(store, InMemoryStore):
            store.hold()


def _received(inner: Store) -> InMemoryStore:
    """Return a store that another process has sent."""
    store = InMemoryStore(inner)
    store._is_received = True
    return store


class _Copy:
    """The samples of a store in the node's memory.

    Attributes:
        key: name of the file.
    """

    def __init__(self, store: Store, key: str) -> None:
        self.key = key
        self._file = open_shared(key, functools.partial(_write, store))
        content = self._file.content
        start = int.from_bytes(content[-_TAIL_BYTES:], "little")
        stream = pa.py_buffer(content[start:])
        self._table = pa.ipc.open_stream(stream).read_all()
        sizes = self._table[_SIZE].to_numpy()
        self._ends = np.cumsum(np.maximum(sizes, 0))
        self._starts = self._ends - sizes

    def read(self, rows: np.ndarray, columns: tuple[str, ...]) -> Columns:
        images: list[bytes | memoryview | None] | None = None
        if "image" in columns:
            content = self._file.content
            places = zip(
                self._starts[rows].tolist(), self._ends[rows].tolist(), strict=True
            )
            images = [
                content[start:end] if start <= end else None for start, end in places
            ]
        names = [name for name in columns if name != "image"]
        return Columns(
            images, pa.table({name: take(self._table[name], rows) for name in names})
        )


# A worker's tasks come one after the other, each with a copy of the store. The memory stays in between.
_kept_copies: dict[str, _Copy] = {}


def _write(store: Store, file: BinaryIO) -> None:
    """Write a store into a new file."""
    logger.info("%s is copied into memory, %d samples", store.address, len(store))
    tables = []
    num_copied = 0
    num_bytes = 0
    room = 0
    for read in _read_whole(store):
        report_progress()
        images = read["image"]
        sizes = [-1 if image is None else len(image) for image in images]
        table = _typed(read.table, store.schema, sizes)
        num_copied += len(sizes)
        num_bytes += sum(sizes) + table.nbytes
        if num_bytes > room:
            # estimated from the samples so far
            room = max(num_bytes, num_bytes * len(store) // num_copied)
            reserve(file, room, store.address)
        file.writelines(filter(None, images))
        tables.append(table)
    file.write(bytes(-file.tell() % _ALIGNED))
    start = file.tell()
    whole = pa.concat_tables(tables).combine_chunks()
    with pa.ipc.new_stream(pa.PythonFile(file), whole.schema) as writer:
        writer.write_table(whole)
    file.write(start.to_bytes(_TAIL_BYTES, "little"))


def _read_whole(store: Store) -> Iterator[Columns]:
    """Yield all columns of a store in stored order."""
    columns = tuple(store.schema.names)
    reader = forwards(store)
    if reader.fingerprint != store.fingerprint:
        raise other_contents(store.address)
    num_threads = _NUM_THREADS if store.groups is None else 1
    for first in range(0, len(store), _NUM_COPIED):
        rows = np.arange(first, min(first + _NUM_COPIED, len(store)))
        parts = [part for part in np.array_split(rows, num_threads) if part.size]
        yield from in_threads(lambda part: reader.read(part, columns), parts)


def _typed(table: pa.Table, schema: pa.Schema, sizes: list[int]) -> pa.Table:
    """Return a table in the types of a store's schema, with the sizes of the images."""
    columns = {
        name: table[name].cast(schema.field(name).type) for name in table.column_names
    }
    return pa.table(columns | {_SIZE: sizes})
