"""The node's cache of remote shards, for stores that need local files: LMDB and tar.

    CACHE/shards/KEY/        one folder per version of an object; its modification time is the last use
        data                 the whole object
        partial-BOOT         the first bytes of a running download, with the id of the machine's boot
    CACHE/shards/.lock       exclusive lock of the process that downloads and makes room

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
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from raypipe.environment import variable
from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import RemoteFile, hash_of, look_up, opened
from raypipe.storage.local_file import boot_id, cache_folder, locked, make_cache_folder
from raypipe.storage.patience import Threads, progress

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DISK_SHARE = 0.9
# Each open shard takes a file descriptor of the process.
_MAX_OPEN = 256
_LOOK_S = 0.5
# Size of a download's ranged reads. A process that dies loses up to _NUM_AHEAD of them.
PART_BYTES = 8 << 20
# Reads under way at a time, for the whole node: object stores serve 50 to 100 MB/s per connection.
_NUM_AHEAD = 16
# Modification time of a file that is unchanged since its download.
_UNTOUCHED_NS = 0


def shared_cache() -> LocalCache:
    """Return this process's view of the node's cache, as configured by the environment."""
    text = variable("RAYPIPE_CACHE_BYTES") or "0"
    if not text.isdecimal():
        raise ConfigError(f"RAYPIPE_CACHE_BYTES must be a whole number of bytes, got {text!r}")
    key = (cache_folder() / "shards", int(text))
    if key not in _caches:
        try:
            make_cache_folder("shards")
        except OSError as error:
            raise StoreError(f"the cache cannot be used: {error}; set RAYPIPE_CACHE to another folder") from error
        _caches.setdefault(key, LocalCache(*key))  # another thread may have been faster
    return _caches[key]


class LocalCache:
    """Cache of shards as local files, for the threads of one process.

    Args:
        folder: folder that all processes of the node share.
        limit_bytes: limit of all shards; 0 = nine tenths of the disk's free space plus the cache's size.
    """

    def __init__(self, folder: Path, limit_bytes: int = 0) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._open: OrderedDict[RemoteFile, tuple[Any, int]] = OrderedDict()  # opened shard, and its file's inode
        self._mutex = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def get(self, file: RemoteFile, opener: Callable[[Path], T]) -> T:
        """Return an opened shard, which stays open until it is evicted and nothing refers to it.

        Args:
            file: the shard.
            opener: opens the local file at a path, which may be removed afterwards. The returned object must close
                the file when it is freed.
        """
        entry = self._open.get(file) or self._enter(file, opener)
        with self._mutex:
            entry = self._open.setdefault(file, entry)  # another thread may have been faster
            self._open.move_to_end(file)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        with contextlib.suppress(OSError):  # a user may have emptied the cache
            os.utime(self.folder_of(file))
        return entry[0]

    def folder_of(self, file: RemoteFile) -> Path:
        """Return the folder of a shard."""
        text = f"{file.address} {file.num_bytes} {file.version} {file.digest}"
        return self._folder / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def close(self, files: list[RemoteFile]) -> None:
        """Close these shards when nothing refers to them any more; they stay in the cache."""
        with self._mutex:
            for file in files:
                self._open.pop(file, None)

    def close_evicted(self) -> None:
        """Close the shards that have been evicted, to free their disk space."""
        with self._mutex:
            entries = list(self._open.items())
        self.close([file for file, (_, inode) in entries if _inode(self.folder_of(file) / "data") != inode])

    def _watch(self) -> None:
        while True:  # an idle process would not close them otherwise
            time.sleep(_LOOK_S)
            self.close_evicted()

    def _enter(self, file: RemoteFile, opener: Callable[[Path], T]) -> tuple[T, int]:
        data = self.folder_of(file) / "data"
        try:
            data.parent.mkdir(parents=True, exist_ok=True)
            while True:
                if _is_whole(data, file):
                    inode = _inode(data)
                    try:
                        return opener(data), inode
                    except (OSError, StoreError):
                        if _is_whole(data, file):  # otherwise it was evicted at this moment
                            raise
                with locked(self._folder / ".lock"):
                    if not _is_whole(data, file):
                        self._make_room(file)
                        _fetch(file, data.parent)
        except OSError as error:
            raise StoreError(
                f"{data.parent} cannot be written to: {error}; make room, lower RAYPIPE_CACHE_BYTES, or set "
                "RAYPIPE_CACHE to another disk"
            ) from error

    def _make_room(self, file: RemoteFile) -> None:
        """Evict shards, least recently used first, until this one fits."""
        folders = {path: path.stat().st_mtime_ns for path in self._folder.iterdir() if path.is_dir()}
        folders.pop(self.folder_of(file), None)
        order = sorted(folders, key=folders.__getitem__)
        contents = [path for folder in order for path in (folder / "data", *folder.glob("partial-*"))]
        sizes = {path: path.stat().st_size for path in contents if path.exists()}
        total_bytes = sum(sizes.values())
        limit = self._limit_bytes or int(_DISK_SHARE * (shutil.disk_usage(self._folder).free + total_bytes))
        if file.num_bytes > limit:
            raise StoreError(
                f"{file.address} has {file.num_bytes:,} bytes, but the cache in {self._folder} has a limit of "
                f"{limit:,}: raise RAYPIPE_CACHE_BYTES, set RAYPIPE_CACHE to a larger disk, or convert the store "
                "into smaller shards (--shards)"
            )
        for path, num_bytes in sizes.items():
            if total_bytes + file.num_bytes > limit:
                path.unlink(missing_ok=True)
                total_bytes -= num_bytes


def _is_whole(data: Path, file: RemoteFile) -> bool:
    """Return whether a complete and unchanged download of an object exists."""
    try:
        status = data.stat()
    except FileNotFoundError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.num_bytes, _UNTOUCHED_NS)


def _fetch(file: RemoteFile, folder: Path) -> None:
    """Download an object to `folder`/data, or continue a partial download.

    Bytes are written in order, so that the file's length is the progress, and hashed as they arrive. After a
    failure, such as a full disk, the partial file stays for the next attempt.
    """
    # The name has the boot id: after a power failure, any part of an older file may be missing.
    partial = folder / f"partial-{boot_id()}"
    logger.info("fetching %s, %.1f MiB", file.address, file.num_bytes / 2**20)
    for old in {folder / "data", *folder.glob("partial-*")} - {partial}:
        old.unlink(missing_ok=True)
    with partial.open("ab+") as target:
        target.seek(0)
        digest = hash_of(target)
        for part in _download(file, target.tell()):
            target.write(part)
            target.flush()
            digest.update(part)
        os.utime(target.fileno(), ns=(_UNTOUCHED_NS, _UNTOUCHED_NS))
        os.fsync(target.fileno())
    if file.digest and digest.hexdigest() != file.digest:
        partial.unlink()
        raise StoreError(
            f"{file.address} is damaged: its checksum is {digest.hexdigest()}, but it was written with "
            f"{file.digest}; convert it again"
        )
    partial.replace(folder / "data")


def _download(wanted: RemoteFile, start: int) -> Iterator[bytes]:
    """Yield an object's bytes from `start` to its end, in order, with several concurrent reads."""
    window = _NUM_AHEAD * PART_BYTES
    with opened(wanted.address) as (source, current), Threads(_NUM_AHEAD) as pool:
        wanted.check_same(current)
        for first in range(start, wanted.num_bytes, window):
            starts = range(first, min(first + window, wanted.num_bytes), PART_BYTES)
            sizes = [min(PART_BYTES, wanted.num_bytes - offset) for offset in starts]
            for num_bytes, data in zip(sizes, pool.map(source.read_at, sizes, starts), strict=True):
                if len(data) != num_bytes:
                    raise OSError("the object became shorter during the download")
                yield data
                progress()
    wanted.check_same(look_up(wanted.address))  # never mix byte ranges of two versions of an object


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


_caches: dict[tuple[Path, int], LocalCache] = {}
# A forked child lacks the thread that closes evicted shards, so it makes its own `LocalCache`.
os.register_at_fork(after_in_child=_caches.clear)
