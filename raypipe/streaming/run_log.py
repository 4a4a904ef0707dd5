"""Console lines and records of a stream, which rank 0 writes while it runs.

a wait of the loop            a line after 10 s, 20 s, 40 s, …: for what, and for whom
the loop's place              status.json, every few seconds, for `raypipe status`
a request to stop             is there for the loop to see
faults, sizes of the pool     a line and a record each
the training                  a record every ten seconds or so; a training loop's own have its loss as well
the end of an epoch           a record of where the time went; the last epoch prints it too
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs
import ray

from raypipe.background import Repeating
from raypipe.errors import RaypipeError
from raypipe.metrics.observer import Cause, Observer
from raypipe.metrics.records import STATUS, RecordWriter, RunFolder, write_file
from raypipe.progress import print_progress
from raypipe.storage.retries import tried_once
from raypipe.streaming.record.opened import rewritten
from raypipe.streaming.stop_file import answer_stop, remove_stop, stop_requested

if TYPE_CHECKING:
    from raypipe.plan.places import Split

logger = logging.getLogger(__name__)

_FIRST_TOLD_S = 10.0
_LOOK_S = 1.0
_ANSWER_S = 5.0
# Between two files of where the loop stands: in object storage each is a request that is paid for.
_STATUS_S = 5.0
_STATUS_REMOTE_S = 30.0
_STOP_REMOTE_S = 3.0  # between two looks for a request to stop, for the same reason
# There, of the last record of the training.
_SHOWN = (
    "epoch",
    "images_per_s",
    "wait_fraction",
    "gpu_utilization",
    "loss",
    "remembered",
    "val_remembered",
)


@dataclass
class _Wait:
    """A wait of the loop, or its own work between two of them.

    Attributes:
        name: what it waits for; empty = it computes a step or waits for other ranks.
        cause: names the cause of the wait.
        due_s: age at which it is told, then twice that, and so on.
        since: its begin, by time.time().
    """

    name: str
    cause: Cause
    due_s: float
    since: float = field(default_factory=time.time)

    def told(self, waited_s: float) -> str:
        """Write a line about it."""
        if self.name:
            doing = f"waiting for {self.name}"
        else:
            doing = "training has asked for nothing"
        return f"{doing} for {waited_s:.0f} s: {self.cause()}"


_CHECKPOINT = "the checkpoint"


def _own_work(due_s: float) -> _Wait:
    return _Wait("", lambda: "the loop computes, or waits for other ranks", due_s)


class RunLog(Observer):
    """Console lines and records of one rank's loader; all ranks but 0 are silent.

    Args:
        world_size: W.
        rank: rank of this process.
        folder: the run's folder; None = only waits are printed, and nothing is recorded.

    Attributes:
        log: the record; None = none, or not begun.
        stop_requested: looks for a request to stop the run, once a second or so.
        stops: whether there was one.
        keeps_stop: whether the request stays in the folder at the end, for the process that launched the run.
    """

    def __init__(self, world_size: int, rank: int, folder: RunFolder | None) -> None:
        self._world_size = world_size
        self._folder = folder if rank == 0 else None
        self._is_first = rank == 0
        is_local = folder and isinstance(folder[0], pyarrow.fs.LocalFileSystem)
        self._status_every_s = _STATUS_S if is_local else _STATUS_REMOTE_S
        self._stop_every_s = 0.0 if is_local else _STOP_REMOTE_S
        self._status_at = 0.0
        self._stop_looked_at = 0.0
        self._shown: dict[str, Any] = {}
        self._looks: Repeating | None = None
        self._supervisor = None
        self._num_events = 0
        self._wait = _own_work(math.inf)
        self.step = 0
        self.log: RecordWriter | None = None
        self.stop_requested: Callable[[], bool] = lambda: False
        if folder:
            self.stop_requested = functools.partial(stop_requested, folder)
        self.stops = False
        self.keeps_stop = False

    def begin(
        self,
        validates: bool,
        described: Callable[[], dict[str, dict[str, Any]]],
        supervisor: Any,
    ) -> None:
        """Start or restart the record at `step`; the stream's events are recorded from its beginning.

        Args:
            validates: see `RecordWriter`.
            described: the stream's `settings` and `stream`, see `RecordWriter`.
            supervisor: handle of the stream's Supervisor, if it has one.
        """
        self.closed()
        if self._folder:
            of_run = described()
            self._shown = {
                "begun": time.time(),
                "to_step": of_run["settings"]["to_step"],
            }
            self.log = RecordWriter(
                self._folder,
                step=self.step,
                workers=self._world_size,
                validates=validates,
                **of_run,
            )
            for sentence in rewritten(self.log.earlier, of_run.get("stream", {})):
                logger.warning("%s", sentence)
        self.opened(supervisor)

    def opened(self, supervisor: Any) -> None:
        if self.log:
            self._supervisor = supervisor
            self._num_events = 0
            self._begin_looking()

    @property
    def step(self) -> int:
        """The global step, for records."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._step_at = time.time()

    def recorded(self, kind: str, line: str, values: Mapping[str, Any]) -> None:
        """Write values at `step`, and print a line of progress unless it is empty."""
        if not self.log:
            return
        self.log.write(kind, self.step, **values)
        if kind == "train":
            self._shown |= {name: values[name] for name in _SHOWN if name in values}
        if line:
            printed = {name: value for name, value in values.items() if name != "text"}
            print_progress(logger, line, step=self.step, kind=kind, **printed)

    def asked(self, split: Split, name: str, cause: Cause) -> None:
        """The loop waits. A line now and then names what it waits for, and the cause."""
        self._begin_looking()
        self._wait = _Wait(name, cause, _FIRST_TOLD_S)

    def saving(self, cause: Cause) -> None:
        self.asked("train", _CHECKPOINT, cause)

    def _end_wait(self, split: Split | None = None) -> None:
        self._wait = _own_work(_FIRST_TOLD_S)

    arrived = failed = saved = _end_wait

    def sync(self) -> None:
        """Make what was written so far visible at the run's address."""
        if self.log:
            self.log.sync()

    def waited_s(self) -> float:
        """Return for how long the loop has waited for a batch; 0 = it does not."""
        wait = self._wait
        return time.time() - wait.since if wait.name not in ("", _CHECKPOINT) else 0.0

    def _begin_looking(self) -> None:
        if self._is_first and self._looks is None:
            period_s = min(_LOOK_S, _FIRST_TOLD_S)
            self._looks = Repeating(self._look_around, period_s, "raypipe-waiting")
            self._looks.start()

    def _look_around(self) -> None:
        """Look for a request to stop, if due; log new events, and a long wait."""
        now = time.time()
        if not self.stops and now - self._stop_looked_at >= self._stop_every_s:
            self._stop_looked_at = now
            # storage that fails is asked again
            with tried_once():
                self.stops = self.stop_requested()
        self._tell_events(_LOOK_S)
        self._look(time.time())

    def answer_stop(self) -> None:
        """Confirm in the run's folder that the loop has seen a request to stop."""
        self._change_request(answer_stop)

    def _change_request(self, change: Callable[[RunFolder], None]) -> None:
        if self._folder and self.stops:
            # if the disk is full, the checkpoint raises
            with contextlib.suppress(pa.ArrowException, OSError, RaypipeError):
                change(self._folder)

    def _look(self, now: float) -> None:
        """Tell of a long wait, and write where the loop stands, if due."""
        wait = self._wait
        waited_s = now - wait.since
        # What a loop does between two batches is its own affair, unless it is recorded as a run.
        if (wait.name or self.log) and waited_s >= wait.due_s:
            wait.due_s = 2 * waited_s
            print_progress(logger, wait.told(waited_s))
        if self.log and now - self._status_at >= self._status_every_s:
            self._status_at = now
            self._write_status(now, self._status_every_s)

    def _write_status(self, now: float, every_s: float) -> None:
        """Say where the loop stands, for `commands.status`; what cannot be written is seen by its age.

        Args:
            every_s: seconds until the next time; 0 = there is none.
        """
        if self.log is None or self._folder is None:
            return
        wait = self._wait
        status = {
            "time": now,
            "every_s": every_s,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "workers": self._world_size,
            "step": self._step,
            "step_at": self._step_at,
            **self._shown,
            "waits_for": wait.name,
            "whom": wait.cause() if wait.name else "",
            "since": wait.since,
        }
        with tried_once():
            write_file(self._folder, STATUS, json.dumps(status))

    def awaited(self, supervisor: Any) -> str:
        """Name what holds up a batch, as the stream's Supervisor knows it, if there is one."""
        if supervisor is None:
            return "this process makes it"
        silence = "the stream's supervisor does not answer"
        return _answer(supervisor, "describe_progress") or silence

    def ready(self) -> float:
        """Return the share of the time for which a rank had a finished block to take; 0 if nobody knows."""
        return _answer(self._supervisor, "ready_share") or 0.0

    def _tell_events(self, timeout_s: float) -> None:
        """Record and print what has happened to the stream since the last call."""
        for kind, text in events_of(self._supervisor, self._num_events, timeout_s):
            self._num_events += 1
            label = "pool" if kind == "scale" else kind
            self.recorded(kind, f"{label}: {text}", {"text": text})

    def ended(self) -> None:
        """Write the last events of the stream, and that nobody reads it any more."""
        if self._looks:
            self._looks.stop()
            self._looks = None
        self._tell_events(_ANSWER_S)
        self._supervisor = None
        self._wait = _own_work(math.inf)
        self._write_status(time.time(), 0)

    def closed(self) -> None:
        """Write the last events, and end the record."""
        self.ended()
        if not self.keeps_stop:
            self._change_request(remove_stop)
        if self.log:
            self.log.close()
            self.log = None


def events_of(
    supervisor: Any, first: int, timeout_s: float = _ANSWER_S
) -> list[tuple[str, str]]:
    """The events of a stream from number `first` on, see `Supervisor.events`; none if nobody answers.

    Args:
        supervisor: the handle of the stream's Supervisor; None = it has none.
    """
    return _answer(supervisor, "events", first, timeout_s=timeout_s) or []


def _answer(
    supervisor: Any, question: str, *arguments: Any, timeout_s: float = _ANSWER_S
) -> Any:
    """Return what a stream's Supervisor answers; None if there is none, or it does not answer in time."""
    if supervisor is None or not ray.is_initialized():  # a call would restart it
        return None
    with contextlib.suppress(ray.exceptions.RayError):
        asked = getattr(supervisor, question).remote(*arguments)
        return ray.get(asked, timeout=timeout_s)
    return None
