"""What may be opened on this machine, where others have named or made it: regular files, folders of one's own."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

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


@contextlib.contextmanager
def regular_path(path: str | Path) -> Iterator[str]:
    """Within, a path by which a library may open the very file that was found to be a regular one.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    descriptor = open_regular(path)
    try:
        yield f"/dev/fd/{descriptor}"
    finally:
        os.close(descriptor)


def is_own_folder(folder: Path) -> bool:
    """Whether it is a folder of this user's, and no link to one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def make_own_folder(folder: Path) -> None:
    """Make a folder, if it is not there, for what nobody else is to put anything into.

    Raises:
        OSError: it cannot be made, or what is there is another user's, or a link.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_own_folder(folder):
        raise PermissionError(f"{folder} belongs to another user, or is a link: remove it")
