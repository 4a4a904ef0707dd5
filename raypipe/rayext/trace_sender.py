"""The way of a trace's events: from the processes of a stream to its Supervisor, and from there to rank 0.

    process       records events (`metrics.tracer`); a thread sends them again and again   TraceSender
    Supervisor    holds those of the last moments                                          StreamTrace
    rank 0        takes them, and writes the trace                                         record.rank_trace

The trace has the Supervisor's clock. All processes of a node have one clock. On another node, each call is also a
measurement: its answer has the Supervisor's time, which is that of the middle between question and answer, give or
take half of the time between them. The shortest one counts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import ray

from raypipe.metrics.chrome_trace import LOST, Chunk
from raypipe.metrics.tracer import (
    Event,
    TracedProcess,
    Tracer,
    begin_recording,
    clock,
    count_memory,
    end_recording,
)
from raypipe.rayext.processes import Process
from raypipe.rayext.ray_thread import stop_before_end

logger = logging.getLogger(__name__)

# A call takes milliseconds of CPU, which is most of a trace's cost. An actor loses the events that it has not sent
# when its stream ends, so short streams have shorter periods.
PERIOD_S = 2.0
_FIRST_PERIOD_S = 0.5
_FIRST_S = 10.0
_ANSWER_S = 5.0
_LEAVE_S = 2.0
_NUM_PINGS = 5  # before the first events are sent, to know the clock
# Events that the Supervisor holds until rank 0 takes them: twice a second, so those of a minute of a large pool.
_MAX_HELD = 200_000


class TraceAnswer(NamedTuple):
    """The Supervisor's answer to events.

    Attributes:
        clock_ns: its time.
        node: id of its node.
        goes_on: whether the trace continues.
    """

    clock_ns: int
    node: str
    goes_on: bool


class ClockOffset:
    """The difference between the Supervisor's clock and this process's, by the shortest round trip so far.

    Attributes:
        offset_ns: what to add to a time of this process.
    """

    def __init__(self) -> None:
        self.offset_ns = 0
        self._shortest_ns: float = float("inf")

    def measured(self, asked_ns: int, answered_ns: int, supervisors_ns: int) -> None:
        """Take a round trip into account: the Supervisor's time came between two times of this process."""
        round_trip_ns = answered_ns - asked_ns
        if round_trip_ns < self._shortest_ns:
            self._shortest_ns = round_trip_ns
            self.offset_ns = supervisors_ns - (asked_ns + answered_ns) // 2


class TraceSender:
    """Sends a process's events to the Supervisor of its stream.

    Args:
        supervisor: handle of the Supervisor.
        process: the calling process.
        tracer: its events.
    """

    def __init__(self, supervisor: Any, process: Process, tracer: Tracer) -> None:
        self._supervisor = supervisor
        self._process = traced_process(process)
        self._node = process.node
        self._tracer = tracer
        self._offset = ClockOffset()
        self._is_measured = False
        self._unsent: list[Event] = []
        self._left = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="raypipe-trace", daemon=True
        )

    def start(self) -> None:
        """Start to send, in a thread, until the trace or the process ends."""
        stop_before_end(self)
        self._thread.start()

    def stop(self) -> None:
        """Send the last events, and end the recording."""
        self._left.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_S)
        end_recording(self._tracer)

    def _run(self) -> None:
        begun = time.monotonic()
        goes_on = self.send()
        while goes_on:
            is_first = time.monotonic() - begun < _FIRST_S
            if self._left.wait(_FIRST_PERIOD_S if is_first else PERIOD_S):
                break
            goes_on = self.send()
        if goes_on:
            self.send()
        end_recording(self._tracer)

    def send(self) -> bool:
        """Send the events since the last call; returns whether the trace continues."""
        if not ray.is_initialized():  # a call would start it
            return False
        try:
            if not self._is_measured:
                self._is_measured = True
                for _ in range(_NUM_PINGS):
                    self._call([])
            count_memory()
            # events that could not be sent come first
            self._unsent += self._tracer.take()
            goes_on = self._call(self._unsent)
            self._unsent = []
        except ray.exceptions.GetTimeoutError:
            logger.debug("the supervisor does not take a trace's events")
            return True
        except ray.exceptions.RayError:
            return False
        return goes_on

    def _call(self, events: list[Event]) -> bool:
        asked_ns = clock()
        chunk = Chunk(self._process, self._offset.offset_ns, events)
        answer = ray.get(self._supervisor.traced.remote(chunk), timeout=_ANSWER_S)
        if answer.node != self._node:
            self._offset.measured(asked_ns, clock(), answer.clock_ns)
        return answer.goes_on


def send_trace(supervisor: Any, process: Process) -> TraceSender | None:
    """Record the calling process's events, and send them; None = it records them already."""
    tracer = begin_recording()
    if tracer is None:
        return None
    sender = TraceSender(supervisor, process, tracer)
    sender.start()
    return sender


@contextlib.contextmanager
def sending_trace(supervisor: Any, process: Process) -> Iterator[None]:
    """Context manager around what the calling process does for a stream that is traced."""
    sender = send_trace(supervisor, process)
    try:
        yield
    finally:
        if sender:
            sender.stop()


def traced_process(process: Process) -> TracedProcess:
    """A process as a trace names it."""
    return TracedProcess(process.role, process.pid, process.node, process.address)


class StreamTrace:
    """The Supervisor's part of a trace, until rank 0 takes it. It begins with the first events.

    Attributes:
        goes_on: whether events are still wanted.
    """

    def __init__(self) -> None:
        self.goes_on = True
        self._chunks = deque[Chunk]()
        self._num_held = 0
        self._tracer: Tracer | None = None

    @property
    def is_on(self) -> bool:
        """True from the first events to the end of the trace."""
        return self._tracer is not None and self.goes_on

    def begin(self) -> None:
        """Record the Supervisor's own events, too."""
        if self._tracer is None:
            self._tracer = begin_recording()

    def add(self, chunk: Chunk) -> None:
        """Take events; the oldest give way if nobody takes them."""
        self.begin()
        if not (chunk.events and self.goes_on):
            return
        self._chunks.append(chunk)
        self._num_held += len(chunk.events)
        while self._num_held > _MAX_HELD:
            self._num_held -= len(self._chunks.popleft().events)

    def add_lost(
        self, process: Process, begin_ns: int, places: tuple[str, ...]
    ) -> None:
        """An actor died at a block that it had begun at a time of the Supervisor's."""
        if self.is_on:
            event = Event("slice", "died", LOST, begin_ns, clock(), places)
            self.add(Chunk(traced_process(process), None, [event]))

    def take(self, process: Process | None) -> list[Chunk]:
        """Remove all events, with the Supervisor's own, whose process this is, and return them."""
        self.begin()
        chunks = list(self._chunks)
        self._chunks.clear()
        self._num_held = 0
        if self._tracer and process:
            chunks.append(Chunk(traced_process(process), None, self._tracer.take()))
        return chunks

    def end(self) -> None:
        """No more events are wanted."""
        self.goes_on = False
        end_recording(self._tracer)


def taken(supervisor: Any) -> list[Chunk]:
    """The events that a Supervisor holds; none if it does not answer."""
    if not ray.is_initialized():
        return []
    with contextlib.suppress(ray.exceptions.RayError):
        return ray.get(supervisor.take_trace.remote(), timeout=_ANSWER_S)
    return []
