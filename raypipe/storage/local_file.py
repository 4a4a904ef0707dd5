"""What the processes of one machine share safely: regular files, locks, folders of one's own, the cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from raypipe.environment import variable
from raypipe.errors import StoreError
from raypipe.storage.patience import progress

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
    """Raise OSError, which says what it is, unless the mode is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise OSError(f"it is {_KINDS.get(stat.S_IFMT(mode), 'of an unknown kind')}, not a regular file")


def open_regular(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o777) -> int:
    """A descriptor of a regular file, or of a link to one; also as `opener` of `io.FileIO`.

    A pipe would keep its reader waiting, a device such as /dev/zero never ends.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    with contextlib.suppress(FileNotFoundError):  # which flags may allow
        # Before it is opened, since there are devices that do something when they are.
        check_regular((os.stat if not flags & os.O_NOFOLLOW else os.lstat)(path).st_mode)
    # A pipe that has taken its place by now does not block.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    try:
        check_regular(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class OpenFile:
    """A regular file, open for reading; it closes with the object."""

    def __init__(self, path: str | Path) -> None:
        self.descriptor = open_regular(path)
        self.path = Path(f"/dev/fd/{self.descriptor}")  # the cache may have removed the other by now
        weakref.finalize(self, os.close, self.descriptor)


@contextlib.contextmanager
def regular_path(path: str | Path) -> Iterator[str]:
    """Within, a path by which a library may open the very file that `open_regular` has opened."""
    descriptor = open_regular(path)
    try:
        yield f"/dev/fd/{descriptor}"
    finally:
        os.close(descriptor)


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, which is made if it is not there; closing it frees the lock."""
    try:
        return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise StoreError(f"{path.parent} cannot be written to: {path.name}: {error}") from error


def try_lock(descriptor: int, exclusive: bool) -> bool:
    """Take a lock, shared or exclusive, if nobody holds it otherwise; whether that could be."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(descriptor: int, exclusive: bool) -> None:
    """Take a lock as soon as whoever holds it gives it back, or dies."""
    while not try_lock(descriptor, exclusive):
        progress()
        time.sleep(_POLL_S)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, no other process is within."""
    descriptor = open_lock(path)
    try:
        wait_for_lock(descriptor, exclusive=True)
        yield
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """RAYPIPE_CACHE, or raypipe's folder in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raypipe"
    return Path(variable("RAYPIPE_CACHE") or default)


def make_cache_folder(name: str = "") -> Path:
    """The cache, or a folder in it, made if it is not there. OSError where what is there is another user's."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    if {cache.stat().st_uid, cache.lstat().st_uid} - {os.getuid(), 0}:  # who may put another in its place
        raise PermissionError(f"{cache} belongs to another user")
    folder = cache / name
    if name:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user, or is a link: remove it")
    return folder


def boot_id() -> str:
    """Another one after each start of the machine; empty where that goes unnoticed, as it does but on Linux."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
