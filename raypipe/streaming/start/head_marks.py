"""Marks of ranks that make their first micro-batches themselves: what kills such a process shall kill only one.

A sample may end the process that decodes it. An actor is replaced, and in the end leaves out the sample; a rank
would meet it again at each restart. So a rank leaves a mark that names the micro-batch in work, and removes it
after its last one. If a process is gone and its mark is not, ranks stop before that micro-batch, for the pool.

In a train function the cluster keeps the marks, for as long as the run, since the next trainers may be on other
machines. Elsewhere a mark is a file in the cache folder, which its process locks while it lives.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.plan.places import MicroBatchId
from raypipe.rayext.kv_store import publish, published, published_keys, withdraw
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
        self._run = run
        self._prefix = f"head start {run} {fingerprint} "
        # the mark of a process that has ended stays
        self._key = f"{self._prefix}{rank} {uuid.uuid4().hex}"
        self._path: Path | None = None
        self._file = -1
        self._using = threading.Lock()

    def found(self) -> set[str]:
        """Return the places at which processes of this plan have ended in a head start; remove their files."""
        if self._run is not None:
            return {str(published(key)) for key in published_keys(self._prefix)}
        try:
            marks = make_cache_folder(_FOLDER).glob(f"{self._fingerprint}-*")
            return set(filter(None, map(_left_at, marks)))
        except OSError:
            return set()

    def set(self, place: MicroBatchId) -> bool:
        """Let this process's mark name a place; returns whether it could."""
        if self._run is not None:
            return publish(self._key, str(place))
        with self._using:
            try:
                if self._path is None:
                    folder = make_cache_folder(_FOLDER)
                    path = folder / f"{self._fingerprint}-{os.getpid()}"
                    self._file = open_lock(path)
                    self._path = path
                # the names of all places are equally long, but for runs without end
                os.pwrite(self._file, f"{place}\n".encode(), 0)
                return try_lock(self._file)
            except (OSError, StoreError):
                return False

    def remove(self) -> None:
        """Remove this process's mark."""
        if self._run is not None:
            withdraw(self._key)
        with self._using:
            if self._path:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)
                os.close(self._file)
                self._path = None


def _left_at(path: Path) -> str:
    """Return the place of a mark whose process is gone, and remove it; empty = it lives, or had begun none."""
    with claimed(path) as is_free, contextlib.suppress(OSError):
        if is_free:
            return path.read_text().partition("\n")[0]
    return ""
