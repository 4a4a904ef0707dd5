"""A rank's part of a trace: its own events, and on rank 0 the file.

Stages of the loop come from the marks of its `StageClock`, which on CUDA are events of the device: then they are
drawn on the device's track, at the times at which it has worked.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import ray
import torch

from raypipe import __version__
from raypipe.errors import ConfigError, RaypipeError
from raypipe.metrics.chrome_trace import Chunk, chrome_trace, to_json
from raypipe.metrics.observer import Observer
from raypipe.metrics.tracer import (
    Event,
    TracedProcess,
    begin_recording,
    clock,
    count_memory,
    end_recording,
)
from raypipe.progress import print_progress
from raypipe.rayext.processes import this_process
from raypipe.rayext.trace_sender import PERIOD_S, TraceSender, taken, traced_process
from raypipe.storage.files import write_text

if TYPE_CHECKING:
    from raypipe.plan.places import MicroBatchId

logger = logging.getLogger(__name__)

# Stages as the trace names them, where its reader would look for another word.
_NAMES = {"transfer": "copy", "checkpoint": "wait for a checkpoint"}
_COPY_TRACK = "GPU copies"
_GPU_TRACK = "GPU"
_LEAVE_S = 5.0
# Events of the device that are not read yet; those of a few seconds.
_MAX_PENDING = 10_000


class _DeviceStage(NamedTuple):
    """A stage between two events of CUDA."""

    name: str
    start: Any
    end: Any
    places: tuple[MicroBatchId, ...]


class RankTrace(Observer):
    """Records the events of a rank's process, sends them to the Supervisor, and on rank 0 writes the trace.

    Args:
        address: path or URI of the file.
        seconds: how long to trace, from the first batch on.
        rank: number of this rank.
        device: the device that trains.
        run: name of the run.

    Raises:
        ConfigError: this process records events for another trace.
    """

    def __init__(
        self, address: str, seconds: float, rank: int, device: torch.device, run: str
    ) -> None:
        tracer = begin_recording()
        if tracer is None:
            raise ConfigError(
                f"{address}: this process already makes a trace; one loader at a time can have `trace`"
            )
        self._tracer = tracer
        self._address = address
        self._seconds = seconds
        self._rank = rank
        self._device = device
        self._run = run
        self._base: tuple[Any, int] | None = (
            None  # an event of the device, and its time
        )
        self._pending = deque[_DeviceStage](maxlen=_MAX_PENDING)
        self._process = TracedProcess(
            f"trainer {rank}", os.getpid(), "", socket.gethostname()
        )
        # Rank 0 collects them. Its Supervisor is on its node, so they have one clock.
        self._own: list[Event] = []
        self._others: list[Chunk] = []
        self._ends_ns: int | None = None
        self._is_over = False
        self._supervisor: Any = None
        self._sender: TraceSender | None = None
        self._one_by_one = threading.Lock()
        self._left = threading.Event()
        self._thread = threading.Thread(
            target=self._send_until_left, name="raypipe-trace", daemon=True
        )
        self._thread.start()

    def on_stage(
        self, stage: str, start: Any, end: Any, position: MicroBatchId | None
    ) -> None:
        """Record a stage between two marks, see `StageClock`."""
        name = _NAMES.get(stage, stage)
        places = (position,) if position else ()
        if isinstance(end, float):
            self._tracer.add_slice(name, round(start * 1e9), round(end * 1e9), places)
            return
        if self._base is None:
            self._base = self._now_on_device()
        self._pending.append(_DeviceStage(name, start, end, places))

    def _now_on_device(self) -> tuple[Any, int]:
        """Return an event of the device, and its time on the host's clock: once, the host waits for the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()
        return event, clock()

    def opened(self, supervisor: Any) -> None:
        if supervisor is None or self._is_over:
            return
        with self._one_by_one:
            process = this_process(self._process.role)
            self._process = traced_process(process)
            self._supervisor = supervisor
            if self._rank:
                self._sender = TraceSender(supervisor, process, self._tracer)

    def handed_out(self, position: MicroBatchId, amounts: Any) -> None:
        if self._ends_ns is None:
            self._ends_ns = clock() + round(self._seconds * 1e9)

    def ended(self) -> None:
        """The stream ends, and its Supervisor, whose events are taken now."""
        with self._one_by_one:
            self._gather()
            self._supervisor = None
            self._sender = None

    def closed(self) -> None:
        """Write the trace, if its time was not over yet."""
        self._left.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_S)
        self._finish()

    def _send_until_left(self) -> None:
        while not (self._is_over or self._left.wait(PERIOD_S)):
            with self._one_by_one:
                self._gather()
            # the others' last events come a period later
            written_ns = clock() - round(PERIOD_S * 1e9)
            if self._ends_ns is not None and written_ns > self._ends_ns:
                self._finish()

    def _gather(self) -> None:
        """Bring the events of all processes together, as far as they have sent them."""
        if self._is_over:
            return
        self._read_device()
        if self._rank:
            if self._sender:
                self._sender.send()
            return
        count_memory()
        self._own += self._tracer.take()
        if self._supervisor is not None:
            self._others += taken(self._supervisor)

    def _read_device(self) -> None:
        """Record the stages that the device has passed."""
        while self._base and self._pending and self._pending[0].end.query():
            base, base_ns = self._base
            stage = self._pending.popleft()
            begin_ns = base_ns + round(base.elapsed_time(stage.start) * 1e6)
            end_ns = base_ns + round(base.elapsed_time(stage.end) * 1e6)
            track = _COPY_TRACK if stage.name == "copy" else _GPU_TRACK
            self._tracer.add_slice(stage.name, begin_ns, end_ns, stage.places, track)

    def _finish(self) -> None:
        """End the trace, and write it."""
        with self._one_by_one:
            if self._is_over:
                return
            self._gather()
            self._is_over = True
            end_recording(self._tracer)
            if self._rank:
                return
            if self._supervisor is not None and ray.is_initialized():
                self._supervisor.end_trace.remote()
        self._write([Chunk(self._process, 0, self._own), *self._others])

    def _write(self, chunks: list[Chunk]) -> None:
        about = {"run": self._run, "written_by": f"raypipe {__version__}"}
        try:
            write_text(self._address, to_json(chrome_trace(chunks, about)))
        except (RaypipeError, pa.ArrowException, OSError) as error:
            logger.warning("the trace cannot be written: %s", error)
            return
        num_events = sum(len(chunk.events) for chunk in chunks)
        place = self._address.removeprefix("file://")
        print_progress(
            logger,
            f"trace: {place}, {num_events:,} events, for https://ui.perfetto.dev",
        )
