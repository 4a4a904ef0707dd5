"""Marks of ranks that make their first micro-batches themselves: what kills such a process shall kill only one.

A sample may end the process that decodes it. An actor is replaced, and in the end leaves out the sample; a rank
would meet it again at each restart. So a rank leaves a mark before it begins, and removes it after its last
micro-batch. If a process is gone and its mark is not, the pool makes everything.

In a train function the cluster keeps the marks, for as long as the run; elsewhere the cache folder does, until a
stream of the same plan has ended.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from raypipe.rayext.kv_store import publish, published_keys, withdraw
from raypipe.rayext.processes import started_at
from raypipe.storage.local_file import make_cache_folder

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
        self._run = run
        self._key = f"{self._prefix}{rank}"

    @property
    def _prefix(self) -> str:
        return f"head start {self._run} {self._fingerprint} "

    def found(self) -> bool:
        """Return whether a process of this plan has ended while it made micro-batches itself."""
        if self._run is not None:
            return bool(published_keys(self._prefix))
        return bool(self._left())

    def set(self) -> bool:
        """Leave this process's mark; returns whether it could."""
        if self._run is not None:
            return publish(self._key, os.getpid())
        pid = os.getpid()
        try:
            path = make_cache_folder(_FOLDER) / f"{self._fingerprint}-{pid}"
            path.write_text(started_at(pid))
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Remove this process's mark."""
        if self._run is not None:
            withdraw(self._key)
            return
        with contextlib.suppress(OSError):
            folder = make_cache_folder(_FOLDER)
            (folder / f"{self._fingerprint}-{os.getpid()}").unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the marks of this machine's ended processes: a stream of this plan has ended well."""
        for path in self._left() if self._run is None else ():
            with contextlib.suppress(OSError):
                path.unlink()

    def _left(self) -> list[Path]:
        """Marks of processes that are gone."""
        left = list[Path]()
        with contextlib.suppress(OSError, ValueError):
            for path in make_cache_folder(_FOLDER).glob(f"{self._fingerprint}-*"):
                pid = int(path.name.rpartition("-")[2])
                if path.read_text() != started_at(pid):
                    left.append(path)
        return left
