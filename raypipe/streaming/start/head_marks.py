"""Marks of ranks that make their first micro-batches themselves: what kills such a process shall kill only one.

A sample may end the process that decodes it. An actor is replaced, and in the end leaves out the sample; a rank
would meet it again at each restart. So a rank leaves a mark before it begins, and removes it after its last
micro-batch. The mark is a file of this machine, which says whether the process makes a micro-batch now. If a
process is gone while it made one, the pool makes everything. A process that waited was ended by something else.

In a train function the cluster keeps the addresses of the marks, for as long as the run, since the next trainers
may be on other machines, where a mark cannot be read, and counts. Elsewhere marks stay in the cache folder until a
stream of the same plan has ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from raypipe.rayext.kv_store import publish, published, published_keys, withdraw
from raypipe.rayext.processes import started_at
from raypipe.storage.local_file import make_cache_folder

_FOLDER = "head-starts"
_WAITS = b"0"
_MAKES = b"1"


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
        self._file: int | None = None  # open, once it is set
        self._path: Path | None = None
        self._using = threading.Lock()

    @property
    def _prefix(self) -> str:
        return f"head start {self._run} {self._fingerprint} "

    def found(self) -> bool:
        """Return whether a process of this plan has ended while it made a micro-batch itself."""
        if self._run is None:
            return any(map(_makes, self._left()))
        paths = [published(key) for key in published_keys(self._prefix)]
        are_making = [not path or _makes(Path(path)) for path in paths]
        for path in filter(None, paths):
            with contextlib.suppress(OSError):
                Path(path).unlink()
        return any(are_making)

    def set(self) -> bool:
        """Leave this process's mark; returns whether it could."""
        pid = os.getpid()
        # `_left` looks for marks outside of runs only
        kind = "" if self._run is None else "run-"
        try:
            self._path = make_cache_folder(_FOLDER) / f"{kind}{self._fingerprint}-{pid}"
            self._path.write_bytes(_WAITS + started_at(pid).encode())
            self._file = os.open(self._path, os.O_WRONLY)
        except OSError:
            self._path = None
        if self._run is not None:
            return publish(self._key, str(self._path or ""))
        return self._path is not None

    def making(self, makes: bool) -> None:
        """Say in the mark whether this process makes a micro-batch from now on."""
        with self._using:
            if self._file is not None:
                os.pwrite(self._file, _MAKES if makes else _WAITS, 0)

    def remove(self) -> None:
        """Remove this process's mark."""
        with self._using:
            if self._file is not None:
                os.close(self._file)
                self._file = None
        if self._run is not None:
            withdraw(self._key)
        if self._path:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

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
                if path.read_bytes()[1:].decode() != started_at(pid):
                    left.append(path)
        return left


def _makes(path: Path) -> bool:
    """Return whether a mark says that its process made a micro-batch; True if it cannot be read."""
    try:
        return path.read_bytes()[:1] != _WAITS
    except OSError:
        return True
