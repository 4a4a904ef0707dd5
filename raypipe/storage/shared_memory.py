"""Files in the node's memory: each is made once, mapped by all processes that use it, and removed after the last.

    /dev/shm/raypipe-UID/KEY      its content; modified at time 0 once it is whole
    /dev/shm/raypipe-UID/.lock    held for a moment, while a file is looked for, given room, or removed

The maker of a file holds an exclusive flock on it, and each user a shared one, so a process that is killed leaves
no lock. The last user removes the file. If it was killed, the next process does that opens any such file, or that
starts raypipe on the node. A system without /dev/shm has the files in `RAYPIPE_CACHE`/memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from raypipe.errors import ConfigError, RaypipeError
from raypipe.storage.local_file import (
    cache_folder,
    locked,
    make_cache_folder,
    open_regular,
    private_folder,
    try_lock,
    wait_for_lock,
)
from raypipe.storage.read_limit import byte_limit

_WHOLE_NS = 0
_MEMORY = Path("/dev/shm")
_IN_CACHE = "memory"  # where there is no such folder
_LOCK = ".lock"
# Share of the memory that is free, or in these files.
_FREE_SHARE = 0.5


class SharedFile:
    """A whole file, mapped; it is used for as long as this object is referred to.

    Attributes:
        content: the file, read-only. Views of it stay valid.
    """

    def __init__(self, descriptor: int, path: Path) -> None:
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self.content = memoryview(memory)
        weakref.finalize(self, _leave, descriptor, path, os.getpid())


def open_shared(key: str, make: Callable[[BinaryIO], object]) -> SharedFile:
    """Return the node's file of a key.

    Args:
        key: a file's name, equal for equal contents.
        make: writes the content where no process has the file, after `reserve`.

    Raises:
        ConfigError: the folder cannot be used; or what `make` raises.
    """
    folder = _make_folder()
    path = folder / key
    while True:
        with locked(folder / _LOCK):
            _remove_unused(folder, key)
            descriptor = open_regular(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600
            )
            is_alone = try_lock(descriptor)
            if is_alone and _is_whole(descriptor):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                return SharedFile(descriptor, path)
        if is_alone:
            _write(descriptor, path, make)
            return SharedFile(descriptor, path)
        wait_for_lock(descriptor, fcntl.LOCK_SH)
        if _is_whole(descriptor) and os.fstat(descriptor).st_nlink:
            return SharedFile(descriptor, path)
        os.close(descriptor)  # its maker has failed


def reserve(file: BinaryIO, num_bytes: int, title: str) -> None:
    """Give a new file room for so many bytes in all.

    Args:
        title: the store, for the error.

    Raises:
        ConfigError: the node has no room for it.
    """
    folder = _make_folder()
    with locked(folder / _LOCK):
        own = os.fstat(file.fileno())
        files = [path.stat() for path in folder.iterdir() if path.name != _LOCK]
        used = sum(status.st_blocks * 512 for status in files)
        others = sum(status.st_size for status in files if status.st_ino != own.st_ino)
        on_folder = os.statvfs(folder)
        free = on_folder.f_bavail * on_folder.f_frsize + own.st_blocks * 512
        room = max(0, min(_limit_bytes(used) - others, free))
        if num_bytes > room:
            raise ConfigError(
                f"store.in_memory: {title} takes about {num_bytes:,} bytes, and {folder} has room for {room:,}: "
                "raise RAYPIPE_MEMORY_BYTES, or the size of that folder (docker run --shm-size); or store smaller "
                "images (`raypipe convert --short-side`), or leave store.in_memory out"
            )
        os.truncate(file.fileno(), num_bytes)


def remove_unused() -> None:
    """Remove the files whose users were all killed."""
    with contextlib.suppress(RaypipeError, OSError):
        in_cache = cache_folder() / _IN_CACHE
        if _in_memory().is_dir() or in_cache.is_dir():
            folder = _make_folder()
            with locked(folder / _LOCK):
                _remove_unused(folder)


def _in_memory() -> Path:
    return _MEMORY / f"raypipe-{os.getuid()}"


def _make_folder() -> Path:
    try:
        if os.access(_MEMORY, os.W_OK):
            return private_folder(_MEMORY, _in_memory().name)
        return make_cache_folder(_IN_CACHE)
    except OSError as error:
        raise ConfigError(f"store.in_memory: {error}") from error


def _remove_unused(folder: Path, kept: str = "") -> None:
    """Remove files that nobody makes or uses; the caller has the lock of the folder."""
    for path in folder.iterdir():
        if path.name in (_LOCK, kept):
            continue
        with contextlib.suppress(OSError):  # its last user has just removed it
            descriptor = open_regular(path, os.O_RDWR | os.O_NOFOLLOW)
            _leave(descriptor, path, os.getpid())


def _write(descriptor: int, path: Path, make: Callable[[BinaryIO], object]) -> None:
    """Write a file whose exclusive lock this process has, and share it."""
    try:
        os.truncate(descriptor, 0)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            make(file)
            file.truncate()
        os.utime(descriptor, ns=(_WHOLE_NS, _WHOLE_NS))
        with locked(path.parent / _LOCK):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BaseException as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        if isinstance(error, OSError):
            raise ConfigError(f"store.in_memory: {path}: {error}") from error
        raise


def _is_whole(descriptor: int) -> bool:
    return os.fstat(descriptor).st_mtime_ns == _WHOLE_NS


def _leave(descriptor: int, path: Path, pid: int) -> None:
    """Stop using a file, and remove it if nobody else uses it. A forked child leaves that to its parent."""
    if os.getpid() == pid and try_lock(descriptor):
        path.unlink(missing_ok=True)
    os.close(descriptor)


def _limit_bytes(used: int) -> int:
    """Return the limit of all files of this node: the variable, or half of the memory that is free or theirs."""
    limit = byte_limit("RAYPIPE_MEMORY_BYTES")
    if limit is not None:
        return limit
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        free = [1024 * int(available.split()[1])]
    with contextlib.suppress(OSError, ValueError):
        # a container's limit; it may be "max"
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free.append(limit - int((group / "memory.current").read_text()))
    return int(_FREE_SHARE * (max(0, min(free)) + used))
