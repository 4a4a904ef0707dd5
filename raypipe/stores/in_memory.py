"""A store whose values are kept in memory that the node's processes share, from their first read on."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from raypipe.storage.shared_memory import Arena, open_arena
from raypipe.stores.base import Columns, Store, check_columns, check_indices

logger = logging.getLogger(__name__)

# First byte of a value.
_NONE = b"0"
_BYTES = b"b"
_TEXT = b"t"
_NUMBERS = b"n"
_PLAIN = b"j"
_MOST_HEAD_BYTES = 255
_PLAIN_TYPES = (bool, int, float)
_Parts = Sequence[bytes | memoryview]


class InMemoryStore:
    """The samples of another store, which is read only once per node.

    All other attributes are those of the store. Values other than bytes, text, numbers and arrays of numbers are
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
        self._unfit = set[str]()  # columns of values that are not kept

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.inner,)

    def __getattr__(self, name: str) -> Any:
        if (
            name.startswith("__") or name == "inner"
        ):  # copy and pickle ask before there is one
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
        wanted = check_indices(indices, len(self), self.inner.address)
        check_columns(columns, self.inner.columns, self.inner.address)
        kept = tuple(name for name in columns if name not in self._unfit)
        if not wanted.size or not kept:
            return self.inner.read(wanted, columns)
        arena = self._opened()
        stored = {name: arena.values(self._cells(name, wanted)) for name in kept}
        missing = np.array([None in row for row in zip(*stored.values(), strict=True)])
        if missing.any():
            fresh = {
                name: list(map(_encoded, values))
                for name, values in self.inner.read(wanted[missing], kept).items()
            }
            if unfit := {name for name, values in fresh.items() if None in values}:
                self._unfit |= unfit
                return self.read(wanted, columns)
            # Images come last, since a sample without room for one of its values is read again.
            for name, encoded in sorted(
                fresh.items(), key=lambda item: item[0] == "image"
            ):
                # all of them
                values = [value for value in encoded if value is not None]
                self._keep(arena, self._cells(name, wanted[missing]), values)
                for position, value in zip(
                    np.flatnonzero(missing).tolist(), values, strict=True
                ):
                    stored[name][position] = memoryview(b"".join(value))
        found = {name: _decoded(stored[name]) for name in kept}
        if len(kept) < len(columns):
            found |= self.inner.read(
                wanted, tuple(name for name in columns if name in self._unfit)
            )
        return {name: found[name] for name in columns}

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
        return self.inner.columns.index(column) * len(self) + indices

    def _opened(self) -> Arena:
        if self._arena and self._pid == os.getpid():
            return self._arena
        facts = repr((self.inner.fingerprint, self.inner.columns, len(self)))
        self._key = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        arena = open_arena(self._key, len(self.inner.columns) * len(self))
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


def _encoded(value: Any) -> _Parts | None:
    """Return a value as bytes, in parts; None for a kind that is not kept."""
    if value is None:
        return (_NONE,)
    if isinstance(value, bytes | memoryview):
        return _BYTES, value
    if isinstance(value, str):
        return _TEXT, value.encode(errors="surrogatepass")
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        head = json.dumps([value.dtype.str, value.shape]).encode()
        if len(head) > _MOST_HEAD_BYTES:
            return None
        return _NUMBERS, bytes([len(head)]), head, value.tobytes()
    if type(value) in _PLAIN_TYPES:
        return (_PLAIN, json.dumps(value).encode())
    return None


def _decoded(stored: Sequence[memoryview | None]) -> Any:
    """Return the values of a column: an array if all are numbers of one type and shape, else a list."""
    contents = [value for value in stored if value is not None]
    kinds = [value[:1] for value in contents]
    if all(kind == _NUMBERS for kind in kinds):
        heads = {bytes(value[2 : 2 + value[1]]) for value in contents}
        if len(heads) == 1:
            dtype, shape = _type_of(heads.pop())
            start = 2 + contents[0][1]
            numbers = np.frombuffer(
                bytearray(b"".join(value[start:] for value in contents)), dtype
            )
            return numbers.reshape(len(contents), *shape)
    return [
        _value_of(bytes(kind), value)
        for kind, value in zip(kinds, contents, strict=True)
    ]


def _value_of(kind: bytes, value: memoryview) -> Any:
    if kind == _BYTES:
        return value[1:]
    if kind == _TEXT:
        return bytes(value[1:]).decode(errors="surrogatepass")
    if kind == _PLAIN:
        return json.loads(bytes(value[1:]))
    if kind == _NONE:
        return None
    end = 2 + value[1]
    dtype, shape = _type_of(bytes(value[2:end]))
    numbers = np.frombuffer(value[end:], dtype).reshape(shape)
    return numbers if shape else numbers.item()


@functools.lru_cache(maxsize=64)
def _type_of(head: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    dtype, shape = json.loads(head)
    return np.dtype(dtype), tuple(shape)
