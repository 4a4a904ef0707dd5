"""Marks of ranks that make their first micro-batches themselves: what kills such a process shall kill only one.

A sample may end the process that decodes it. An actor is replaced, and in the end leaves out the sample; a rank
would meet it again at each restart. So a rank leaves a mark before it begins, and removes it after its last
micro-batch. If a process is gone and its mark is not, the pool makes everything.

In a train function the cluster keeps the marks, for as long as the run, since the next trainers may be on other
machines. Elsewhere a mark is a file in the cache folder, which its process locks while it lives.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.rayext.kv_store import publish, published_keys, withdraw
from raypipe.storage.local_file import claimed, make_cache_folder, open_lock, try_lock

_FOLDER = "head-starts"


class Marks:
    """Marks of one plan.

    Args:
        fingerprint: the plan's.
        rank: number of this rank.
        run: name of Ray Train's run; None = this is not a train function.
    """

    def __init__(self, fingerprint: str, rank: int, run: str | None) -> None:
        self._fingerprint = fingerprint
        self._rank = rank
        self._run = run
        self._path: Path | None = None
        self._file = -1
        self._using = threading.Lock()

    @property
    def _prefix(self) -> str:
        return f"head start {self._run} {self._fingerprint} "

    def found(self) -> bool:
        """Return whether a process of this plan has ended in its head start; remove their files."""
        if self._run is not None:
            return bool(published_keys(self._prefix))
        try:
            marks = make_cache_folder(_FOLDER).glob(f"{self._fingerprint}-*")
            return bool(list(filter(_is_left, marks)))
        except OSError:
            return False

    def set(self) -> bool:
        """Leave this process's mark; returns whether it could."""
        if self._run is not None:
            return publish(f"{self._prefix}{self._rank}", "")
        try:
            path = make_cache_folder(_FOLDER) / f"{self._fingerprint}-{os.getpid()}"
            self._file = open_lock(path)
            self._path = path
            return try_lock(self._file)
        except (OSError, StoreError):
            return False

    def remove(self) -> None:
        """Remove this process's mark."""
        if self._run is not None:
            withdraw(f"{self._prefix}{self._rank}")
        with self._using:
            if self._path:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)
                os.close(self._file)
                self._path = None


def _is_left(path: Path) -> bool:
    """Return whether the process of a mark is gone; then the mark is removed."""
    with claimed(path) as is_free:
        return is_free
