"""Locks between the processes of a machine, on files. The kernel frees those of a process that dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular

POLL_S = 0.05

on_progress: list[Callable[[], None]] = []
"""Called while a download, or the wait for another process's, goes on: such time is not the transform's."""


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, which is made if it is not there; closing it frees the lock.

    Raises:
        StoreError: the file cannot be made, or what is there is a link, or no file.
    """
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
        time.sleep(POLL_S)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, no other process is within."""
    descriptor = open_lock(path)
    try:
        wait_for_lock(descriptor, exclusive=True)
        yield
    finally:
        os.close(descriptor)


def progress() -> None:
    """Tell whoever watches over this process that it has a reason to take its time."""
    for call in on_progress:
        call()
