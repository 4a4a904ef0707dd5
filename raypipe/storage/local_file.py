"""Safe sharing between the processes of one machine: regular files, locks, private folders, the cache."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from raypipe.environment import variable
from raypipe.errors import StoreError
from raypipe.storage.retries import report_progress

_POLL_S = 0.05

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
}


def check_regular(mode: int) -> None:
    """Raise OSError, which names the kind of file, unless the mode is a regular file's."""
    if not stat.S_ISREG(mode):
        raise OSError(f"it is {file_kind(mode)}, not a regular file")


def file_kind(mode: int) -> str:
    """Return the kind of what is not a regular file, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "an unknown kind")


def open_regular(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o777) -> int:
    """Return a descriptor of a regular file, or of a link to one; also the `opener` of `io.FileIO`.

    Other kinds are rejected: a pipe may block its reader, and a device such as /dev/zero never ends.

    Raises:
        OSError: the file cannot be opened, or is not regular.
    """
    with contextlib.suppress(FileNotFoundError):  # flags may allow creating the file
        # Checked before opening, since some devices act when they are opened.
        check_regular(
            (os.stat if not flags & os.O_NOFOLLOW else os.lstat)(path).st_mode
        )
    # O_NONBLOCK: a pipe that has replaced the file since then does not block.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    try:
        check_regular(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def written_facts(status: os.stat_result) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced, even with its size and times set back.

    A copy differs, too, so the numbers compare only on one machine.
    """
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class OpenFile:
    """A regular file, open for reading; it closes with the object.

    Attributes:
        address: the path that it was opened with.
    """

    def __init__(self, path: str | Path) -> None:
        self.address = str(path)
        self.descriptor = open_regular(path)
        # stays valid if the cache removes the original path
        self.path = Path(f"/dev/fd/{self.descriptor}")
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def written(self) -> tuple[int, ...]:
        """See `written_facts`."""
        return written_facts(os.fstat(self.descriptor))

    def pread(self, num_bytes: int, start: int) -> bytes:
        """Return bytes from an offset on, fewer at the end; threads and forks may share the file."""
        return os.pread(self.descriptor, num_bytes, start)


@contextlib.contextmanager
def regular_path(path: str | Path) -> Iterator[str]:
    """Context manager: a path through which a library opens exactly the file that `open_regular` checked."""
    descriptor = open_regular(path)
    try:
        yield f"/dev/fd/{descriptor}"
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """Return a descriptor of a lock file, which is made if needed; closing it frees the lock."""
    try:
        return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise StoreError(
            f"{path.parent} cannot be written to: {path.name}: {error}"
        ) from error


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Try to take a lock without waiting; return whether it was free."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(
    descriptor: int, kind: int = fcntl.LOCK_EX, poll_s: float = _POLL_S
) -> None:
    """Take a lock, once its holder has released it or died."""
    while not try_lock(descriptor, kind):
        report_progress()
        time.sleep(poll_s)


@contextlib.contextmanager
def locked(path: Path, poll_s: float = _POLL_S) -> Iterator[None]:
    """Context manager: hold an exclusive lock across processes, once its holder has released it or died.

    Args:
        poll_s: seconds between two looks.
    """
    descriptor = open_lock(path)
    try:
        wait_for_lock(descriptor, poll_s=poll_s)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(path: Path, most_s: float = math.inf) -> Iterator[bool]:
    """Context manager: whether no other process holds a lock file; then this one does, and removes it at the end.

    It is True, too, where the file system has no locks, or no such folder.

    Args:
        most_s: seconds after which a holder counts no more: it may be stopped.
    """
    try:
        descriptor = open_lock(path)
    except StoreError:
        yield True
        return
    is_free = True
    held_s = 0.0
    try:
        with contextlib.suppress(OSError):
            is_free = try_lock(descriptor)
            if is_free:
                os.utime(descriptor)
            held_s = time.time() - os.fstat(descriptor).st_mtime
        yield is_free or held_s > most_s
    finally:
        if is_free:
            path.unlink(missing_ok=True)
        os.close(descriptor)


def cache_folder() -> Path:
    """Return RAYPIPE_CACHE, or raypipe's folder in the user's cache."""
    default = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raypipe"
    )
    return Path(variable("RAYPIPE_CACHE") or default)


def make_cache_folder(name: str = "") -> Path:
    """Return the cache, or a folder in it, made if needed.

    Raises:
        OSError: it belongs to another user, or other users can write to the folder in it, and so decide which
            samples a run trains on.
    """
    return private_folder(cache_folder(), name)


def private_folder(cache: Path, name: str) -> Path:
    """Return a folder of this user's in another one, see `make_cache_folder`."""
    cache.mkdir(parents=True, exist_ok=True)
    if {cache.stat().st_uid, cache.lstat().st_uid} - {
        os.getuid(),
        0,
    }:
        # another owner could replace it
        raise PermissionError(f"{cache} belongs to another user")
    folder = cache / name
    if name:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(
                f"{folder} belongs to another user, or is a link: remove it"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            # its files may be somebody else's by now
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(
                f"{folder} can be written to by other users (mode {mode:o}): remove it"
            )
    return folder


@functools.cache
def boot_id() -> str:
    """Return an id that changes with each start of the machine; empty if unknown, as on any system but Linux."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
