"""A small file system of its own that a test can fill: a tmpfs, as root, or in a namespace of the user's own."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_BALLAST = ".ballast"


@contextlib.contextmanager
def small_disk(folder: Path, kib: int = 64) -> Iterator[Path]:
    """A folder on a file system of so many KiB, which every process of this machine can use; see `fill`.

    Where this user may not mount one, it is mounted in a namespace of a process of its own, and reached through
    /proc. Where that may not be done either, the test is skipped.

    Args:
        folder: where to mount it; it is made.
        kib: its size, a multiple of 4.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={kib}k,mode=777",
        "raypipe-test",
        str(folder),
    ]
    if subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            yield folder
        finally:
            subprocess.run(
                ["umount", "--lazy", str(folder)], check=True, capture_output=True
            )
        return
    script = '"$@" && echo mounted && read -r end'
    hold = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", *mount]
    with subprocess.Popen(
        hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as holder:
        assert holder.stdin and holder.stdout
        if holder.stdout.readline() != b"mounted\n":
            pytest.skip("this user may not mount a tmpfs, not even in a namespace")
        try:
            yield Path(f"/proc/{holder.pid}/root", *folder.resolve().parts[1:])
        finally:
            holder.stdin.close()


def fill(folder: Path, leave_bytes: int = 0) -> None:
    """Write until the disk of a folder is full, but for so many bytes, a multiple of 4096."""
    with (folder / _BALLAST).open("ab", buffering=0) as ballast:
        try:
            while ballast.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC
        if leave_bytes:
            ballast.truncate(max(0, ballast.tell() - leave_bytes))
            os.fsync(ballast.fileno())


def make_room(folder: Path) -> None:
    """Take away what `fill` has written."""
    (folder / _BALLAST).unlink()
