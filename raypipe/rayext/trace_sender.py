"""The way of a trace's events: from the processes of a stream to its Supervisor, and from there to rank 0.

    process       records events (`metrics.tracer`); a thread sends them again and again   TraceSender
    Supervisor    holds them                                                               HeldTrace
    rank 0        takes them, and writes the trace                                         rank_trace

Events have their machine's time of day, which machines of a cluster share to a few milliseconds.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

import ray

from raypipe.metrics.chrome_trace import Chunk
from raypipe.metrics.tracer import (
    begin_recording,
    count_memory,
    end_recording,
    take_events,
)
from raypipe.rayext.processes import Process
from raypipe.rayext.ray_thread import RayThread

PERIOD_S = 0.5
"""An actor loses the events that it has not sent when its stream ends."""
# Longest wait for an answer: less than a thread's end may take.
_ANSWER_S = 2.0
_MAX_HELD = (
    200_000_000  # characters that a Supervisor holds: some minutes of a large pool
)


class TraceSender:
    """Sends the events of the calling process to the Supervisor of its stream, in a thread."""

    def __init__(self, supervisor: Any, process: Process) -> None:
        self._supervisor = supervisor
        self._process = process
        self._thread = RayThread(self.send, PERIOD_S, "raypipe-trace")
        self._thread.start()

    def stop(self) -> None:
        """Send the last events."""
        self._thread.stop()
        with contextlib.suppress(ray.exceptions.RayError):
            if ray.is_initialized():
                self.send()

    def send(self) -> None:
        """Send the events since the last call."""
        count_memory()
        chunk = Chunk(traced_name(self._process), json.dumps(take_events()))
        if not ray.get(self._supervisor.traced.remote(chunk), timeout=_ANSWER_S):
            self._thread.left.set()
            end_recording()


@contextlib.contextmanager
def sending_trace(supervisor: Any, process: Process) -> Iterator[None]:
    """Context manager around what the calling process does for a stream that is traced."""
    # others may record this process already
    sender = TraceSender(supervisor, process) if begin_recording() else None
    try:
        yield
    finally:
        if sender:
            sender.stop()
            end_recording()


def traced_name(process: Process) -> str:
    """Return the name of a process in a trace."""
    return f"{process.role} ({process.pid} on {process.address})"


class HeldTrace:
    """The Supervisor's part of a trace. It begins with the first events."""

    def __init__(self) -> None:
        self._goes_on = True
        self._chunks = deque[Chunk]()
        self._num_held = 0

    def add(self, chunk: Chunk) -> bool:
        """Take events of a process; return whether the trace continues. The oldest give way if none are taken."""
        if self._goes_on:
            begin_recording()
            self._chunks.append(chunk)
            self._num_held += len(chunk.events)
        while self._num_held > _MAX_HELD:
            self._num_held -= len(self._chunks.popleft().events)
        return self._goes_on

    def take(self, process: Process | None) -> list[Chunk]:
        """Remove all events, with those of the Supervisor, whose process this is, and return them."""
        chunks = [*self._chunks]
        self._chunks.clear()
        self._num_held = 0
        if process:
            chunks.append(Chunk(traced_name(process), json.dumps(take_events())))
        return chunks

    def end(self) -> None:
        """No more events are wanted."""
        self._goes_on = False
        end_recording()
