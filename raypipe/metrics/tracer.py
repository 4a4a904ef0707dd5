"""Events of one process for a trace: a bounded buffer. While no trace is made, a call costs a look at a variable.

    with traced("block", block): ...    a slice of time of the calling thread, with its micro-batches
    counted("blocks", queued=3)         values of a counter
    happened("fault", "an actor died")  an instant

An event is as the file of a trace has it, an object of Chrome's Trace Event Format; its times are microseconds of
the machine's time of day. `rayext.trace_sender` brings the events of a stream's processes together, and
`metrics.chrome_trace` writes them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.plan.places import MicroBatchId

MAX_EVENTS = 100_000
"""Events that a process keeps until they are sent; the oldest give way. A block has four."""

Event = dict[str, Any]

_events: deque[Event] | None = None
_starting = threading.Lock()
_UNTRACED: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def clock_us() -> float:
    """Return the machine's time of day, in steps of a quarter of a microsecond, so that slices stay nested."""
    return time.time() * 1e6


def begin_recording() -> bool:
    """Begin to record events in this process; return False if another caller records them already."""
    global _events
    with _starting:
        if _events is not None:
            return False
        _events = deque(maxlen=MAX_EVENTS)
        return True


def end_recording() -> None:
    """End the recording."""
    global _events
    _events = None


def take_events() -> list[Event]:
    """Remove all events, and return them."""
    events = _events or deque()
    return [events.popleft() for _ in range(len(events))]


def add_slice(
    name: str,
    begin_us: float,
    end_us: float,
    places: Iterable[MicroBatchId | str] = (),
    track: str = "",
) -> None:
    """Record a slice of time.

    Args:
        places: its micro-batches.
        track: where it is drawn; empty = at the calling thread.
    """
    micro_batches = [str(place) for place in places]
    values = {"micro_batches": micro_batches} if micro_batches else {}
    _add(name, "X", track, begin_us, dur=end_us - begin_us, args=values)


def _add(name: str, phase: str, track: str, at_us: float, **fields: Any) -> None:
    if _events is not None:
        thread = track or threading.current_thread().name
        event = {"name": name, "ph": phase, "ts": at_us, "tid": thread}
        _events.append(event | fields)


def traced(
    name: str, places: Iterable[MicroBatchId] = ()
) -> contextlib.AbstractContextManager[list[MicroBatchId] | None]:
    """Context manager around a slice of time; gives its micro-batches, to which others may be added.

    It gives None while no trace is made.
    """
    if _events is None:
        return _UNTRACED
    return _slice(name, [*places])


@contextlib.contextmanager
def _slice(name: str, places: list[MicroBatchId]) -> Iterator[list[MicroBatchId]]:
    begin_us = clock_us()
    try:
        yield places
    finally:
        add_slice(name, begin_us, clock_us(), places)


def counted(name: str, **values: float) -> None:
    """Record values of a counter."""
    _add(name, "C", "counters", clock_us(), args=values)


def happened(name: str, text: str) -> None:
    """Record an instant, which is a line through all processes."""
    _add(name, "i", "", clock_us(), s="g", args={"text": text})


def count_memory() -> None:
    """Record the memory of this process, on Linux: all that is resident, and its part that others share."""
    if _events is None:
        return
    with contextlib.suppress(OSError):
        pages = Path("/proc/self/statm").read_text().split()
        page_mb = os.sysconf("SC_PAGE_SIZE") / 1e6
        resident, shared = (int(number) * page_mb for number in pages[1:3])
        counted("memory MB", own=resident - shared, shared=shared)
