"""The node's cache of remote shards, for stores that need local files: LMDB and tar.

    CACHE/shards/KEY/        one folder per version of an object; modified when it was last used, to a second
        data                 the whole object, unpacked if it was compressed
        partial-BOOT         the first bytes of a running download, with the id of the machine's boot
    CACHE/shards/KEY-BOOT.part    ranges of an object, see `storage.byte_ranges`; modified = last used
    CACHE/shards/.lock       exclusive lock of the process that downloads a whole object
    CACHE/shards/.lock-NN    of the processes that fetch a part or unpack an object whose key has this number
    CACHE/shards/.room       of the process that makes room; the file's text = bytes of all shards and parts

All processes of a node share the cache. One shard is downloaded at a time, by the first process that needs it.
Shards are evicted for new ones, least recently used first: a process that has an evicted shard open keeps reading
the unlinked file, and closes it within half a second if idle.

    RAYPIPE_CACHE          the folder; by default raypipe's folder in the user's cache
    RAYPIPE_CACHE_BYTES    limit of all shards together; by default nine tenths of the disk's free space
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from raypipe.environment import variable
from raypipe.errors import ConfigError, StoreError
from raypipe.storage.byte_ranges import ByteRanges
from raypipe.storage.download import UNTOUCHED_NS, download, read_pieces
from raypipe.storage.files import RemoteFile
from raypipe.storage.local_file import (
    boot_id,
    locked,
    make_cache_folder,
)
from raypipe.storage.retries import report_progress
from raypipe.storage.unpack import unpack_pieces

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_DISK_SHARE = 0.9
# Each open shard takes a file descriptor of the process.
_MAX_OPEN = 256
_LOOK_S = 0.5
# The time of a file's last use is written this often at most: stores ask for the same file many times a second.
_TOUCH_S = 1.0
# Variables that say where the cache is, and how large.
_SETTINGS = ("RAYPIPE_CACHE", "RAYPIPE_CACHE_BYTES", "XDG_CACHE_HOME", "HOME")
# Locks of parts: far more than the threads of a node that fetch at a time.
_NUM_LOCKS = 64
_PART_SUFFIX = ".part"
_IN_USE = 1 << 63  # later than any time
# after that a hidden part is one of a process that was killed
_LONGEST_FETCH_NS = 3600 * 10**9
# Share of the limit that is freed at once for parts, since finding the oldest ones looks at every file.
_FREED_SHARE = 0.05
# An unpacked object is given room in steps.
_STEP_BYTES = 64 << 20


class Unpacked(NamedTuple):
    """The content of a compressed file, local or remote, as an entry of the cache."""

    file: RemoteFile

    @property
    def address(self) -> str:
        return self.file.address

    @property
    def written(self) -> tuple[int, str]:
        return self.file.written


CacheEntry = RemoteFile | ByteRanges | Unpacked


class _OpenEntry(Generic[_T]):
    """An open file of the cache.

    Attributes:
        content: the object that the opener returned.
        inode: the file's.
        path: its path; for whole objects, their folder has the time of the last use.
        touched_s: `time.monotonic()` when the time of the last use was written.
    """

    __slots__ = ("content", "inode", "path", "touched_s")

    def __init__(self, content: _T, inode: int, path: Path) -> None:
        self.content = content
        self.inode = inode
        self.path = path
        self.touched_s = -_TOUCH_S


def shared_cache() -> LocalCache:
    """Return this process's view of the node's cache, as configured by the environment."""
    settings = tuple(map(os.environ.get, _SETTINGS))
    cache = _caches.get(settings)
    if cache is None:
        # another thread may be faster
        cache = _caches.setdefault(settings, _make_cache())
    return cache


def _make_cache() -> LocalCache:
    text = variable("RAYPIPE_CACHE_BYTES") or "0"
    if not text.isdecimal():
        raise ConfigError(
            f"RAYPIPE_CACHE_BYTES must be a whole number of bytes, got {text!r}"
        )
    try:
        folder = make_cache_folder("shards")
    except OSError as error:
        raise StoreError(
            f"the cache cannot be used: {error}; set RAYPIPE_CACHE to another folder"
        ) from error
    return LocalCache(folder, int(text))


class LocalCache:
    """Cache of shards as local files, for the threads of one process.

    Args:
        folder: folder that all processes of the node share.
        limit_bytes: limit of all shards; 0 = nine tenths of the disk's free space plus the cache's size.
    """

    def __init__(self, folder: Path, limit_bytes: int = 0) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._open: OrderedDict[CacheEntry, _OpenEntry[Any]] = OrderedDict()
        self._mutex = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def get(self, file: CacheEntry, opener: Callable[[Path], _T]) -> _T:
        """Return an opened shard, which stays open until it is evicted and nothing refers to it.

        Args:
            file: the shard, a part of one, or a compressed one, which is unpacked.
            opener: opens the local file at a path, which may be removed afterwards. The returned object must close
                the file when it is freed.
        """
        return self._kept(file, self._open.get(file) or self._enter(file, opener))

    def find_open(self, file: CacheEntry) -> Any:
        """Return a shard that this process has open, and None for others; nothing is opened."""
        entry = self._open.get(file)
        return None if entry is None else self._kept(file, entry)

    def find(self, file: CacheEntry, opener: Callable[[Path], _T]) -> _T | None:
        """Return an opened shard as `get` does if it is in the cache; else None, and nothing is fetched."""
        entry = self._open.get(file)
        if entry is None:
            with contextlib.suppress(FileNotFoundError):
                entry = self._opened(file, opener)
        return None if entry is None else self._kept(file, entry)

    def folder_of(self, file: RemoteFile | Unpacked) -> Path:
        """Return the folder of a shard."""
        whole = file.file if isinstance(file, Unpacked) else file
        text = f"{whole.address} {whole.num_bytes} {whole.version} {whole.digest}"
        if isinstance(file, Unpacked):
            text += " unpacked"
        return self._folder / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

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

    def _place_of(self, file: CacheEntry) -> Path:
        if isinstance(file, ByteRanges):
            return self._folder / f"{file.name}-{boot_id()}{_PART_SUFFIX}"
        return self.folder_of(file) / "data"

    def _watch(self) -> None:
        while True:  # an idle process would not close them otherwise
            time.sleep(_LOOK_S)
            self.close_evicted()

    def _kept(self, file: CacheEntry, entry: _OpenEntry[_T]) -> _T:
        now_s = time.monotonic()
        with self._mutex:
            # another thread may have been faster
            entry = self._open.setdefault(file, entry)
            self._open.move_to_end(file)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
            is_touched = now_s - entry.touched_s < _TOUCH_S
            if not is_touched:
                entry.touched_s = now_s
        if not is_touched:
            with contextlib.suppress(OSError):  # a user may have emptied the cache
                os.utime(
                    entry.path if isinstance(file, ByteRanges) else entry.path.parent
                )
        return entry.content

    def _opened(
        self, file: CacheEntry, opener: Callable[[Path], _T]
    ) -> _OpenEntry[_T] | None:
        """Return an opened shard; None if the cache does not have it."""
        data = self._place_of(file)
        while _is_whole(data, file):
            inode = _inode(data)
            try:
                return _OpenEntry(opener(data), inode, data)
            except (OSError, StoreError):
                if _is_whole(data, file):  # otherwise it was evicted at this moment
                    raise
        return None

    def _enter(self, file: CacheEntry, opener: Callable[[Path], _T]) -> _OpenEntry[_T]:
        data = self._place_of(file)
        lock = ".lock"
        if not isinstance(file, RemoteFile):
            key = (data if isinstance(file, ByteRanges) else data.parent).name[:8]
            lock = f".lock-{int(key, 16) % _NUM_LOCKS:02}"
        try:
            data.parent.mkdir(parents=True, exist_ok=True)
            while True:
                if entry := self._opened(file, opener):
                    return entry
                with locked(self._folder / lock):
                    if not _is_whole(data, file):
                        self._make(file, data)
        except OSError as error:
            raise StoreError(
                f"{data.parent} cannot be written to: {error}; make room, lower RAYPIPE_CACHE_BYTES, or set "
                "RAYPIPE_CACHE to another disk"
            ) from error

    def _make(self, file: CacheEntry, data: Path) -> None:
        if isinstance(file, RemoteFile):
            self._make_room(file, file.num_bytes)
            download(file, data.parent)
        elif isinstance(file, Unpacked):
            self._unpack(file, data.parent)
        else:
            partial = data.with_name(f".{data.name}.{secrets.token_hex(4)}")
            try:
                self._make_room(file, file.num_bytes, reserved=partial)
                file.fetch(partial)
                partial.replace(data)
            finally:
                partial.unlink(missing_ok=True)

    def _unpack(self, file: Unpacked, folder: Path) -> None:
        """Unpack a file to `folder`/data."""
        partial = folder / f"partial-{boot_id()}"
        logger.info("unpacking %s, %.1f MiB", file.address, file.file.num_bytes / 2**20)
        for old in (folder / "data", *folder.glob("partial-*")):
            old.unlink(missing_ok=True)
        num_bytes = room = 0
        with partial.open("xb") as target:
            for piece in unpack_pieces(
                read_pieces(file.file), file.address, file.file.num_bytes
            ):
                if num_bytes + len(piece) > room:
                    self._make_room(file, _STEP_BYTES, room)
                    room += _STEP_BYTES
                target.write(piece)
                num_bytes += len(piece)
                report_progress()
            target.flush()
            os.utime(target.fileno(), ns=(UNTOUCHED_NS, UNTOUCHED_NS))
            os.fsync(target.fileno())
        partial.replace(folder / "data")

    def _make_room(
        self,
        file: CacheEntry,
        num_bytes: int,
        num_made: int = 0,
        reserved: Path | None = None,
    ) -> None:
        """Evict shards and parts, least recently used first, until more bytes of this one fit.

        Parts that are being fetched stay, so that a limit of a few parts may be exceeded by these.

        Args:
            num_made: bytes of it that are there already.
            reserved: a file to make with so many bytes; None = none.
        """
        record = self._folder / ".room"
        with locked(record):
            counted = record.read_text()
            used = int(counted) if counted.isdecimal() else -1
            # Whole shards count everything again, since a user may have emptied the cache.
            is_counted = used >= 0 and not isinstance(file, RemoteFile)
            if reserved:
                reserved.touch(0o600, exist_ok=False)
                os.truncate(reserved, num_bytes)
            if is_counted and used + num_bytes <= self._limit(used):
                record.write_text(str(used + num_bytes))
                return
            files = self._evictable(file)
            if reserved:
                num_bytes = 0  # its file counts
            used = sum(size for _, size, _ in files)
            limit = self._limit(used)
            needed = num_made + (reserved.stat().st_size if reserved else num_bytes)
            if needed > limit:
                raise StoreError(
                    f"{file.address} has {needed:,} bytes, but the cache in {self._folder} has a "
                    f"limit of {limit:,}: raise RAYPIPE_CACHE_BYTES, set RAYPIPE_CACHE to a larger disk, or "
                    "convert the store into smaller shards (--shards)"
                )
            kept = limit - num_bytes - num_made
            if not isinstance(file, RemoteFile) and used > kept:
                kept -= min(kept, int(_FREED_SHARE * limit))
            for last_ns, size, path in sorted(files):
                if used > kept and last_ns < _IN_USE:
                    path.unlink(missing_ok=True)
                    used -= size
            record.write_text(str(used + num_made + num_bytes))

    def _limit(self, used: int) -> int:
        return self._limit_bytes or int(
            _DISK_SHARE * (shutil.disk_usage(self._folder).free + used)
        )

    def _evictable(self, entry: CacheEntry) -> list[tuple[int, int, Path]]:
        """Return last use, size and path of the files that may be evicted for an entry."""
        if isinstance(entry, ByteRanges):
            folder_of_entry = None
        else:
            folder_of_entry = self.folder_of(entry)
        files: list[tuple[int, int, Path]] = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                # another process is done with it
                status = path.stat()
                if _PART_SUFFIX in path.name:
                    last_ns = status.st_mtime_ns
                    if (
                        path.name.startswith(".")
                        and time.time_ns() - last_ns < _LONGEST_FETCH_NS
                    ):
                        last_ns = _IN_USE
                    elif boot_id() not in path.name:
                        # it may have lost bytes when the machine stopped
                        last_ns = 0
                    files.append((last_ns, status.st_size, path))
                elif path != folder_of_entry and stat.S_ISDIR(status.st_mode):
                    for content in (path / "data", *path.glob("partial-*")):
                        with contextlib.suppress(FileNotFoundError):
                            files.append(
                                (status.st_mtime_ns, content.stat().st_size, content)
                            )
        return files


def _is_whole(data: Path, file: CacheEntry) -> bool:
    """Return whether a complete and unchanged download of an object exists."""
    try:
        status = data.stat()
    except FileNotFoundError:
        return False
    if isinstance(file, ByteRanges):
        return status.st_size == file.num_bytes
    has_size = isinstance(file, Unpacked) or status.st_size == file.num_bytes
    return has_size and status.st_mtime_ns == UNTOUCHED_NS


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


# values of _SETTINGS → cache
_caches: dict[tuple[str | None, ...], LocalCache] = {}
# A forked child lacks the thread that closes evicted shards, so it makes its own `LocalCache`.
os.register_at_fork(after_in_child=_caches.clear)
