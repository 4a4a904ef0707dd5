"""What rank 0 tells of its stream while it runs, and records in the folder of the run.

a wait of the loop            a line after 10 s, 20 s, 40 s, …: for what, and for whom
where the loop stands         status.json, every few seconds, for `raypipe status`
faults, sizes of the pool     a line and a record each
the training                  a record every ten seconds or so; a training loop's own have its loss as well
the end of an epoch           a record of where the time went; of the last one also a line
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs
import ray

from raypipe.config import PoolConfig
from raypipe.logs import progress
from raypipe.metrics.records import STATUS
from raypipe.metrics.run_log import Folder, RunLog
from raypipe.metrics.timing import StageTimes, diagnose
from raypipe.streaming.supervisor import follow

logger = logging.getLogger(__name__)

_FIRST_TOLD_S = 10.0
_LOOK_S = 1.0
_ANSWER_S = 5.0
# Between two files of where the loop stands: in object storage each is a request that is paid for.
_STATUS_S, _STATUS_REMOTE_S = 5.0, 30.0


_SHOWN = ("epoch", "images_per_s", "wait_fraction", "loss")  # of the last record of the training


class _Wait(NamedTuple):
    """The loop waits for a thing, and for whom, since a moment of time.time()."""

    thing: str
    whom: str | Callable[[], str]
    since: float


class Chronicle:
    """Of one rank's loader; all but rank 0 are silent.

    Args:
        pool: the stream's.
        world_size: W.
        rank: of this process.
        folder: of the run; None = nothing is recorded, and nothing but the waits is told.

    Attributes:
        log: the record; None where there is none, or it has not begun.
    """

    def __init__(self, pool: PoolConfig, world_size: int, rank: int, folder: Folder | None) -> None:
        self._pool, self._world_size, self._is_first = pool, world_size, rank == 0
        self._folder = folder if rank == 0 else None
        self.log: RunLog | None = None
        self._step, self._step_at = 0, time.time()
        self._wait: _Wait | None = None
        self._works_since = self._step_at
        self._stands: dict[str, Any] = {}
        self._is_watched = False
        self._seen: _Wait | None = None
        self._due_s = self._status_at = 0.0
        self._stop_following: Callable[[], None] = lambda: None

    def begin(self, validates: bool, settings: Callable[[], dict[str, Any]], supervisor: Any) -> None:
        """Start, or start anew, the record at `step`; events of the stream are recorded from its beginning.

        Args:
            validates, settings: see `RunLog`.
            supervisor: handle of the stream's Supervisor, if it has one.
        """
        self.close()
        if self._folder:
            self._stands = {"to_step": settings()["to_step"]}
            self.log = RunLog(self._folder, self.step, self._world_size, validates, settings())
            self._stop_following = follow(supervisor, self._tell_event)

    @property
    def step(self) -> int:
        """The global step, for records."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._step_at = step, time.time()

    def record(self, kind: str, line: str = "", **values: Any) -> None:
        """Record values at `step`, and print a line of progress unless it is empty."""
        if self.log:
            self.log.write(kind, self.step, **values)
            if kind == "train":
                self._stands |= {name: values[name] for name in _SHOWN if name in values}
            values.pop("text", None)
            if line:
                progress(logger, line, step=self.step, kind=kind, **values)

    def diagnose(self, times: StageTimes, actors: int, device: str, last: bool) -> None:
        """Record where the time of the run went; of its last epoch, say it as well.

        Args:
            times: of this rank, or sums over all.
            actors: transform actors that the pool has at most.
            device: type of the training device.
        """
        readers, world_size = self._pool.executions, self._world_size
        found = diagnose(times, world_size=world_size, actors=actors, device=device, readers=readers)
        text = " ".join(found)
        self.record("diagnosis", text if last else "", **dataclasses.asdict(times), text=text)

    @contextlib.contextmanager
    def waiting(self, thing: str, whom: str | Callable[[], str]) -> Iterator[None]:
        """Within, the loop waits for a thing. A line now and then says so, and for whom."""
        if self._is_first and not self._is_watched:
            self._is_watched = True
            _watch(self)
        before, self._wait = self._wait, _Wait(thing, whom, time.time())
        try:
            yield
        finally:
            self._wait, self._works_since = before, time.time()

    def look(self) -> None:
        """Tell of a long wait, and write where the loop stands, if due."""
        now, wait = time.time(), self._wait
        if wait is not self._seen:
            self._seen, self._due_s = wait, _FIRST_TOLD_S
        if wait and now - wait.since >= self._due_s:
            self._due_s = 2 * (now - wait.since)
            progress(logger, f"waiting for {wait.thing} for {now - wait.since:.0f} s: {_told(wait.whom)}")
        if self._folder and self.log:
            every_s = _STATUS_S if isinstance(self._folder[0], pyarrow.fs.LocalFileSystem) else _STATUS_REMOTE_S
            if now - self._status_at >= every_s:
                self._status_at = now
                self._write_status(every_s)

    def _write_status(self, every_s: float) -> None:
        """Say where the loop stands; 0 = it has been left."""
        assert self._folder
        wait = self._wait
        status = {
            "time": time.time(),
            "every_s": every_s,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "workers": self._world_size,
            "step": self._step,
            "step_at": self._step_at,
            **self._stands,
            "waits_for": wait.thing if wait else None,
            "whom": _told(wait.whom) if wait and every_s else None,
            "since": wait.since if wait else self._works_since,
        }
        filesystem, path = self._folder
        with contextlib.suppress(pa.ArrowException, OSError):  # whoever asks sees how old it is
            is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
            new = f"{path}/{STATUS}{'.new' if is_local else ''}"  # an object is there once it is written whole
            with filesystem.open_output_stream(new) as file:
                file.write(json.dumps(status).encode())
            if is_local:
                filesystem.move(new, f"{path}/{STATUS}")

    def awaited(self, supervisor: Any) -> str:
        """Whom a batch waits for, as the stream's Supervisor knows it."""
        if supervisor is None:
            who = "to this process's device (pool.cache=device)"
            return f"the images go {who}" if self._pool.cache == "device" else "this process makes it"
        if not ray.is_initialized():  # a call would start it anew
            return "Ray has been shut down"
        try:
            return ray.get(supervisor.awaited.remote(), timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            return f"the stream's supervisor does not answer ({type(error).__name__})"

    def _tell_event(self, kind: str, text: str) -> None:
        self.record(kind, f"{'pool' if kind == 'scale' else kind}: {text}", text=text)

    def close(self) -> None:
        """Record the last events, and end the record."""
        self._stop_following()
        self._stop_following = lambda: None
        if self._is_watched:
            self._is_watched = False
            _leave(self)
        if self.log:
            self._write_status(0)
            self.log.close()
            self.log = None


_watched: weakref.WeakSet[Chronicle] = weakref.WeakSet()
_watching = threading.Lock()
_watcher: tuple[threading.Thread, threading.Event] | None = None


def _watch(chronicle: Chronicle) -> None:
    """Look at a chronicle each second, in the one thread of this process that does, until `_leave`."""
    global _watcher
    with _watching:
        _watched.add(chronicle)
        if _watcher is None:
            left = threading.Event()
            thread = threading.Thread(target=_look_at_all, args=(left,), name="raypipe-waiting", daemon=True)
            _watcher = thread, left
            thread.start()


def _leave(chronicle: Chronicle) -> None:
    """The thread ends with the last one that it looks at."""
    global _watcher
    with _watching:
        _watched.discard(chronicle)
        ending, _watcher = (None, _watcher) if _watched else (_watcher, None)
    if ending:
        thread, left = ending
        left.set()
        if thread is not threading.current_thread():
            thread.join(_ANSWER_S)


def _look_at_all(left: threading.Event) -> None:
    while not left.wait(min(_LOOK_S, _FIRST_TOLD_S)):
        for chronicle in list(_watched):
            try:
                chronicle.look()
            except Exception as error:  # a run does not end, nor does another one's wait go untold
                logger.warning("cannot say where the run stands: %s", error)
            del chronicle


def _told(whom: str | Callable[[], str]) -> str:
    return whom if isinstance(whom, str) else whom()
