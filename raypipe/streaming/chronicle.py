"""What rank 0 tells of its stream while it runs, and records in the folder of the run.

waiting for the first batch   a line after 10 s, 20 s, 40 s, …: what it waits for
faults, sizes of the pool     a line and a record each
the training                  a record every ten seconds or so; a training loop's own have its loss as well
the end of an epoch           a record of where the time went; of the last one also a line
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray

from raypipe.logs import progress
from raypipe.metrics.run_log import Folder, RunLog
from raypipe.metrics.timing import StageTimes, diagnose
from raypipe.streaming.supervisor import follow

logger = logging.getLogger(__name__)

_FIRST_TOLD_S = 10.0
_ANSWER_S = 5.0


class Chronicle:
    """Of one rank's loader; all but rank 0 are silent.

    Args:
        world_size: W.
        rank: of this process.
        folder: of the run; None = nothing is recorded, and nothing but the wait for the first batch is told.

    Attributes:
        step: the global step, for records.
        log: the record; None where there is none, or it has not begun.
    """

    def __init__(self, world_size: int, rank: int, folder: Folder | None) -> None:
        self._world_size, self._is_first = world_size, rank == 0
        self._folder = folder if rank == 0 else None
        self.step = 0
        self.log: RunLog | None = None
        self._stop_following: Callable[[], None] = lambda: None

    def begin(self, validates: bool, settings: Callable[[], dict[str, Any]], supervisor: Any) -> None:
        """Start, or start anew, the record at `step`; events of the stream are recorded from its beginning.

        Args:
            validates, settings: see `RunLog`.
            supervisor: handle of the stream's Supervisor, if it has one.
        """
        self.close()
        if self._folder:
            self.log = RunLog(self._folder, self.step, self._world_size, validates, settings())
            self._stop_following = follow(supervisor, self._tell_event)

    def record(self, kind: str, line: str = "", **values: Any) -> None:
        """Record values at `step`, and print a line of progress unless it is empty."""
        if self.log:
            self.log.write(kind, self.step, **values)
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
        text = " ".join(diagnose(times, world_size=self._world_size, actors=actors, device=device))
        self.record("diagnosis", text if last else "", **dataclasses.asdict(times), text=text)

    @contextlib.contextmanager
    def waiting(self, supervisor: Any) -> Iterator[None]:
        """Within, a line now and then says what the first batch waits for."""
        came = threading.Event()

        def tell() -> None:
            since, due = time.monotonic(), _FIRST_TOLD_S
            while not came.wait(due):
                due = time.monotonic() - since
                progress(logger, f"waiting for the first batch for {due:.0f} s: {self._awaited(supervisor)}")

        if self._is_first:
            threading.Thread(target=tell, name="raypipe-waiting", daemon=True).start()
        try:
            yield
        finally:
            came.set()

    def _awaited(self, supervisor: Any) -> str:
        if supervisor is None:
            return "this process makes it"
        try:
            return ray.get(supervisor.awaited.remote(), timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            return f"the stream's supervisor does not answer ({type(error).__name__})"

    def _tell_event(self, kind: str, text: str) -> None:
        self.record(kind, f"{'pool' if kind == 'scale' else kind}: {text}", text=text)

    def unfollow(self) -> None:
        """Record the last events; there are no more."""
        self._stop_following()
        self._stop_following = lambda: None

    def close(self) -> None:
        """Record the last events, and end the record."""
        self.unfollow()
        if self.log:
            self.log.close()
            self.log = None
