"""The node's cache of remote shards, for stores that need local files: LMDB and tar.

    CACHE/shards/KEY/        one folder per version of an object; its time of change is that of the last use
        data                 the whole object
        partial-BOOT         its first bytes, while it is being downloaded, since this start of the machine
    CACHE/shards/.lock       exclusive lock: somebody is downloading, and makes room for it

All processes of a node share it. One shard is downloaded at a time, by whoever comes first. When another needs its
room it is evicted, least recently used first: who has it open reads on in the file that has no name any more, and
closes it within half a second if it is idle.

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
# A ranged read of a download: times _NUM_AHEAD, it is what a process that dies has read for nothing.
PART_BYTES = 8 << 20
# Reads under way at a time, for the whole node: object stores give a connection 50 to 100 MB/s.
_NUM_AHEAD = 16
# The time of change of what nobody has touched since it was downloaded.
_UNTOUCHED_NS = 0


def shared_cache() -> LocalCache:
    """This process's view of the node's cache, as the environment has it."""
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
    """Shards as local files, for the threads of one process.

    Args:
        folder: shared by all processes of the node.
        limit_bytes: of all shards; 0 = nine tenths of what the disk has free, and what the cache holds.
    """

    def __init__(self, folder: Path, limit_bytes: int = 0) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._open: OrderedDict[RemoteFile, tuple[Any, int]] = OrderedDict()  # and the inode of its file
        self._mutex = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def get(self, file: RemoteFile, opener: Callable[[Path], T]) -> T:
        """A shard, opened; it stays open until its place is needed, and as long as somebody refers to it.

        Args:
            file: the shard.
            opener: opens the local file at a path, which may be gone afterwards. What it makes closes the file
                when it is freed.
        """
        entry = self._open.get(file) or self._enter(file, opener)
        with self._mutex:
            entry = self._open.setdefault(file, entry)  # another thread may have been faster
            self._open.move_to_end(file)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        with contextlib.suppress(OSError):  # somebody may have emptied the cache
            os.utime(self.folder_of(file))
        return entry[0]

    def folder_of(self, file: RemoteFile) -> Path:
        """The folder of a shard."""
        text = f"{file.address} {file.num_bytes} {file.version} {file.digest}"
        return self._folder / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def close(self, files: list[RemoteFile]) -> None:
        """Close these shards once nobody refers to them; they stay in the cache."""
        with self._mutex:
            for file in files:
                self._open.pop(file, None)

    def close_evicted(self) -> None:
        """Close the shards that the cache has no more: their room is wanted."""
        with self._mutex:
            entries = list(self._open.items())
        self.close([file for file, (_, inode) in entries if _inode(self.folder_of(file) / "data") != inode])

    def _watch(self) -> None:
        while True:  # an idle process would never come to it otherwise
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
                        if _is_whole(data, file):  # and not evicted in this moment
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
                f"{file.address} has {file.num_bytes:,} bytes, the cache in {self._folder} a limit of {limit:,}: "
                "raise RAYPIPE_CACHE_BYTES, set RAYPIPE_CACHE to a larger disk, or convert it into smaller shards "
                "(--shards)"
            )
        for path, num_bytes in sizes.items():
            if total_bytes + file.num_bytes > limit:
                path.unlink(missing_ok=True)
                total_bytes -= num_bytes


def _is_whole(data: Path, file: RemoteFile) -> bool:
    """Whether an object is there as it was downloaded."""
    try:
        status = data.stat()
    except FileNotFoundError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.num_bytes, _UNTOUCHED_NS)


def _fetch(file: RemoteFile, folder: Path) -> None:
    """Download an object to `folder`/data; what is there of it is not asked for again.

    It is written in order, so that its length tells how far it came, and hashed as it arrives. What has arrived
    when it fails, as by a full disk, stays for the next one who tries.
    """
    # By the machine's start: what was written before its power failed may be missing, in whatever place.
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
            f"{file.address} has the checksum {digest.hexdigest()}, and was written with {file.digest}: it is "
            "damaged; convert it again"
        )
    partial.replace(folder / "data")


def _download(wanted: RemoteFile, start: int) -> Iterator[bytes]:
    """Yield an object's bytes from `start` to its end, in order, several parts read at a time."""
    at_once = _NUM_AHEAD * PART_BYTES
    with opened(wanted.address) as (source, current), Threads(_NUM_AHEAD) as pool:
        wanted.check_same(current)
        for first in range(start, wanted.num_bytes, at_once):
            starts = range(first, min(first + at_once, wanted.num_bytes), PART_BYTES)
            sizes = [min(PART_BYTES, wanted.num_bytes - at) for at in starts]
            for num_bytes, data in zip(sizes, pool.map(source.read_at, sizes, starts), strict=True):
                if len(data) != num_bytes:
                    raise OSError("it has become shorter while it was read")
                yield data
                progress()
    wanted.check_same(look_up(wanted.address))  # ranges of two objects would make a third


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


_caches: dict[tuple[Path, int], LocalCache] = {}
# A forked child has no thread that closes what is evicted: it takes a view of its own.
os.register_at_fork(after_in_child=_caches.clear)
