"""Events of one process for a trace: a bounded buffer. While no trace is made, a call costs a look at a variable.

    with traced("block", block): ...             a slice of time of the calling thread, with its micro-batches
    counted("blocks", queued=3)                  values of a counter
    happened("fault", "an actor died")         an instant

`record_events` begins the recording in this process. `raypipe.rayext.trace_sender` brings the events of a stream's
processes together, and `raypipe.metrics.chrome_trace` writes them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from raypipe.plan.places import MicroBatchId

MAX_EVENTS = 20_000
"""Events that a process keeps until they are sent, twice a second; the oldest give way. A block has four."""

clock = time.perf_counter_ns
"""The clock of events: the same for all processes of a machine, and, as a float, that of `metrics.timing.mark`."""


class TracedProcess(NamedTuple):
    """A process in a trace.

    Attributes:
        role: "transform actor", "reader", "trainer 1", …
        pid: its id on its node.
        node: id of its node; empty = Ray has none.
        address: address of its node.
    """

    role: str
    pid: int
    node: str
    address: str


class Event(NamedTuple):
    """An event of a process, on its own clock.

    Attributes:
        kind: a slice of time, values of a counter, or an instant.
        name: what happens, or the counter.
        thread: name of the thread, or of another track.
        begin_ns, end_ns: equal but for a slice.
        places: micro-batches that it is about, as text.
        values: the counter's values, or a text.
    """

    kind: Literal["slice", "count", "instant"]
    name: str
    thread: str
    begin_ns: int
    end_ns: int
    places: tuple[str, ...] = ()
    values: dict[str, Any] = {}  # noqa: RUF012  # never written to


class Tracer:
    """Buffer of a process's events. Any thread may add some."""

    def __init__(self, limit: int = MAX_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=limit)

    def add(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def add_slice(
        self,
        name: str,
        begin_ns: int,
        end_ns: int,
        places: Sequence[MicroBatchId] = (),
        track: str = "",
    ) -> None:
        """Add a slice of time.

        Args:
            track: where it is drawn; empty = at the calling thread.
        """
        thread = track or threading.current_thread().name
        names = tuple(map(str, places))
        self.add(Event("slice", name, thread, begin_ns, end_ns, names))

    def take(self) -> list[Event]:
        """Remove all events, and return them."""
        return [self._events.popleft() for _ in range(len(self._events))]


_tracer: Tracer | None = None
_starting = threading.Lock()


@contextlib.contextmanager
def record_events() -> Iterator[Tracer | None]:
    """Context manager: record events in this process; gives None if another one records them already."""
    tracer = begin_recording()
    try:
        yield tracer
    finally:
        end_recording(tracer)


def begin_recording() -> Tracer | None:
    """Begin to record events in this process; returns None if another caller records them already."""
    global _tracer
    with _starting:
        if _tracer is not None:
            return None
        _tracer = Tracer()
        return _tracer


def end_recording(tracer: Tracer | None) -> None:
    """End the recording of the caller that has begun it, if it still runs."""
    global _tracer
    with _starting:
        if tracer is not None and _tracer is tracer:
            _tracer = None


class _Span:
    """Slice of time, around a block of code.

    Attributes:
        places: its micro-batches; may be set inside of it.
    """

    __slots__ = ("_begin_ns", "_name", "_tracer", "places")

    def __init__(
        self, tracer: Tracer, name: str, places: Sequence[MicroBatchId]
    ) -> None:
        self._tracer = tracer
        self._name = name
        self.places = places

    def __enter__(self) -> _Span:
        self._begin_ns = clock()
        return self

    def __exit__(self, *_: object) -> None:
        self._tracer.add_slice(self._name, self._begin_ns, clock(), self.places)


_UNTRACED: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def traced(
    name: str, places: Sequence[MicroBatchId] = ()
) -> contextlib.AbstractContextManager[_Span | None]:
    """Context manager around a slice of time; gives None while no trace is made."""
    if _tracer is None:
        return _UNTRACED
    return _Span(_tracer, name, places)


def counted(name: str, **values: float) -> None:
    """Record values of a counter."""
    if _tracer is not None:
        now = clock()
        _tracer.add(Event("count", name, "", now, now, values=values))


def happened(name: str, text: str) -> None:
    """Record an instant."""
    if _tracer is not None:
        now = clock()
        thread = threading.current_thread().name
        _tracer.add(Event("instant", name, thread, now, now, values={"text": text}))


def count_memory() -> None:
    """Record the memory of this process, on Linux: all that is resident, and its part that others share."""
    if _tracer is None:
        return
    with contextlib.suppress(OSError):
        pages = Path("/proc/self/statm").read_text().split()
        page_mb = os.sysconf("SC_PAGE_SIZE") / 1e6
        resident, shared = (int(number) * page_mb for number in pages[1:3])
        counted("memory MB", own=resident - shared, shared=shared)
