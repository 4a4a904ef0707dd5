"""A stream as a function of a place, and its lifetime: it ends by closing, dropping, with Ray, or at exit."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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


class Pool(Protocol):
    """Facts about the actors that make a stream.

    Attributes:
        supervisor: handle of the stream's Supervisor; None = this process is not connected to Ray yet.
        actors: the most that there may be, as far as this rank knows; 0 = it does not.
        num_readers: readers at one time; 0 = the actors read the store.
        is_shared: whether other ranks take their shares from the same execution.
        has_begun: whether one of them has started, or they have nothing to make.
        on_start: called once they start, maybe by another thread.
        waited_s: returns the seconds for which the rank has waited for a batch; 0 = it does not wait.
    """

    on_start: Callable[[], None]
    waited_s: Callable[[], float]

    @property
    def supervisor(self) -> Any: ...

    @property
    def actors(self) -> int: ...

    @property
    def is_shared(self) -> bool: ...

    @property
    def has_begun(self) -> bool: ...

    @property
    def num_readers(self) -> int: ...

    def awaited(self) -> str:
        """Name what holds up the first batch; empty = the Supervisor knows."""


class Lifetime:
    """Resources of one loader's stream: threads, an execution, actors, a record. It has no reference to the
    loader, so dropping the loader ends it.

    Args:
        close_record: called after the last report of the stream.

    Attributes:
        why: reason of the stream's end; EXHAUSTED = it was read to its end; None = it has not ended.
        reader: thread that asked for the last batch.
    """

    def __init__(self, close_record: Callable[[], None]) -> None:
        self.why: str | None = None
        self.reader = 0
        self._close_record = close_record
        self._ends = ExitStack()
        self._one_by_one = threading.RLock()
        _all.add(self)

    def begin(self, ends: ExitStack, needs_ray: bool) -> None:
        """The stream is open.

        Args:
            ends: callbacks that end it.
            needs_ray: whether Ray makes it.
        """
        self.why = None
        self._ends.push(ends)
        # Ray Data would start Ray again, and wait forever, to end an execution after Ray has gone at exit. Of
        # these hooks the last that was registered runs first, and Ray's was before.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        if needs_ray:
            from raypipe.rayext.patches import before_shutdown

            before_shutdown(_close_those_of_ray)
            _of_ray.setdefault(self, None)

    def has_actors(self, supervisor: Any) -> None:
        """The stream holds CPUs of the cluster from now on; the argument is its Supervisor's handle."""
        _of_ray[self] = supervisor

    def end(self, why: str) -> None:
        """End the stream, if it has not ended; its record continues."""
        with self._one_by_one:
            if self.why is None or (self.why in GOES_ON and why not in GOES_ON):
                self.why = why
            self._ends.close()
            _of_ray.pop(self, None)

    def close(self, why: str = "the program ends") -> None:
        """End the stream and its record."""
        with self._one_by_one:
            self.end(why)
            self._close_record()

    def close_with(self, owner: object) -> None:
        """Close it when the owner is dropped."""
        # At exit `_close_all` comes first, with Ray still there.
        weakref.finalize(owner, self.close).atexit = False


_all = weakref.WeakSet[Lifetime]()
# The open ones that Ray makes, in the order in which they were opened, and their supervisors; None = it starts.
_of_ray: dict[Lifetime, Any] = {}


def _close_all() -> None:
    for running in list(_all):
        running.close()


def _close_those_of_ray() -> None:
    for running in list(_of_ray):
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
    return [supervisor for supervisor in _of_ray.values() if supervisor is not None]


def end_oldest() -> bool:
    """End the stream with actors that this process opened first; returns whether there was any."""
    for running, supervisor in list(_of_ray.items()):
        if supervisor is not None:
            running.end(GAVE_WAY)
            return True
    return False
