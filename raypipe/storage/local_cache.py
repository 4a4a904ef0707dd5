"""The node's cache of remote shards, for stores that need local files: LMDB and tar.

    CACHE/shards/KEY/        one folder per version of an object
        data                 the whole object
        partial-BOOT         its first bytes, while it is being downloaded, since this start of the machine
        lock                 exclusive lock: somebody is downloading, opening or evicting it. Its length is the
                             room that the object has or will have, its time of change that of the last use
    CACHE/shards/.lock       exclusive lock: somebody is making room

All processes of a node share it. A shard is downloaded once, by whoever comes first, while others wait. When
another needs its room it is evicted, least recently used first: who has it open reads on in the file that has no
name any more, and closes it within half a second if it is idle.

    RAYPIPE_CACHE          the folder; raypipe's in the user's cache by default
    RAYPIPE_CACHE_BYTES    limit of all shards together; nine tenths of what the disk has free by default
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.file_lock import POLL_S, locked, open_lock, progress, try_lock
from raypipe.storage.local_file import boot_id, cache_folder, make_cache_folder
from raypipe.storage.remote_file import RemoteFile, download, hash_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DISK_SHARE = 0.9
# Each open shard takes a file descriptor of the process.
_MAX_OPEN = 256
_LOOK_S = 0.5
# The time of change of what nobody has touched since it was downloaded.
_UNTOUCHED_NS = 0


def shared_cache() -> LocalCache:
    """This process's view of the node's cache, as the environment has it.

    Raises:
        ConfigError: its limit is no number.
        StoreError: its folder cannot be made, or is another user's.
    """
    text = os.environ.get("RAYPIPE_CACHE_BYTES") or "0"
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
    """Shards as local files, for the threads of one process.

    Args:
        folder: shared by all processes of the node.
        limit_bytes: of all shards; 0 = nine tenths of what the disk has free, and what the cache holds.
    """

    def __init__(self, folder: Path, limit_bytes: int = 0) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._open: OrderedDict[tuple[RemoteFile, str], _Open] = OrderedDict()
        self._mutex = threading.Lock()
        threading.Thread(target=_close_evicted, args=(weakref.ref(self),), daemon=True).start()

    @contextlib.contextmanager
    def use(self, file: RemoteFile, opener: Callable[[Path], T], kind: str = "") -> Iterator[T]:
        """A shard, opened; it stays open afterwards, until its place is needed.

        Args:
            file: the shard.
            opener: opens the local file at a path, which may be gone afterwards. What it makes closes the file
                when it is freed.
            kind: of opener, where there are several.

        Raises:
            StoreError: it is gone or has changed, cannot be read, or is larger than the cache.
        """
        with self._mutex:
            held = self._take(file, kind)
        if held is None:
            opened = self._enter(file, opener)
            with self._mutex:
                self._open.setdefault((file, kind), opened)  # another thread may have been faster
                held = self._take(file, kind)
            assert held is not None
            del opened
            self._close_idle(_MAX_OPEN)
        with contextlib.suppress(OSError):  # somebody may have emptied the cache
            os.utime(held.lock)
        try:
            yield held.content
        finally:
            with self._mutex:
                held.users -= 1

    def folder_of(self, file: RemoteFile) -> Path:
        """The folder of a shard, where small files that were made of it may be kept: they are never evicted."""
        text = f"{file.address} {file.num_bytes} {file.version} {file.digest}"
        return self._folder / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def close(self, files: list[RemoteFile]) -> None:
        """Close those of these shards that nobody is using now; they stay in the cache."""
        with self._mutex:
            for key, held in [*self._open.items()]:
                if key[0] in files and not held.users:
                    del self._open[key]

    def close_evicted(self) -> None:
        """Close the shards that the cache has no more, and that nobody is using now: their room is wanted."""
        with self._mutex:
            held = [(file, open_.inode) for (file, _), open_ in self._open.items()]
        self.close([file for file, inode in held if _inode(self.folder_of(file) / "data") != inode])

    def _close_idle(self, num_left: int) -> None:
        with self._mutex:
            files = [file for file, _ in self._open]
        self.close(files[: max(0, len(files) - num_left)])

    def _take(self, file: RemoteFile, kind: str) -> _Open | None:
        held = self._open.get((file, kind))
        if held is not None:
            held.users += 1
            self._open.move_to_end((file, kind))
        return held

    def _enter(self, file: RemoteFile, opener: Callable[[Path], Any]) -> _Open:
        folder = self.folder_of(file)
        data, lock = folder / "data", folder / "lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(lock):
                if not _is_whole(data, file):
                    self._make_room(file, lock)
                    _fetch(file, folder)
                return _Open(opener(data), data.stat().st_ino, lock)
        except OSError as error:
            raise StoreError(
                f"{folder} cannot be written to: {error}; make room, lower RAYPIPE_CACHE_BYTES, or set "
                "RAYPIPE_CACHE to another disk"
            ) from error

    def _make_room(self, file: RemoteFile, lock: Path) -> None:
        """Evict shards until this one fits, and reserve its room."""
        os.truncate(lock, 0)  # two that were broken off and want the room of each other would wait for ever
        while True:
            with locked(self._folder / ".lock"):
                others = set(self._folder.glob("*/lock")) - {lock}
                sizes = {path: path.stat().st_size for path in others}
                free_bytes = shutil.disk_usage(self._folder).free
                limit = self._limit_bytes or int(_DISK_SHARE * (free_bytes + sum(sizes.values())))
                if file.num_bytes > limit:
                    raise StoreError(
                        f"{file.address} has {file.num_bytes:,} bytes, the cache in {self._folder} a limit of "
                        f"{limit:,}: raise RAYPIPE_CACHE_BYTES, set RAYPIPE_CACHE to a larger disk, or ingest "
                        "into smaller shards (--shards)"
                    )
                if _evict(sizes, limit - file.num_bytes):
                    os.truncate(lock, file.num_bytes)
                    return
            progress()  # the others are being downloaded: once they are here, they may be evicted
            time.sleep(POLL_S)


@dataclass
class _Open:
    """A shard that this process has open, of which file, its lock, and how many are using it now."""

    content: Any
    inode: int
    lock: Path
    users: int = 0


def _evict(sizes: dict[Path, int], wanted: int) -> bool:
    """Evict, least recently used first, until at most `wanted` bytes are left; whether that could be.

    Args:
        sizes: bytes of all shards, by their locks.
        wanted: bytes that may be left.
    """
    left = sum(sizes.values())
    for path in sorted(filter(sizes.get, sizes), key=lambda path: path.stat().st_mtime_ns):
        if left <= wanted:
            break
        lock = open_lock(path)
        if try_lock(lock, exclusive=True):
            for file in (path.with_name("data"), *path.parent.glob("partial-*")):
                file.unlink(missing_ok=True)
            os.ftruncate(lock, 0)
            left -= sizes[path]
        os.close(lock)
    return left <= wanted


def _is_whole(data: Path, file: RemoteFile) -> bool:
    """Whether an object is there as it was downloaded."""
    try:
        found = data.stat()
    except FileNotFoundError:
        return False
    return (found.st_size, found.st_mtime_ns) == (file.num_bytes, _UNTOUCHED_NS)


def _fetch(file: RemoteFile, folder: Path) -> None:
    """Download an object to `folder`/data; what is there of it is not asked for again.

    It is written in order, so that its length tells how far it came, and hashed as it arrives.

    Raises:
        StoreError: it is gone, is another one now, cannot be read, or does not have the digest that was recorded.
        OSError: the disk is full. What has arrived stays, for the next one who tries.
    """
    # By the machine's start: what was written before its power failed may be missing, in whatever place.
    partial = folder / f"partial-{boot_id()}"
    logger.info("fetching %s, %.1f MiB", file.address, file.num_bytes / 2**20)
    for old in {folder / "data", *folder.glob("partial-*")} - {partial}:
        old.unlink(missing_ok=True)
    with partial.open("ab+") as target:
        target.seek(0)
        digest = hash_of(target)
        for part in download(file, target.tell()):
            target.write(part)
            target.flush()
            digest.update(part)
        os.utime(target.fileno(), ns=(_UNTOUCHED_NS, _UNTOUCHED_NS))
        os.fsync(target.fileno())
    if file.digest and digest.hexdigest() != file.digest:
        partial.unlink()
        raise StoreError(
            f"{file.address} has the checksum {digest.hexdigest()}, and was written with {file.digest}: it is "
            "damaged; ingest it again"
        )
    partial.replace(folder / "data")


def _close_evicted(cache: weakref.ref[LocalCache]) -> None:
    """Look twice a second: an idle process would never come to it otherwise."""
    while (found := cache()) is not None:
        found.close_evicted()
        del found
        time.sleep(_LOOK_S)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


_caches: dict[tuple[Path, int], LocalCache] = {}
# A forked child has no thread that closes what is evicted: it takes a view of its own.
os.register_at_fork(after_in_child=_caches.clear)
