"""The files of an LMDB store: the header of each, values by key, and the list of all keys.

The header, which is both meta pages, is read here. The extension (csrc/lmdb.c) reads all other pages, by `pread`,
and checks every number in them before it is used: damage of any kind raises an exception, and threads and forked
processes may share an open file.

Without the extension, the lmdb library reads them. It maps its file and follows the numbers in it, so a page
overwritten by something else, or a file cut short while it is open, can kill the process (SIGSEGV, SIGBUS): an
actor then, which counts as one of its deaths. A file that is shorter than its header says is refused.

Values have no checksum: changed bytes within a value are returned unnoticed. Files are those of liblmdb 0.9 (data
version 1) from little-endian 64-bit machines, and of them the main database, with keys in byte order and one value
per key.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import mmap
import os
import struct
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import lmdb
import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile
from raypipe.storage.local_cache import shared_cache
from raypipe.storage.local_file import OpenFile
from raypipe.stores.base import MAX_SAMPLE_BYTES, PartedStore, hash_of_facts

_INTERFACE_VERSION = 2
"""Version of the extension's interface that this program calls; the same as in csrc/lmdb.c."""

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_NO_PAGE = (1 << 64) - 1  # root of an empty tree
_META = 8  # flag of a meta page
# Page number and its flags; magic, version, page size; the main tree's flags, depth, entries and root; last page,
# transaction number.
_META_PAGE = struct.Struct("<Q2xH4xII16xI48xHH24xQQQQ")
_ENTRY_BYTES = 8 + 2  # in its page, without key and value
_PAGE_SIZES = [1 << bits for bits in range(9, 16)]  # in bytes, by liblmdb's limits
_MAX_DEPTH = 32  # liblmdb's limit, far above any tree that fits on a disk

_LEAVES_AT_ONCE = 1000  # pages: their entries take about 3 MB
_ENTRIES_AT_ONCE = 50_000

_DAMAGE = (ValueError, lmdb.Error)
"""Errors of the readers that say what is damaged."""

RecordsLayout = tuple[int, bytes]
"""The number of fixed columns, and a byte for each variable one: 1 if it is requested, else 0."""
Records = tuple[bytes, list[list[bytes | None]], np.ndarray]
"""The fixed columns, 8 bytes each, of n records; for each requested variable column a list of n values, None for a
missing value; and bool (n,), whether each record was read."""


@functools.cache
def why_not_compiled() -> str:
    """Return why LMDB is read by the lmdb library; empty = by the extension."""
    try:
        version = importlib.import_module("_raypipe_lmdb").INTERFACE_VERSION
    except ImportError as error:
        return f"the extension is not built ({error})"
    if version != _INTERFACE_VERSION:
        return f"the extension is of another version of raypipe ({version}, not {_INTERFACE_VERSION})"
    return ""


def extension() -> ModuleType | None:
    """Return the extension; None if it is missing, see `why_not_compiled`."""
    return None if why_not_compiled() else importlib.import_module("_raypipe_lmdb")


class Entries(NamedTuple):
    """Some of a file's entries, in the order of keys; the lengths of their values are int64 (n,)."""

    keys: pa.LargeBinaryArray
    value_sizes: np.ndarray


class _Meta(NamedTuple):
    """A meta page: what it is, and the main database.

    Attributes:
        number, kind: its own page number and flags.
        page_bytes: bytes in a page.
        flags, depth, num_entries, root: the tree, with levels of pages, 0 = it is empty, and its first page.
        last_page: number of the file's last page.
        transaction: the newer page has the higher one.
    """

    number: int
    kind: int
    magic: int
    version: int
    page_bytes: int
    flags: int
    depth: int
    num_entries: int
    root: int
    last_page: int
    transaction: int


class LMDBFile:
    """An LMDB file, open for reading; it closes with the object.

    Every reading method raises StoreError for damaged pages, and OSError if the file cannot be read.

    Args:
        path: the file, or the address of `source`, for errors.
        source: an object that the extension reads by ranges instead of a local file; its opener closes it.

    Attributes:
        path: as passed.
        num_entries: number of keys that the main database declares, checked against the file's size.
        num_bytes: size of the file when it was opened.
        written: `written_facts` of a local file.
        declared_bytes: size of all pages that the file counts. An intact file may be shorter, since unused pages
            at its end may never have been written.
    """

    def __init__(self, path: Path | str, source: pa.NativeFile | None = None) -> None:
        self.path = path
        try:
            file: OpenFile | None = None
            if source is None:
                file = OpenFile(path)
                self.written = file.written
                self.num_bytes = self.written[0]
                self._pread = file.pread
            else:
                self.num_bytes = source.size()
                self._pread = source.read_at
            meta = self._read_header()
            self.num_entries = meta.num_entries
            self.declared_bytes = (meta.last_page + 1) * meta.page_bytes
            self._reader = self._open(meta, file)
        except OSError as error:
            raise StoreError(f"{path} cannot be opened as LMDB: {error}") from error
        except _DAMAGE as error:
            raise StoreError(
                f"{path} cannot be opened as LMDB: {error}; copy or convert it again"
            ) from None

    def get(self, key: bytes) -> memoryview | None:
        """Return the value of a key, None if it does not exist."""
        try:
            value = self._reader.get(key)
        except _DAMAGE as error:
            raise self._damaged(f" at key {key!r}", error) from None
        return None if value is None else memoryview(value)

    def records(self, keys: np.ndarray, layout: RecordsLayout) -> Records | None:
        """Read many of raypipe's own records, by keys of int64 (n,), in one call, which skips damaged ones.

        None without the extension: callers use `get`, as they do if a record was not read.
        """
        return self._reader.records(keys, layout)

    def entries(self) -> Iterator[Entries]:
        """Yield all entries in the order of keys, with the place of every value checked."""
        num_entries = 0
        try:
            for entries in self._reader.entries():
                num_entries += len(entries.keys)
                if num_entries > self.num_entries:
                    break
                yield entries
            if num_entries != self.num_entries:
                raise ValueError(
                    f"{num_entries} keys are there, and {self.num_entries} are declared"
                )
        except _DAMAGE as error:
            raise self._damaged("", error) from None

    def truncated(self) -> StoreError:
        """Return the error of a file that is shorter than the pages that it counts."""
        return StoreError(
            f"{self.path} is truncated: {self.num_bytes} bytes, needs {self.declared_bytes}; copy or convert it "
            "again"
        )

    def _damaged(self, where: str, error: Exception) -> StoreError:
        if self.num_bytes < self.declared_bytes:
            return self.truncated()
        if "named databases" in str(error):
            return StoreError(
                f"{self.path} has named databases{where}, and raypipe reads only the main one: read them with the "
                "library lmdb, and give the samples to `raypipe.convert`, as docs/formats.md shows"
            )
        return StoreError(
            f"{self.path} is damaged{where}: {error}; copy or convert it again"
        )

    def _open(self, meta: _Meta, file: OpenFile | None) -> _Compiled | _Library:
        compiled = extension()
        if compiled is not None:
            source = (-1, self._pread) if file is None else (file.descriptor, None)
            tree = meta.page_bytes, meta.root, meta.depth, meta.last_page
            return _Compiled(compiled, *source, self.num_bytes, *tree)
        assert file is not None, "only the extension reads a file by ranges"
        # The last page need not be full: behind the file's end, zeros are mapped.
        num_mapped = -(-self.num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if num_mapped < self.declared_bytes:
            raise self.truncated()
        return _library(file)

    def _read_header(self) -> _Meta:
        """Return the newer of the two meta pages."""
        first = self._meta(0, 0)
        # Both must be intact: falling back to the older page would silently show an earlier state.
        second = self._meta(1, first.page_bytes)
        meta = max(first, second, key=lambda meta: meta.transaction)
        if meta.flags:
            raise ValueError(
                f"its database has the flags {meta.flags:#x}: duplicate, reversed or integer keys"
            )
        is_empty = (meta.root, meta.depth, meta.num_entries) == (_NO_PAGE, 0, 0)
        are_alike = first.page_bytes == second.page_bytes
        fits = meta.num_entries * _ENTRY_BYTES <= self.num_bytes
        if not (are_alike and fits and (is_empty or 1 <= meta.depth <= _MAX_DEPTH)):
            raise ValueError(
                f"pages of {first.page_bytes} and {second.page_bytes} bytes, a tree of depth {meta.depth}, and "
                f"{meta.num_entries} entries in {self.num_bytes} bytes do not fit each other"
            )
        return meta

    def _meta(self, number: int, start: int) -> _Meta:
        content = self._pread(_META_PAGE.size, start)
        if len(content) < _META_PAGE.size:
            raise ValueError(f"it ends within meta page {number}")
        meta = _Meta._make(_META_PAGE.unpack(content))
        facts = meta.number, meta.kind, meta.magic, meta.version
        if facts != (number, _META, _MAGIC, _VERSION) or (
            meta.page_bytes not in _PAGE_SIZES
        ):
            raise ValueError(
                f"page {number} is not a meta page of 64-bit little-endian LMDB of data version {_VERSION}"
            )
        return meta


class _Compiled:
    """Reads a tree by the extension; raises one of `_DAMAGE`, or OSError if the file cannot be read."""

    def __init__(self, compiled: ModuleType, *opened: object) -> None:
        self._compiled = compiled
        self._tree = compiled.open(*opened)

    def get(self, key: bytes) -> bytes | None:
        return self._compiled.get(self._tree, key)

    def entries(self) -> Iterator[Entries]:
        last: bytes | None = None
        while True:
            content, *sizes = self._compiled.entries(self._tree, last, _LEAVES_AT_ONCE)
            key_sizes, value_sizes = (np.frombuffer(size, np.uint32) for size in sizes)
            num = len(key_sizes)
            if not num:
                return
            bounds = np.concatenate([[0], np.cumsum(key_sizes, dtype=np.int64)])
            buffers = [None, pa.py_buffer(bounds), pa.py_buffer(content)]
            keys = pa.LargeBinaryArray.from_buffers(pa.large_binary(), num, buffers)
            yield Entries(keys, value_sizes.astype(np.int64))
            last = keys[-1].as_py()

    def records(self, keys: np.ndarray, layout: RecordsLayout) -> Records:
        keys = np.ascontiguousarray(keys, np.int64)
        fixed, columns, done = self._compiled.records(self._tree, keys, *layout)
        return fixed, columns, np.frombuffer(done, bool)


class _Library:
    """Reads a tree by the lmdb library, and raises as `_Compiled` does."""

    def __init__(self, path: str) -> None:
        self._environment = lmdb.open(
            path, subdir=False, readonly=True, lock=False, readahead=False
        )

    def get(self, key: bytes) -> bytes | None:
        with self._environment.begin(buffers=True) as transaction:
            value = transaction.get(key)
            if value is None:
                return None
            if len(value) > MAX_SAMPLE_BYTES:
                raise ValueError(
                    f"a value of {len(value)} bytes; the limit is {MAX_SAMPLE_BYTES}"
                )
            return bytes(value)

    def entries(self) -> Iterator[Entries]:
        with self._environment.begin(buffers=True) as transaction:
            cursor = ((bytes(key), len(value)) for key, value in transaction.cursor())
            while entries := list(itertools.islice(cursor, _ENTRIES_AT_ONCE)):
                keys, value_sizes = zip(*entries, strict=True)
                yield Entries(pa.array(keys, pa.large_binary()), np.array(value_sizes))

    def records(self, keys: np.ndarray, layout: RecordsLayout) -> None:
        return None


# By device and inode: the library refuses to open a file that is open in the process.
_libraries: weakref.WeakValueDictionary[tuple[int, int], _Library] = (
    weakref.WeakValueDictionary()
)


def _library(file: OpenFile) -> _Library:
    """Return the library's view of a file, which all who read it in this process share."""
    status = os.fstat(file.descriptor)
    inode = status.st_dev, status.st_ino
    library = _libraries.get(inode)
    if library is None:
        library = _libraries[inode] = _Library(file.address)
    return library


@dataclass(frozen=True)
class Shard:
    """A file of a store.

    Attributes:
        path: its path or URI, for errors.
        file: a local file stays open, and forked children share it, since reads do not move its position. A remote
            file is downloaded when its first record is read.
    """

    path: str
    file: LMDBFile | RemoteFile

    def open(self) -> LMDBFile:
        if isinstance(self.file, LMDBFile):
            return self.file
        return shared_cache().get(self.file, LMDBFile)


class Shards(PartedStore):
    """The files of an open store."""

    groups = None

    def __init__(self, shards: Sequence[Shard], sizes: Sequence[int]) -> None:
        self.shards = shards
        self.offsets = np.cumsum([0, *sizes], dtype=np.int64)
        self.written = hash_of_facts([shard.file.written for shard in shards])

    @abstractmethod
    def _key(self, number: int, row: int) -> str:
        """Return the key of a sample of a file, in words."""

    def sample_name(self, index: int) -> str:
        number, row = self.part_of(index)
        return f"{self.shards[number].path}, key {self._key(number, row)}"

    def is_at_hand(self, indices: np.ndarray, columns: tuple[str, ...]) -> bool:
        """Return whether the files of samples are on this node's disk."""
        files = [self.shards[number].file for number, _ in self.by_part(indices)]
        return all(
            isinstance(file, LMDBFile) or shared_cache().find(file, LMDBFile)
            for file in files
        )
