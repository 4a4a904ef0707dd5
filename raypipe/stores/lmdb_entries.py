"""The entries of an LMDB file by their place in the order of its keys, where the keys themselves tell nothing.

Held are the leaf pages and how many entries each has, 16 bytes for some seventy keys: three million images, the
largest class of LSUN, are 700 KB and a third of a second, so each process makes this index for itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import chain

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.lmdb_pages import LMDBFile


class Entries:
    """The entries of a file whose keys have a prefix, in the order of their keys.

    Args:
        file: the file.
        prefix: of the keys; empty = all.
        without: keys to be left out, where they are there.

    Raises:
        StoreError: the file is damaged.
        OSError: it cannot be read.
    """

    def __init__(self, file: LMDBFile, prefix: bytes = b"", without: Iterable[bytes] = ()) -> None:
        self._file = file
        found = np.fromiter(chain.from_iterable(file.leaves()), np.int64).reshape(-1, 2)
        self._pages = found[:, 0]
        self._offsets = np.cumsum(np.concatenate([[0], found[:, 1]]))
        self._start, stop = self._rank(prefix), int(self._offsets[-1])
        if prefix:
            stop = self._rank(prefix[:-1] + bytes([prefix[-1] + 1]))
        left_out: list[int] = []
        for key in sorted(without):
            rank = self._rank(key)
            if self._start <= rank < stop and self._key(rank) == key:
                left_out.append(rank - self._start - len(left_out))
        self._left_out = np.array(left_out, np.int64)
        self._num = stop - self._start - len(left_out)
        if self._num < 0:
            raise StoreError(f"{file.path} is damaged: its keys do not ascend; copy or ingest it again")

    def __len__(self) -> int:
        return self._num

    def at(self, index: int) -> tuple[bytes, memoryview]:
        """Return the key and the value of an entry.

        Raises:
            StoreError: its pages are damaged.
            OSError: the file cannot be read.
        """
        # Of those left out, as many come before it as leave no more than `index` others before themselves.
        rank = self._start + index + int(np.searchsorted(self._left_out, index, "right"))
        return self._file.entry(*self._place(rank))

    def _place(self, rank: int) -> tuple[int, int]:
        leaf = int(np.searchsorted(self._offsets, rank, "right")) - 1
        return int(self._pages[leaf]), rank - int(self._offsets[leaf])

    def _key(self, rank: int) -> bytes:
        page, slot = self._place(rank)
        return self._file.leaf(page)[slot][0]

    def _rank(self, key: bytes) -> int:
        """How many of the file's keys are below this one."""
        after = bisect_left(range(len(self._pages)), key, key=lambda leaf: self._first_key(leaf))
        if after == 0:
            return 0
        keys = [found for found, _ in self._file.leaf(int(self._pages[after - 1]))]
        return int(self._offsets[after - 1]) + bisect_left(keys, key)

    def _first_key(self, leaf: int) -> bytes:
        return self._file.leaf(int(self._pages[leaf]))[0][0]
