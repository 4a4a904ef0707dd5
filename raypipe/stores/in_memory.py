"""A store whose values are kept in memory that the node's processes share, from their first read on."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.storage.shared_memory import Arena, open_arena
from raypipe.stores.arrow_values import array_of, to_arrow
from raypipe.stores.base import (
    Columns,
    Store,
    check_columns,
    check_indices,
    hash_of_facts,
)

logger = logging.getLogger(__name__)

# First byte of a cell.
_NULL = b"0"
_VALUE = b"1"
_PLAIN = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_Parts = Sequence[bytes | memoryview]


class InMemoryStore:
    """The samples of another store, which is read only once per node.

    All other attributes are those of the store. Values other than bytes, text, numbers and arrays of one shape are
    read from the store each time. The same happens to samples for which there was no room, see
    `raypipe.storage.shared_memory`.

    Args:
        inner: the store; its fingerprint must show its contents.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self._arena: Arena | None = None
        self._key = ""
        self._pid = 0
        self._is_received = False
        self._is_full = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.inner,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "inner":
            # copy and pickle ask before there is one
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def close(self) -> None:
        """Release the memory, which is freed when no process uses it, and the store's files."""
        self._arena = None
        _kept_arenas.pop(self._key, None)
        self.inner.close()

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        """Read samples, see `Store.read`; images are views of the shared memory."""
        rows = check_indices(indices, len(self), self.inner.address)
        schema = self.inner.schema
        check_columns(columns, schema.names, self.inner.address)
        kept = tuple(name for name in columns if _is_kept(schema.field(name)))
        if not rows.size or not kept:
            return self.inner.read(rows, columns)
        cells = self._filled_cells(rows, kept)
        images = _bytes_in(cells["image"]) if "image" in cells else None
        arrays = {
            name: _decoded(cells[name], schema.field(name).type)
            for name in kept
            if name != "image"
        }
        not_kept = tuple(name for name in columns if name not in kept)
        if not_kept:
            table = self.inner.read(rows, not_kept).table
            arrays |= dict(zip(table.column_names, table.columns, strict=True))
        names = [name for name in columns if name != "image"]
        return Columns(images, pa.table({name: arrays[name] for name in names}))

    def _filled_cells(
        self, rows: np.ndarray, columns: tuple[str, ...]
    ) -> dict[str, list[memoryview | None]]:
        """Return the cells of samples, by column. Samples that are not in memory are read from the store, and kept
        if there is room."""
        arena = self._opened()
        cells = {name: arena.values(self._cells(name, rows)) for name in columns}
        is_new = np.array([None in row for row in zip(*cells.values(), strict=True)])
        if not is_new.any():
            return cells
        positions = np.flatnonzero(is_new).tolist()
        read = self.inner.read(rows[is_new], columns)
        # Images come last, since a sample without room for one of its values is read again.
        for name in sorted(columns, key=lambda name: name == "image"):
            values = list(map(_encoded, read[name]))
            self._keep(arena, self._cells(name, rows[is_new]), values)
            for position, value in zip(positions, values, strict=True):
                cells[name][position] = memoryview(b"".join(value))
        return cells

    def _keep(self, arena: Arena, cells: np.ndarray, values: Sequence[_Parts]) -> None:
        if self._is_full or arena.write(cells, values):
            return
        self._is_full = True
        logger.warning(
            "%s: %.1f GB of it are in memory, and there is no room for more: the rest is read from the store each "
            "time. Raise RAYPIPE_MEMORY_BYTES, or store smaller images (`raypipe convert --short-side`)",
            *(self.inner.address, arena.used_bytes / 1e9),
        )

    def _cells(self, column: str, indices: np.ndarray) -> np.ndarray:
        return self.inner.schema.names.index(column) * len(self) + indices

    def _opened(self) -> Arena:
        if self._arena and self._pid == os.getpid():
            return self._arena
        inner = self.inner
        written = getattr(inner, "written", "")  # in place, maybe
        facts = inner.fingerprint, written, tuple(inner.schema.names), len(self)
        self._key = hash_of_facts(facts)
        arena = open_arena(self._key, len(self.inner.schema.names) * len(self))
        if self._is_received:
            _kept_arenas[self._key] = arena
        self._arena = arena
        self._pid = os.getpid()
        return arena


def _received(inner: Store) -> InMemoryStore:
    """Return a store that another process has sent."""
    store = InMemoryStore(inner)
    store._is_received = True
    return store


# A worker's tasks come one after the other, each with a copy of the store. The memory stays in between.
_kept_arenas: dict[str, Arena] = {}
os.register_at_fork(after_in_child=_kept_arenas.clear)


def _is_kept(field: pa.Field) -> bool:
    """Return whether values of a column are kept: bytes, text, numbers, and arrays of one shape."""
    kind = field.type
    return field.name == "image" or kind in _PLAIN or array_of(kind) is not None


def _encoded(value: Any) -> _Parts:
    """Return a value as bytes, in parts."""
    if value is None:
        return (_NULL,)
    if isinstance(value, bytes | memoryview):
        return _VALUE, value
    if isinstance(value, str):
        return _VALUE, value.encode()
    return _VALUE, value.tobytes()


def _bytes_in(cells: Sequence[memoryview | None]) -> list[memoryview | None]:
    """Return the values in cells, as views; None for no value."""
    return [cell[1:] if cell and cell[:1] == _VALUE else None for cell in cells]


def _decoded(cells: Sequence[memoryview | None], kind: pa.DataType) -> pa.Array:
    """Return the values of a column."""
    contents = _bytes_in(cells)
    numbers = array_of(kind)
    if numbers is None:
        return pa.array(contents, pa.binary()).cast(kind)
    of_element, shape = numbers
    dtype = np.dtype(of_element.to_pandas_dtype())
    nothing = bytes(dtype.itemsize * math.prod(shape))
    is_null = np.array([content is None for content in contents], bool)
    joined = b"".join(nothing if content is None else content for content in contents)
    values = np.frombuffer(joined, dtype).reshape(len(contents), *shape)
    return to_arrow(values, is_null)
