"""The node's cache of remote shards, for stores that need local files: LMDB and tar.

    CACHE/shards/KEY            a whole object, unpacked if it was compressed; accessed when it was last used, to a
                                second; modified at time 0, or it is not as it was downloaded
    CACHE/shards/KEY-BOOT       ranges of an object, see `storage.byte_ranges`, with the id of the machine's boot:
                                they may lose bytes when the machine stops
    CACHE/shards/KEY-BOOT.partial    the first bytes of a download, which the next one of the object continues
    CACHE/shards/.KEY-BOOT      ranges or an unpacked object, while a process writes it
    CACHE/shards/.lock          exclusive lock of the process that downloads a whole object
    CACHE/shards/.lock-NN       of the processes that fetch ranges or unpack an object whose key has this number
    CACHE/shards/.room          see `storage.limited_folder`

All processes of a node share the cache. One shard is downloaded at a time, by the first process that needs it.
Files are evicted for new ones, least recently used first: a process that has an evicted file open keeps reading
the unlinked file, and closes it within half a second if idle.

    RAYPIPE_CACHE          the folder; by default raypipe's folder in the user's cache
    RAYPIPE_CACHE_BYTES    limit of all shards together; by default nine tenths of the disk's free space
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from io import BufferedRandom
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from raypipe.background import Repeating
from raypipe.errors import StoreError
from raypipe.storage.byte_ranges import ByteRanges, read_pieces
from raypipe.storage.files import RemoteFile, digest_of_file
from raypipe.storage.limited_folder import Room, TooLargeError
from raypipe.storage.local_file import (
    boot_id,
    locked,
    make_cache_folder,
)
from raypipe.storage.read_limit import byte_limit
from raypipe.storage.retries import report_progress
from raypipe.storage.unpack import unpack_pieces

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_DISK_SHARE = 0.9
# Each open shard takes a file descriptor of the process.
_MAX_OPEN = 256
_LOOK_S = 0.5
# Modification time of a file that is as it was made.
_UNTOUCHED_NS = 0
# The time of a file's last use is written this often at most: stores ask for the same file many times a second.
_TOUCH_S = 1.0
# Variables that say where the cache is, and how large.
_SETTINGS = ("RAYPIPE_CACHE", "RAYPIPE_CACHE_BYTES", "XDG_CACHE_HOME", "HOME")
# Locks of parts: far more than the threads of a node that fetch at a time.
_NUM_LOCKS = 64
# Twice as for whole objects: a group of a tar of 8 MiB, with its headers, is one request.
_RANGE_BYTES = 16 << 20
# An unpacked object is given room in steps.
_STEP_BYTES = 64 << 20


class Unpacked(NamedTuple):
    """The content of a compressed file, local or remote, as an entry of the cache."""

    file: RemoteFile

    @property
    def num_bytes(self) -> int | None:
        """None: it is not known before."""
        return None

    @property
    def address(self) -> str:
        return self.file.address

    @property
    def written(self) -> tuple[int, str]:
        return self.file.written

    @property
    def key(self) -> str:
        return f"{self.file.key}-unpacked"


CacheEntry = RemoteFile | ByteRanges | Unpacked


class _OpenEntry(NamedTuple, Generic[_T]):
    """An open file of the cache: the object that the opener returned, the file's inode, and its path."""

    content: _T
    inode: int
    path: Path


def shared_cache() -> LocalCache:
    """Return this process's view of the node's cache, as configured by the environment."""
    return _cache_of(tuple(map(os.environ.get, _SETTINGS)))


@functools.cache
def _cache_of(settings: tuple[str | None, ...]) -> LocalCache:
    limit_bytes = byte_limit("RAYPIPE_CACHE_BYTES") or 0
    try:
        folder = make_cache_folder("shards")
    except OSError as error:
        raise StoreError(
            f"the cache cannot be used: {error}; set RAYPIPE_CACHE to another folder"
        ) from error
    return LocalCache(folder, limit_bytes)


class LocalCache:
    """Cache of shards as local files, for the threads of one process.

    Args:
        folder: folder that all processes of the node share.
        limit_bytes: limit of all shards; 0 = nine tenths of the disk's free space plus the cache's size.
    """

    def __init__(self, folder: Path, limit_bytes: int = 0) -> None:
        self._folder = folder
        self._room = Room(folder, limit_bytes or None, _DISK_SHARE)
        self._open: OrderedDict[CacheEntry, _OpenEntry[Any]] = OrderedDict()
        self._mutex = threading.Lock()
        # an idle process would not close them otherwise
        Repeating(self.close_evicted, _LOOK_S, "raypipe-cache").start()

    def get(self, file: CacheEntry, opener: Callable[[Path], _T]) -> _T:
        """Return an opened shard, which stays open until it is evicted and nothing refers to it.

        Args:
            file: the shard, a part of one, or a compressed one, which is unpacked.
            opener: opens the local file at a path, which may be removed afterwards. The returned object must close
                the file when it is freed.
        """
        return self._kept(file, self._open.get(file) or self._enter(file, opener))

    def find(self, file: CacheEntry, opener: Callable[[Path], _T]) -> _T | None:
        """Return an opened shard as `get` does if it is in the cache; else None, and nothing is fetched."""
        with contextlib.suppress(FileNotFoundError):
            if entry := self._open.get(file) or self._opened(file, opener):
                return self._kept(file, entry)
        return None

    def path_of(self, file: CacheEntry) -> Path:
        """Return the path of the file that has a shard, or a part of one."""
        if isinstance(file, ByteRanges):
            return self._folder / f"{file.key}-{boot_id()}"
        return self._folder / file.key

    def close(self, files: Iterable[object]) -> None:
        """Close these shards, and their parts, when nothing refers to them any more; they stay in the cache."""
        with self._mutex:
            closed = set(files)
            for file in list(self._open):
                if file in closed or (
                    isinstance(file, ByteRanges) and file.file in closed
                ):
                    del self._open[file]

    def close_evicted(self) -> None:
        """Close the shards that have been evicted, to free their disk space."""
        with self._mutex:
            entries = list(self._open.items())
        self.close(
            [file for file, entry in entries if _inode(entry.path) != entry.inode]
        )

    def _kept(self, file: CacheEntry, entry: _OpenEntry[_T]) -> _T:
        with self._mutex:
            # another thread may have been faster
            entry = self._open.setdefault(file, entry)
            self._open.move_to_end(file)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        with contextlib.suppress(OSError):  # a user may have emptied the cache
            status = entry.path.stat()
            if time.time() - status.st_atime >= _TOUCH_S:
                os.utime(entry.path, ns=(time.time_ns(), status.st_mtime_ns))
        return entry.content

    def _opened(
        self, file: CacheEntry, opener: Callable[[Path], _T]
    ) -> _OpenEntry[_T] | None:
        """Return an opened shard; None if the cache does not have it."""
        data = self.path_of(file)
        while _is_whole(data, file):
            inode = _inode(data)
            try:
                return _OpenEntry(opener(data), inode, data)
            except (OSError, StoreError):
                if _is_whole(data, file):  # otherwise it was evicted at this moment
                    raise
        return None

    def _enter(self, file: CacheEntry, opener: Callable[[Path], _T]) -> _OpenEntry[_T]:
        data = self.path_of(file)
        lock = ".lock"
        if not isinstance(file, RemoteFile):
            lock = f".lock-{int(file.key[:8], 16) % _NUM_LOCKS:02}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while True:
                if entry := self._opened(file, opener):
                    return entry
                with locked(self._folder / lock):
                    if not _is_whole(data, file):
                        self._make(file, data)
        except OSError as error:
            raise StoreError(
                f"{self._folder} cannot be written to: {error}; make room, lower RAYPIPE_CACHE_BYTES, or set "
                "RAYPIPE_CACHE to another disk"
            ) from error

    def _make(self, file: CacheEntry, data: Path) -> None:
        """Make a file; the caller has its lock."""
        is_object = isinstance(file, RemoteFile)
        name = f"{file.key}-{boot_id()}"
        partial = self._folder / (f"{name}.partial" if is_object else f".{name}")
        try:
            partial.touch(0o600)
            with partial.open("r+b") as target:
                self._fill(file, partial, target)
                os.utime(target.fileno(), ns=(time.time_ns(), _UNTOUCHED_NS))
                if not isinstance(file, ByteRanges):
                    os.fsync(target.fileno())
            partial.replace(data)
        finally:
            if not is_object:
                partial.unlink(missing_ok=True)

    def _fill(self, file: CacheEntry, partial: Path, target: BufferedRandom) -> None:
        """Write a file's bytes in order, so that the length of an object's is its progress."""
        num_bytes = 0
        room = file.num_bytes or 0
        if room:
            self._make_room(file, partial, room)
        if isinstance(file, RemoteFile):  # an earlier download goes on
            num_bytes = target.seek(0, os.SEEK_END)
        for piece in _pieces(file, num_bytes):
            num_bytes += len(piece)
            if num_bytes > room:
                room += _STEP_BYTES
                self._make_room(file, partial, room)
            target.write(piece)
            target.flush()
            report_progress()
        target.truncate()
        if isinstance(file, RemoteFile) and file.digest:
            digest = digest_of_file(partial)
            if digest != file.digest:
                target.truncate(0)
                raise StoreError(
                    f"{file.address} is damaged: its checksum is {digest}, but it was written with "
                    f"{file.digest}; convert it again"
                )

    def _make_room(self, file: CacheEntry, partial: Path, num_bytes: int) -> None:
        """Let a file that is being made grow to so many bytes."""
        try:
            self._room.take(partial, num_bytes, is_exact=isinstance(file, RemoteFile))
        except TooLargeError as error:
            (limit,) = error.args
            raise StoreError(
                f"{file.address} has {num_bytes:,} bytes, but the cache in {self._folder} has a "
                f"limit of {limit:,}: raise RAYPIPE_CACHE_BYTES, set RAYPIPE_CACHE to a larger disk, or "
                "convert the store into smaller shards (--shards)"
            ) from None


def _pieces(file: CacheEntry, start: int) -> Iterator[bytes]:
    """Return the bytes of an entry in pieces, those of an object from `start` on."""
    if isinstance(file, ByteRanges):
        return read_pieces(file.file, file.ranges, _RANGE_BYTES)
    stored = file.file if isinstance(file, Unpacked) else file
    logger.info("fetching %s, %.1f MiB", file.address, stored.num_bytes / 2**20)
    pieces = read_pieces(stored, [(start, stored.num_bytes)])
    if isinstance(file, Unpacked):
        return unpack_pieces(pieces, file.address, stored.num_bytes)
    return pieces


def _is_whole(data: Path, file: CacheEntry) -> bool:
    """Return whether a file is complete and unchanged."""
    try:
        status = data.stat()
    except FileNotFoundError:
        return False
    has_size = file.num_bytes in (None, status.st_size)
    return has_size and status.st_mtime_ns == _UNTOUCHED_NS


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


# A forked child lacks the thread that closes evicted shards, so it makes its own `LocalCache`.
os.register_at_fork(after_in_child=_cache_of.cache_clear)
