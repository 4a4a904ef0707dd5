"""A rank's part of a trace: its own events, and on rank 0 the file.

Stages of the loop come from the marks of its `StageClock`, which on CUDA are events of the device: then they are
drawn on the device's track, at the times at which it has worked.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
import torch

from raypipe import __version__
from raypipe.errors import ConfigError, RaypipeError
from raypipe.metrics.chrome_trace import Chunk, to_json
from raypipe.metrics.observer import Observer
from raypipe.metrics.tracer import (
    add_slice,
    begin_recording,
    clock_us,
    count_memory,
    end_recording,
    take_events,
)
from raypipe.progress import print_progress
from raypipe.rayext.processes import this_process
from raypipe.rayext.trace_sender import PERIOD_S, TraceSender, traced_name
from raypipe.storage.files import write_text

if TYPE_CHECKING:
    from raypipe.plan.places import MicroBatchId

logger = logging.getLogger(__name__)

# Stages as the trace names them, where its reader would look for another word.
_NAMES = {"transfer": "copy", "checkpoint": "wait for a checkpoint"}
_COPY_TRACK = "GPU copies"
_GPU_TRACK = "GPU"
_STEPS_TRACK = "optimizer steps"
_ANSWER_S = 30.0


class RankTrace(Observer):
    """Records the events of a rank's process, and on rank 0 writes the trace.

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
        if not begin_recording():
            raise ConfigError(
                f"{address}: this process already makes a trace; one loader at a time can have `trace`"
            )
        self._address = address
        # the others' last events come a period later
        self._us = (seconds + PERIOD_S) * 1e6
        self._rank = rank
        self._device = device
        self._run = run
        # from the clock of marks to that of events
        self._offset_us = clock_us() - time.perf_counter() * 1e6
        # an event of the device, and its time
        self._base: tuple[Any, float] | None = None
        self._chunks: list[Chunk] = []
        # the step that is computed
        self._step = ""
        self._step_us = 0.0
        self._computed_us = 0.0
        self._ends_us: float | None = None
        self._is_over = False
        self._supervisor: Any = None
        self._sender: TraceSender | None = None
        self._name = f"trainer {rank} ({os.getpid()} on {socket.gethostname()})"

    def on_stage(
        self, stage: str, start: Any, end: Any, position: MicroBatchId | None
    ) -> None:
        """Record a stage between two marks, see `StageClock`."""
        track = ""
        if isinstance(end, float):
            begin_us, end_us = (at * 1e6 + self._offset_us for at in (start, end))
        else:
            track = _COPY_TRACK if stage == "transfer" else _GPU_TRACK
            if self._base is None:
                # once, the host waits for the device
                event = torch.cuda.Event(enable_timing=True)
                event.record(torch.cuda.current_stream(self._device))
                event.synchronize()
                self._base = event, clock_us()
            base, base_us = self._base
            begin_us, end_us = (
                base_us + base.elapsed_time(event) * 1e3 for event in (start, end)
            )
        places = [position] if position else []
        add_slice(_NAMES.get(stage, stage), begin_us, end_us, places, track)
        if stage == "compute" and position:
            step, _, _ = str(position).rpartition("-")
            if step != self._step:
                self._end_step()
                self._step = step
                self._step_us = begin_us
            self._computed_us = end_us

    def _end_step(self) -> None:
        """Record an optimizer step, from the compute of its first micro-batch to that of its last."""
        if self._step:
            times = (self._step_us, self._computed_us)
            add_slice(f"step {self._step}", *times, track=_STEPS_TRACK)

    def opened(self, supervisor: Any) -> None:
        if supervisor is not None and not self._is_over:
            process = this_process(f"trainer {self._rank}")
            self._name = traced_name(process)
            self._supervisor = supervisor
            self._sender = TraceSender(supervisor, process)

    def handed_out(self, position: MicroBatchId, amounts: Any) -> None:
        if self._ends_us is None:
            self._ends_us = clock_us() + self._us
        elif clock_us() > self._ends_us:
            self.closed()

    def ended(self) -> None:
        """The stream ends, and its Supervisor, whose events are taken now."""
        if self._is_over:
            return
        if self._sender:
            self._sender.stop()
        if self._supervisor is not None and not self._rank and ray.is_initialized():
            try:
                taken = self._supervisor.take_trace.remote()
                self._chunks += ray.get(taken, timeout=_ANSWER_S)
                self._supervisor.end_trace.remote()
            except ray.exceptions.RayError as error:
                logger.warning("the trace lacks other processes: %s", error)
        self._supervisor = None
        self._sender = None

    def closed(self) -> None:
        """Write the trace, unless it was written when its time was over."""
        if self._is_over:
            return
        self.ended()
        self._is_over = True
        self._end_step()
        count_memory()
        own = Chunk(self._name, json.dumps(take_events()))
        end_recording()
        if self._rank:
            return
        about = {"run": self._run, "written_by": f"raypipe {__version__}"}
        try:
            write_text(self._address, to_json([own, *self._chunks], about))
        except (RaypipeError, pa.ArrowException, OSError) as error:
            logger.warning("the trace cannot be written: %s", error)
            return
        place = self._address.removeprefix("file://")
        print_progress(logger, f"trace: {place}, for https://ui.perfetto.dev")
