"""Streams that make the same training micro-batches, such as trials of a learning rate, on one folder.

Each holds a lock on a file with its name, by all of its processes, so a killed one is soon known to be gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.storage.local_file import claimed, open_lock
from raypipe.streaming.memory.made_folder import STREAMS

_LOOK_S = 1.0


class Streams:
    """Look of one process at the streams that make the same.

    Args:
        folder: see `raypipe.streaming.memory.made_folder`.
        content: hash of what the stream makes.
        stream: its name.
    """

    def __init__(self, folder: Path, content: str, stream: str) -> None:
        self._folder = folder / STREAMS
        self._content = content
        self._path = self._folder / f"{content}.{stream}"
        self._descriptor = -1
        self._look_at = 0.0
        self._are_others = False

    def are_others(self) -> bool:
        """Return whether there are others; show that this one is there."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            with contextlib.suppress(OSError, StoreError):
                self._show()
                files = set(self._folder.glob(f"{self._content}.*"))
                self._are_others = any(map(_lives, files - {self._path}))
        return self._are_others

    def close(self) -> None:
        """Leave them."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _show(self) -> None:
        if self._descriptor >= 0 and self._path.exists():
            return
        self.close()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._descriptor = open_lock(self._path)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)


def _lives(path: Path) -> bool:
    """Return whether a process holds a stream's file; remove that of a dead one."""
    with claimed(path) as is_free:
        return not is_free
