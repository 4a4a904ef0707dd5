"""The node's cache of remote shards, for stores that need local files: LMDB and tar.

    CACHE/shards/KEY/        one folder per version of an object
        data, data.json      the whole object; what it is, its digest, and since which start of the machine
        partial, partial.json    its first bytes, while it is being downloaded; what it will be
        use.lock             shared lock: somebody has it open, or is about to; exclusive: it is being evicted.
                             Its time of change is when it was last opened
        fetch.lock           exclusive lock: somebody is downloading or checking it
    CACHE/shards/.lock       exclusive lock: somebody is making room
    CACHE/shards/.wanted     is touched by who waits for room: all others close what they do not use at the moment

All processes of a node share it. A shard is downloaded once, by whoever comes first, while others wait. It is
evicted, least recently opened first, when another needs its room, and never while any process has it open. Its
content is hashed on the way, and again when the machine was started anew or its file was touched since.

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
from pathlib import Path
from typing import Any, TypeVar

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.file_lock import POLL_S, locked, open_lock, progress, try_lock, wait_for_lock
from raypipe.storage.local_file import cache_folder, make_cache_folder
from raypipe.storage.remote_file import LocalCopy, RemoteFile

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DISK_SHARE = 0.9
# Each open shard takes two of the process's file descriptors.
_MAX_OPEN = 256
# Seconds that one who needs room waits for others to close a shard: they look twice a second whether any does.
_WAIT_S = 60.0
_LOOK_S = 0.5


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
    return _caches.setdefault(key, LocalCache(*key))  # another thread may have been faster


class LocalCache:
    """Shards as local files, for the threads of one process.

    Args:
        folder: shared by all processes of the node.
        limit_bytes: of all shards; 0 = nine tenths of what the disk has free, and what the cache holds.
        wait_s: seconds to wait for room that other processes hold.
    """

    def __init__(self, folder: Path, limit_bytes: int = 0, wait_s: float = _WAIT_S) -> None:
        self._folder, self._limit_bytes, self._wait_s = folder, limit_bytes, wait_s
        self._open: OrderedDict[RemoteFile, _Open] = OrderedDict()
        self._mutex = threading.Lock()
        self._watched = False

    @contextlib.contextmanager
    def use(self, file: RemoteFile, opener: Callable[[Path], T]) -> Iterator[T]:
        """A shard, opened; it stays open afterwards, until its place is needed.

        Args:
            file: the shard.
            opener: makes of the path of the local file what is wanted, always the same for one shard. What it
                makes closes its files when it is freed.

        Raises:
            StoreError: it is gone or has changed, cannot be read, is larger than the cache, or the cache is full
                of shards that are open.
        """
        with self._mutex:
            held = self._take(file)
        if held is None:
            descriptor, content = self._enter(file, opener)
            with self._mutex:
                held = self._take(file)  # another thread may have been faster
                if held is None:
                    held = self._open[file] = _Open(descriptor, content)
                else:
                    os.close(descriptor)
            del content
            self._watch()
            self.close_idle(_MAX_OPEN)
        try:
            yield held.content
        finally:
            with self._mutex:
                held.users -= 1

    def folder_of(self, file: RemoteFile) -> Path:
        """The folder of a shard, where small files that were made of it may be kept: they are never evicted."""
        key = hashlib.blake2b(f"{file.address} {file.num_bytes} {file.version}".encode(), digest_size=16)
        return self._folder / key.hexdigest()

    def close(self, files: list[RemoteFile]) -> None:
        """Close those of these shards that nobody is using now; they stay in the cache."""
        with self._mutex:
            for file in files:
                held = self._open.get(file)
                if held is not None and not held.users:
                    del self._open[file]
                    held.content = None
                    os.close(held.descriptor)

    def close_idle(self, num_left: int = 0) -> None:
        """Close the shards that nobody is using now, but for the last ones."""
        with self._mutex:
            files = list(self._open)
        self.close(files[: max(0, len(files) - num_left)])

    def abandon(self) -> None:
        """Called in a forked child: it has copies of the descriptors, which would keep the parent's locks."""
        for held in self._open.values():
            os.close(held.descriptor)
        self._open.clear()

    def _take(self, file: RemoteFile) -> _Open | None:
        held = self._open.get(file)
        if held is not None:
            held.users += 1
            self._open.move_to_end(file)
        return held

    def _watch(self) -> None:
        """Start the thread that closes what is idle when others want its room: an idle process never would."""
        with self._mutex:
            started, self._watched = self._watched, True
        if not started:
            arguments = (weakref.ref(self), self._folder / ".wanted")
            threading.Thread(target=_close_when_wanted, args=arguments, daemon=True).start()

    def _enter(self, file: RemoteFile, opener: Callable[[Path], T]) -> tuple[int, T]:
        """The descriptor whose lock keeps a shard in the cache, and the opened shard."""
        folder = LocalCopy(self.folder_of(file))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{folder.path} cannot be made: {error}; set RAYPIPE_CACHE to another folder"
            ) from error
        descriptor = open_lock(folder.use_lock)
        try:
            wait_for_lock(descriptor, exclusive=False)
            if not folder.holds(file):
                with locked(folder.path / "fetch.lock"):
                    self._complete(file, folder)
            os.utime(descriptor)
            return descriptor, opener(folder.data)
        except BaseException:
            os.close(descriptor)
            raise

    def _complete(self, file: RemoteFile, folder: LocalCopy) -> None:
        """Make `folder.data` the whole shard. The caller holds its use.lock and its fetch.lock."""
        if folder.holds(file):
            return  # another process has done it
        if folder.data.exists():
            if folder.check(file):
                return
            logger.warning("%s is damaged in the cache, and fetched again", file.address)
            folder.clear()
        self._make_room(file, folder)
        logger.info("fetching %s, %.1f MiB", file.address, file.num_bytes / 2**20)
        folder.fetch(file)

    def _make_room(self, file: RemoteFile, folder: LocalCopy) -> None:
        """Evict shards until this one fits, and reserve its room."""
        deadline = time.monotonic() + self._wait_s
        while True:
            with locked(self._folder / ".lock"):
                others = (path for path in self._folder.iterdir() if path.name[0] != "." and path != folder.path)
                sizes = {path: LocalCopy(path).num_bytes() for path in others}
                free_bytes = shutil.disk_usage(self._folder).free
                limit = self._limit_bytes or int(_DISK_SHARE * (free_bytes + sum(sizes.values())))
                if file.num_bytes > limit:
                    raise StoreError(
                        f"{file.address} has {file.num_bytes:,} bytes, the cache in {self._folder} a limit of "
                        f"{limit:,}: raise RAYPIPE_CACHE_BYTES, set RAYPIPE_CACHE to a larger disk, or ingest "
                        "into smaller shards (--shards)"
                    )
                if _evict(sizes, limit - file.num_bytes):
                    folder.reserve(file)
                    return
                (self._folder / ".wanted").touch()
            self.close_idle()
            if time.monotonic() > deadline:
                raise StoreError(
                    f"{file.address}: the cache in {self._folder} is full, {limit:,} bytes, and all that is in it "
                    "is in use: raise RAYPIPE_CACHE_BYTES, or ingest into more and smaller shards (--shards)"
                )
            progress()
            time.sleep(POLL_S)


class _Open:
    """A shard that this process has open: the descriptor of its lock, and how many are using it now."""

    def __init__(self, descriptor: int, content: Any) -> None:
        self.descriptor, self.content, self.users = descriptor, content, 1


def _evict(sizes: dict[Path, int], wanted: int) -> bool:
    """Evict, least recently opened first, until at most `wanted` bytes are left; whether that could be."""
    left = sum(sizes.values())
    folders = [LocalCopy(path) for path, num_bytes in sizes.items() if num_bytes]
    for folder in sorted(folders, key=lambda folder: _changed(folder.use_lock)):
        if left <= wanted:
            break
        descriptor = open_lock(folder.use_lock)
        if try_lock(descriptor, exclusive=True):  # nobody has it open
            folder.clear()
            left -= sizes[folder.path]
        os.close(descriptor)
    return left <= wanted


def _close_when_wanted(cache: weakref.ref[LocalCache], wanted: Path) -> None:
    seen = _changed(wanted)
    while (found := cache()) is not None:
        now = _changed(wanted)
        if now != seen:
            found.close_idle()
            seen = now
        del found
        time.sleep(_LOOK_S)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


_caches: dict[tuple[Path, int], LocalCache] = {}


def _forget() -> None:
    """In a forked child, whose locks are its parent's: it takes its own."""
    for cache in _caches.values():
        cache.abandon()
    _caches.clear()


os.register_at_fork(after_in_child=_forget)
