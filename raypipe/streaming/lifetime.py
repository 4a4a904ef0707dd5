"""A rank's stream in host memory, and its lifetime: it ends by closing, dropping, `ray.shutdown`, or at exit."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from raypipe.streaming.moves import Move
from raypipe.transform.fields import MicroBatch

EXHAUSTED = ""
MOVED = "it goes on at another place"
GAVE_WAY = "its CPUs were needed by one that this process opened later"
GOES_ON = (EXHAUSTED, MOVED, GAVE_WAY)
"""The ends after which a loop may ask for more: the stream then starts again, where it is asked for."""


class HostStream(NamedTuple):
    """A rank's micro-batches in host memory, and the processes behind them.

    Attributes:
        batches: the micro-batches.
        actors: most transform actors of the pool, if this rank knows it yet.
        readers: returns the number of readers at one time, once Ray runs; 0 = the actors read the store.
        stop: function that makes a thread that waits for a batch leave it.
        draws_globally: the thread that requests a batch makes it, from the process's generators: it must be the
            consumer's.
        end: function that ends all processes, once the batches are closed.
        moves: called with each move of this rank where others share the source; returns whether it leaves the
            source, as all then do. None = no other rank shares it.
        starts: starts the processes behind it, maybe in a thread, and calls a function with the handle of the
            stream's supervisor and the most transform actors of the pool; None = there are no such processes.
        needs_ray: whether Ray makes it.
        describe: names what holds up the first batch; empty = the supervisor knows, or this process makes it.
        has_begun: whether the pool has its CPUs, as far as it needs them for a first batch.
        start_images: images that the source, or each of its actors, makes in the time that its start takes. A
            skip of fewer reads on; a longer one starts the source again, behind them.
    """

    batches: Iterator[MicroBatch]
    draws_globally: bool = False
    actors: int = 0
    readers: Callable[[], int] = lambda: 0
    stop: Callable[[], None] = lambda: None
    end: Callable[[], object] = lambda: None
    starts: Callable[[Callable[[Any, int], None]], None] | None = None
    needs_ray: bool = False
    describe: Callable[[], str] = lambda: ""
    has_begun: Callable[[], bool] = lambda: True
    start_images: int = 0
    moves: Callable[[Move], bool] | None = None


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
            _of_ray[self] = None

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
