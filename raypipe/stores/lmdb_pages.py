"""Reader of LMDB's file format, page by page, that checks every number in the file before using it.

liblmdb maps its file and follows the numbers in it: a page overwritten by something else, or a file cut short
while it is open, kills the process (SIGSEGV, SIGBUS). This reader uses `pread`, so damage of any kind raises an
exception, and threads and forked processes may share an open file.

    page 0, 1   meta: magic, version, page size; root, depth and entries of the tree; transaction number.
                Transactions write the two alternately, so the page with the higher number is current
    branch      ascending keys → page numbers. The first key is ignored: it counts as below all others
    leaf        ascending keys → values, or lengths and page numbers of values too long for a leaf
    overflow    a header, then one such value, over as many pages as it takes

A page starts with its own number, so a page written to a wrong place is detected. Values have no checksum: changed
bytes within a value are returned unnoticed.

The reader supports files of liblmdb 0.9 (data version 1) from little-endian 64-bit machines, and only the main
database, with keys in byte order and one value per key.
"""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.kernel import native
from raypipe.storage.local_file import open_regular
from raypipe.stores.base import MAX_SAMPLE_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_NO_PAGE = (1 << 64) - 1  # root of an empty tree
_NUM_METAS = 2

# Page flags, exactly one per page in a file, and node flags.
_BRANCH = 1
_LEAF = 2
_OVERFLOW = 4
_META = 8
_LONG_VALUE = 1

# page number, unused, flags, bounds of the free space
_HEADER = struct.Struct("<QHHHH")
_OVERFLOW_HEADER = struct.Struct("<QHHI")  # page number, unused, flags, number of pages
# Magic, version, page size; the main tree's flags, depth, entries and root; last page, transaction number.
_META_BODY = struct.Struct("<II16xI48xHH24xQQQQ")
# value length, flags, key length; in a branch: page number of 48 bits, key length
_NODE = struct.Struct("<IHH")
_POINTER = struct.Struct("<H")
_PAGE_NUMBER = struct.Struct("<Q")
_HEADER_BYTES = _HEADER.size
_NODE_BYTES = _NODE.size
_POINTER_BYTES = _POINTER.size  # both headers have one size

_MIN_PAGE_BYTES = 512
_MAX_PAGE_BYTES = 32_768  # liblmdb's limits
_MAX_DEPTH = 32  # liblmdb's limit, far above any tree that fits on a disk

# A parsed branch page takes about 20 KB. A page of 4 KiB has about 200 children, so a tree of two branch levels,
# with six million keys, has 200 branch pages.
_MAX_CACHED_BRANCHES = 1024

PageLayout = tuple[int, bytes]
"""See `LMDBFile.records`."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf page: where its n keys are in the page, and the lengths of their values in bytes.

    Attributes:
        number, page: the page's number and bytes.
        key_starts, key_bytes: first byte and length of each key, int64 (n,).
        lengths: bytes in each value, int64 (n,).
    """

    number: int
    page: bytes
    key_starts: np.ndarray
    key_bytes: np.ndarray
    lengths: np.ndarray

    def key(self, slot: int) -> bytes:
        start = int(self.key_starts[slot])
        return self.page[start : start + int(self.key_bytes[slot])]


class LMDBFile:
    """An LMDB file, open for reading; it closes with the object.

    Every reading method raises StoreError for damaged pages, and OSError if the file cannot be read.

    Args:
        path: the file, or the address of `source`, for errors.
        source: an object that is read by ranges instead of a local file; its opener closes it.

    Attributes:
        path: as passed.
        num_entries: number of keys that the main database declares, checked against the file's size.
        num_bytes: size of the file when it was opened.
        declared_bytes: size of all pages that the file counts. An intact file may be shorter, since unused pages
            at its end may never have been written.
    """

    def __init__(self, path: Path | str, source: pa.NativeFile | None = None) -> None:
        self.path = path
        self._pread: Callable[[int, int], bytes]
        try:
            self._file: int | None = None
            if source is None:
                file = self._file = open_regular(path)
                weakref.finalize(self, os.close, file)
                self.num_bytes = os.fstat(file).st_size
                self._pread = partial(os.pread, file)
            else:
                self.num_bytes = source.size()
                self._pread = source.read_at
            self._read_metas()
        except OSError as error:
            raise StoreError(f"{path} cannot be opened as LMDB: {error}") from error
        except _DamageError as error:
            raise StoreError(
                f"{path} cannot be opened as LMDB: {error}; copy or convert it again"
            ) from None
        # Threads may insert concurrently: each lookup returns a complete entry or none.
        self._branches: dict[int, tuple[list[bytes], list[int]]] = {}
        self._reader: Any = None
        if self._file is not None and self._depth:
            kernel = native.module()
        else:
            kernel = None
        if kernel is not None:
            tree = self._page_bytes, self._root, self._depth, self._last_page
            with contextlib.suppress(ValueError):
                # an impossible tree: `get` raises an error that explains it
                self._reader = kernel.lmdb_open(self._file, self.num_bytes, *tree)
            self._read_many = kernel.lmdb_read

    def get(self, key: bytes) -> memoryview | None:
        """Return the value of a key, None if it does not exist."""
        with self._explained(f" at key {key!r}"):
            if not self._depth:
                return None
            number = self._root
            for _ in range(self._depth - 1):
                keys, children = self._branches.get(number) or self._branch(number)
                number = children[bisect_right(keys, key)]
            page, num_nodes = self._page(number, _LEAF)
            slot = bisect_left(
                range(num_nodes), key, key=lambda slot: _node(page, slot)[1]
            )
            start, node_key = _node(page, min(slot, num_nodes - 1))
            return self._value(page, start) if node_key == key else None

    def records(
        self, keys: np.ndarray, layout: PageLayout
    ) -> tuple[bytes, list[list[bytes | None]], np.ndarray]:
        """Read many of raypipe's own records in one call with the compiled reader, which skips damaged ones.

        Args:
            keys: int64 (n,).
            layout: the number of fixed columns, and a byte for each variable one: 1 if it is requested, else 0.

        Returns:
            The fixed columns, 8 bytes each; for each requested variable column a list of n values, None for a
            missing value; and bool (n,), whether each record was read. Callers use `get` for the others.
        """
        if self._reader is None:
            return b"", [], np.zeros(len(keys), bool)
        fixed, columns, done = self._read_many(
            self._reader, np.ascontiguousarray(keys, np.int64), *layout
        )
        return fixed, columns, np.frombuffer(done, bool)

    def leaves(self) -> Iterator[Leaf]:
        """Yield all leaf pages in the order of their keys, with the place of every value checked."""
        with self._explained(""):
            num_entries = 0
            last = None
            for number in self._leaf_numbers(self._root, self._depth):
                leaf = self._leaf(number)
                first = leaf.key(0)
                if last is not None and first <= last:
                    # also ends a walk that comes to a page twice
                    raise _DamageError(
                        f"key {first[:64]!r} of page {number} comes after {last[:64]!r}"
                    )
                last = leaf.key(len(leaf.lengths) - 1)
                num_entries += len(leaf.lengths)
                if num_entries > self.num_entries:
                    break
                yield leaf
            if num_entries != self.num_entries:
                raise _DamageError(
                    f"{num_entries} keys are there, and {self.num_entries} are declared"
                )

    def entry(self, number: int, slot: int) -> tuple[bytes, memoryview]:
        """Return the key and the value at a place in a leaf page."""
        with self._explained(f" at entry {slot} of page {number}"):
            page, num_nodes = self._page(number, _LEAF)
            if slot >= num_nodes:
                raise _DamageError(
                    f"page {number} has {num_nodes} entries, and had more"
                )
            start, key = _node(page, slot)
            return key, self._value(page, start)

    def key(self, number: int, slot: int) -> bytes:
        """Return the key at a place in a leaf page."""
        with self._explained(f" at entry {slot} of page {number}"):
            page, num_nodes = self._page(number, _LEAF)
            if slot >= num_nodes:
                raise _DamageError(
                    f"page {number} has {num_nodes} entries, and had more"
                )
            return _node(page, slot)[1]

    def _leaf_numbers(self, number: int, depth: int) -> Iterator[int]:
        if depth <= 1:
            yield from [number] * depth  # an empty tree has no leaf
            return
        for child in self._branch(number)[1]:
            yield from self._leaf_numbers(child, depth - 1)

    def _leaf(self, number: int) -> Leaf:
        page, num_nodes = self._page(number, _LEAF)
        data = np.frombuffer(page, np.uint8)
        starts = np.frombuffer(page, "<u2", num_nodes, _HEADER_BYTES).astype(np.int64)
        if starts.max() + _NODE_BYTES > len(page):
            raise _DamageError(
                f"a node at byte {starts.max()} of page {number} of {len(page)} bytes"
            )
        nodes = data[starts[:, None] + np.arange(_NODE_BYTES)]
        lengths = nodes[:, :4].view("<u4")[:, 0].astype(np.int64)
        flags, key_bytes = nodes[:, 4:].view("<u2").astype(np.int64).T
        key_starts = starts + _NODE_BYTES
        is_long = flags == _LONG_VALUE
        if (flags & ~_LONG_VALUE).any():
            raise _DamageError(
                f"page {number} has entries with flags: nested databases, or damage"
            )
        stops = key_starts + key_bytes + np.where(is_long, _PAGE_NUMBER.size, lengths)
        if stops.max() > len(page):
            raise _DamageError(
                f"an entry up to byte {stops.max()} of page {number} of {len(page)} bytes"
            )
        if is_long.any():
            places = (key_starts + key_bytes)[is_long]
            numbers = data[places[:, None] + np.arange(_PAGE_NUMBER.size)].view("<u8")[
                :, 0
            ]
            beyond = (numbers < _NUM_METAS) | (numbers > self._last_page)
            ends = (
                numbers.astype(np.int64) * self._page_bytes
                + _HEADER_BYTES
                + lengths[is_long]
            )
            if beyond.any() or ends.max() > self.num_bytes:
                raise _DamageError(
                    f"page {number} has values up to byte {ends.max()} of {self.num_bytes}"
                )
        return Leaf(number, page, key_starts, key_bytes, lengths)

    @contextmanager
    def _explained(self, where: str) -> Iterator[None]:
        try:
            yield
        except _DamageError as error:
            raise StoreError(
                f"{self.path} is damaged{where}: {error}; copy or convert it again"
            ) from None

    def _read_metas(self) -> None:
        """Set the attributes of the file and its main database from the newer of the two meta pages."""
        first = self._meta(0, 0)
        self._page_bytes = first[-1]
        # Both must be intact: falling back to the older page would silently show an earlier state.
        second = self._meta(1, self._page_bytes)
        if second[-1] != self._page_bytes:
            raise _DamageError(
                f"its pages have {self._page_bytes} or {second[-1]} bytes"
            )
        _, flags, self._depth, self.num_entries, self._root, self._last_page, _ = max(
            first, second
        )
        if flags:
            raise _DamageError(
                f"its database has the flags {flags:#x}: duplicate, reversed or integer keys"
            )
        empty = self._root == _NO_PAGE and not self._depth and not self.num_entries
        if not empty and not 1 <= self._depth <= _MAX_DEPTH:
            raise _DamageError(f"its tree has depth {self._depth}")
        if self.num_entries * (_NODE_BYTES + _POINTER_BYTES) > self.num_bytes:
            raise _DamageError(
                f"it declares {self.num_entries} entries in {self.num_bytes} bytes"
            )
        self.declared_bytes = (self._last_page + 1) * self._page_bytes

    def _meta(self, number: int, start: int) -> tuple[int, ...]:
        """Return transaction number; the main tree's flags, depth, entries and root; last page; page size."""
        page = self._pread(_HEADER_BYTES + _META_BODY.size, start)
        if len(page) < _HEADER_BYTES + _META_BODY.size:
            raise _DamageError(f"it ends within meta page {number}")
        page_number, _, flags, *_ = _HEADER.unpack_from(page)
        magic, version, page_bytes, *tree, last_page, transaction = (
            _META_BODY.unpack_from(page, _HEADER_BYTES)
        )
        if magic != _MAGIC or page_number != number or flags != _META:
            raise _DamageError(
                f"page {number} is not a meta page of 64-bit little-endian LMDB"
            )
        if version != _VERSION:
            raise _DamageError(
                f"its data version is {version}; this raypipe reads version {_VERSION}"
            )
        if not _MIN_PAGE_BYTES <= page_bytes <= _MAX_PAGE_BYTES or page_bytes & (
            page_bytes - 1
        ):
            raise _DamageError(f"its pages have {page_bytes} bytes")
        return transaction, *tree, last_page, page_bytes

    def _value(self, page: bytes, start: int) -> memoryview:
        """Return the value of the leaf's node at `start`, whose key must be within the page."""
        num_bytes, flags, key_bytes = _NODE.unpack_from(page, start)
        start += _NODE_BYTES + key_bytes
        if flags == _LONG_VALUE:
            if start + _PAGE_NUMBER.size > len(page):
                raise _DamageError(
                    f"a page number at byte {start} of a page of {len(page)}"
                )
            return self._long_value(_PAGE_NUMBER.unpack_from(page, start)[0], num_bytes)
        if flags:
            raise _DamageError(
                f"its flags are {flags:#x}: a nested database, or damage"
            )
        if start + num_bytes > len(page):
            raise _DamageError(
                f"a value of {num_bytes} bytes at byte {start} of a page of {len(page)}"
            )
        return memoryview(page)[start : start + num_bytes]

    def _long_value(self, number: int, num_bytes: int) -> memoryview:
        if num_bytes > MAX_SAMPLE_BYTES:
            raise _DamageError(
                f"a value of {num_bytes} bytes; the limit is {MAX_SAMPLE_BYTES}"
            )
        size = _HEADER_BYTES + num_bytes
        data = self._read(number, size)
        page_number, _, flags, num_pages = _OVERFLOW_HEADER.unpack_from(data)
        if page_number != number or flags != _OVERFLOW:
            raise _DamageError(
                f"page {number} has the number {page_number} and flags {flags:#x}, but must be a long value"
            )
        # It may have more pages than it needs, since replacing a value with a shorter one keeps the pages.
        if (
            num_pages * self._page_bytes < size
            or number + num_pages > self._last_page + 1
        ):
            raise _DamageError(
                f"a value of {num_bytes} bytes in {num_pages} pages from page {number}"
            )
        return memoryview(data)[_HEADER_BYTES:]

    def _branch(self, number: int) -> tuple[list[bytes], list[int]]:
        """Return n - 1 keys and n children of a branch page: child i has keys in [keys[i - 1], keys[i])."""
        page, num_nodes = self._page(number, _BRANCH)
        nodes = [_node(page, slot) for slot in range(num_nodes)]
        keys = [key for _, key in nodes[1:]]
        if any(after <= before for before, after in pairwise(keys)):
            raise _DamageError(f"the keys of branch page {number} do not ascend")
        if len(self._branches) >= _MAX_CACHED_BRANCHES:
            self._branches.clear()
        # A child's page number has 48 bits, the bits of a value's length and flags in a leaf.
        children = [
            low | high << 32
            for low, high, _ in (_NODE.unpack_from(page, start) for start, _ in nodes)
        ]
        self._branches[number] = branch = keys, children
        return branch

    def _page(self, number: int, kind: int) -> tuple[bytes, int]:
        """Return a branch or leaf page, and its number of nodes."""
        page = self._read(number, self._page_bytes)
        page_number, _, flags, lower, upper = _HEADER.unpack_from(page)
        if page_number != number or flags != kind:
            raise _DamageError(
                f"page {number} has the number {page_number} and flags {flags:#x}, but must have flags {kind:#x}"
            )
        if not _HEADER_BYTES <= lower <= upper <= self._page_bytes:
            raise _DamageError(
                f"page {number} has its free space from byte {lower} to {upper}"
            )
        if lower < _HEADER_BYTES + _POINTER_BYTES:
            raise _DamageError(f"page {number} is empty")
        return page, (lower - _HEADER_BYTES) // _POINTER_BYTES

    def _read(self, number: int, num_bytes: int) -> bytes:
        """Return bytes from the start of a page, maybe across pages; never beyond the file's end at opening."""
        start = number * self._page_bytes
        if (
            not _NUM_METAS <= number <= self._last_page
            or start + num_bytes > self.num_bytes
        ):
            raise _DamageError(
                f"page {number}, {num_bytes} bytes, in a file of {self.num_bytes}"
            )
        data = self._pread(num_bytes, start)
        if len(data) < num_bytes:
            raise _DamageError(
                f"the file has become shorter than {start + num_bytes} bytes"
            )
        return data


def _node(page: bytes, slot: int) -> tuple[int, bytes]:
    """Return a node's offset and its key."""
    (start,) = _POINTER.unpack_from(page, _HEADER_BYTES + _POINTER_BYTES * slot)
    key_start = start + _NODE_BYTES
    if key_start > len(page):
        raise _DamageError(f"a node at byte {start} of a page of {len(page)}")
    _, _, key_bytes = _NODE.unpack_from(page, start)
    if key_start + key_bytes > len(page):
        raise _DamageError(
            f"a key of {key_bytes} bytes at byte {key_start} of a page of {len(page)}"
        )
    return start, page[key_start : key_start + key_bytes]


class _DamageError(Exception):
    """A description of damage, without the file's name."""
