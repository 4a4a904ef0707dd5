"""A stream as a function of a place, and the streams of a process: they end by closing, with Ray, or at exit."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from raypipe.plan.places import MicroBatchId
from raypipe.transform.fields import MicroBatch

EXHAUSTED = ""
MOVED = "it goes on at another place"
GAVE_WAY = "its CPUs were needed by one that this process opened later"
_LEAVE_S = 5.0  # time for another thread to leave its wait for a batch
GOES_ON = (EXHAUSTED, MOVED, GAVE_WAY)
"""The ends after which a loop may ask for more: the stream then starts again, where it is asked for."""


Open = Callable[[MicroBatchId], Iterator[MicroBatch]]
"""A stream, as a function of a place: it brings a rank's share of the schedule, from the place's step on.

Closing the iterator ends the stream, with all that makes it, and so does an error."""


class HeadStartLostError(Exception):
    """This rank could not make one of its first micro-batches itself; the stream is to be opened again."""


class PoolLostError(Exception):
    """The process that runs the pool's execution has died; the stream is to be opened again.

    Attributes:
        accept: called instead where nothing more is needed of the stream.
    """

    def __init__(self, accept: Callable[[], None]) -> None:
        super().__init__()
        self.accept = accept


class Running(Protocol):
    """A stream of this process, which may be open."""

    def end(self, why: str) -> None:
        """End it, if it has not ended; its record continues."""

    def close(self, why: str = ...) -> None:
        """End it and its record."""


all_streams = weakref.WeakSet[Running]()
"""The streams of this process."""
of_ray: dict[Running, Any] = {}
"""The open ones that Ray makes, in the order in which they were opened, and the handles of their supervisors.

None = one starts, and holds no CPUs of the cluster yet."""


def begun(running: Running, needs_ray: bool) -> None:
    """Let a stream that opens be closed at exit, and, if Ray makes it, before Ray is shut down."""
    # Ray Data would start Ray again, and wait forever, to end an execution after Ray has gone at exit. Of
    # these hooks the last that was registered runs first, and Ray's was before.
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    if needs_ray:
        from raypipe.rayext.patches import before_shutdown

        before_shutdown(_close_those_of_ray)
        of_ray.setdefault(running, None)


def _close_all() -> None:
    for running in list(all_streams):
        running.close()


def _close_those_of_ray() -> None:
    for running in list(of_ray):
        running.close("Ray was shut down")


def close_from_any_thread(
    batches: Any, reader: int, wake: Callable[[], None] = lambda: None
) -> None:
    """Close what may be a generator. If another thread is in it, let that leave, and wait a little.

    Args:
        reader: the thread that asked for the last item.
        wake: ends what that thread waits for.
    """
    deadline = time.monotonic() + _LEAVE_S
    while True:
        try:
            getattr(batches, "close", lambda: None)()
            return
        except ValueError:
            if reader == threading.get_ident() or time.monotonic() > deadline:
                return
            wake()
            time.sleep(0.02)


def supervisors() -> list[Any]:
    """Handles of the supervisors of this process's streams with actors."""
    return [supervisor for supervisor in of_ray.values() if supervisor is not None]


def end_oldest(spared: Any = None) -> bool:
    """End the stream with actors that this process opened first; returns whether there was any.

    Args:
        spared: handle of the Supervisor of one that goes on.
    """
    for running, supervisor in list(of_ray.items()):
        if supervisor is not None and supervisor is not spared:
            running.end(GAVE_WAY)
            return True
    return False
