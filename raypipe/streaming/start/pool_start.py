"""A rank's micro-batches of Ray's pool, behind the first ones that the rank makes itself."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import ray

from raypipe.rayext import fork_server
from raypipe.rayext.cluster import (
    ANSWER_S,
    connect,
    connect_by_thread,
    prepare_workers,
)
from raypipe.rayext.failures import is_lost_process
from raypipe.rayext.iteration import begun, coordinator_of, stop_execution
from raypipe.rayext.startup import Wait
from raypipe.rayext.watchdog import SupervisorWatchdog
from raypipe.streaming.items import DatasetItems
from raypipe.streaming.lifetime import PoolLostError, close_from_any_thread
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.start.head_start import HeadStart
from raypipe.streaming.supervisor import end_actors
from raypipe.transform.block_memory import free_spare, free_unused
from raypipe.transform.fields import MicroBatch

if TYPE_CHECKING:
    from ray.data import DataIterator

_LOOK_S = 0.1
_LEAVE_S = 60.0  # longest wait for a call to Ray that cannot be interrupted
# One stream of a process starts at a time: each counts the CPUs that are free.
_starting = threading.Lock()


class LeftError(Exception):
    """The start was left."""


class PooledStream(Iterator[MicroBatch]):
    """A rank's micro-batches: its first n are its own, and the rest comes from a pool, which starts meanwhile.

    Any thread may close it.

    Args:
        spec: the stream.
        start_pool: starts the pool, or on other ranks gets its iterators; calls `check` now and then.
        rank, world_size: number of this rank, and W.
        supervisor: handle of the stream's Supervisor; None = `start_pool` sets it.
        head: the rank's own first micro-batches; None = it makes none, and `start` waits for the pool.

    Attributes:
        supervisor: see above.
        on_end: functions to call at the end of the stream.
        on_lack: called each second while the pool finds no CPU for an actor.
        has_begun: whether the pool has an actor, or nothing to make; always, without a head start.
        has_brought: whether a micro-batch came from the pool.
        lost: the error that says that the process of the pool's execution has died; None = it lives. Such a stream
            does not leave its Supervisor when it ends: the next one asks it how the ranks go on.
    """

    def __init__(
        self,
        spec: StreamSpec,
        start_pool: Callable[[PooledStream], list[DataIterator]],
        rank: int,
        world_size: int = 1,
        supervisor: Any = None,
        head: HeadStart | None = None,
    ) -> None:
        self._spec = spec
        self._start_pool = start_pool
        self._rank = rank
        self._world_size = world_size
        self.supervisor = supervisor
        self.head = head
        self.on_end: list[Callable[[], None]] = []
        self.on_lack: Callable[[], None] = lambda: None
        self.has_begun = head is None
        self.has_brought = False
        self.lost: BaseException | None = None
        self._iterators: list[DataIterator] = []
        self._from_pool: Iterator[MicroBatch] = iter(())
        self._first: list[MicroBatch] = []
        self._error: BaseException | None = None
        self._is_left = threading.Event()
        self._is_ready = threading.Event()
        self._is_cleaned = False
        self._cleaning = threading.Lock()
        self._thread: threading.Thread | None = None
        self._watchdog: SupervisorWatchdog | None = None
        self._batches = self._each()
        self._reader = 0  # thread that asked for the last one

    def check(self) -> None:
        """End the start here if it was left."""
        if self._is_left.is_set():
            raise LeftError

    def connect(self, has_siblings: bool) -> None:
        """Connect this process to Ray, see `raypipe.rayext.cluster.connect`."""
        wait = Wait(ANSWER_S, self.check)
        is_dataset = isinstance(self._spec.transforms["train"], DatasetItems)
        if is_dataset and not has_siblings:
            prepare_workers("text", fork_server.ITEM_MODULES)
        if self._thread:
            connect_by_thread(wait, has_siblings)
        else:
            connect(wait=wait, has_siblings=has_siblings)
        self.check()

    def watch_supervisor(self, waited_s: Callable[[], float]) -> None:
        """Watch the Supervisor, and so show it that this rank lives, until the stream ends.

        Args:
            waited_s: see `SupervisorWatchdog`.
        """
        if self._watchdog:
            self._watchdog.stop()
        self._watchdog = SupervisorWatchdog(
            self.supervisor, self._rank, waited_s, lambda: self.on_lack()
        )
        self._watchdog.start()

    def start(self) -> None:
        """Start the pool: with a head start in a thread, whose error comes with the first batch of the pool."""
        if self.head is None:
            self._start()
            self._is_ready.set()
            return
        self.head.start()
        self._thread = threading.Thread(
            target=self._run, name="raypipe-pool-start", daemon=True
        )
        self._thread.start()

    def __next__(self) -> MicroBatch:
        self._reader = threading.get_ident()
        return next(self._batches)

    def _each(self) -> Iterator[MicroBatch]:
        if self.head:
            yield from self.head.batches()
            free_spare()
            if self.head.has_all:
                return
        while not self._is_ready.wait(_LOOK_S):
            if self._is_left.is_set():
                return
        if self._error is not None:
            raise self._error
        if self._is_left.is_set():
            return
        num_beyond = self.head.num_beyond if self.head else 0
        from_pool = chain(self._first, self._from_pool)
        self._first = []
        is_first = True
        try:
            for batch in islice(from_pool, num_beyond, None):
                self.has_brought = True
                yield batch
                # its block's memory is to be free before the next one arrives
                del batch
                if is_first:
                    free_unused()  # a loop holds a batch until it has the next one
                    is_first = False
        except Exception as error:
            coordinator = coordinator_of(self._iterators[self._rank])
            if coordinator is None or not is_lost_process(error):
                raise
            self.lost = error
            # if it was only out of reach, the other ranks are to go on, too
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(coordinator)
            raise PoolLostError(self._accept_loss) from error

    def _accept_loss(self) -> None:
        self.lost = None

    def awaited(self) -> str:
        """Name what holds up the first batch; empty = the Supervisor knows."""
        if self._is_ready.is_set() or self.supervisor is not None:
            return ""
        return "Ray starts, or the cluster is asked for room"

    def close(self) -> None:
        """End what was started. Threads that wait here leave; a start that cannot be left ends it itself."""
        self._is_left.set()
        if self.head:
            self.head.stop()
        thread = self._thread
        deadline = time.monotonic() + _LEAVE_S
        while thread and thread.is_alive():
            self._stop_execution()
            if time.monotonic() > deadline:
                return
            thread.join(_LOOK_S)
        self._clean()

    def _clean(self) -> None:
        with self._cleaning:
            if self._is_cleaned:
                return
            self._is_cleaned = True
        for batches in (self._batches, self._from_pool):
            close_from_any_thread(batches, self._reader, self._stop_execution)
        if self._watchdog:
            self._watchdog.stop()
        if self.supervisor is not None and not (self.lost and self._world_size > 1):
            end_actors(self.supervisor, self._iterators, self._rank, self._world_size)
        for call in self.on_end:
            call()
        # an execution is to be collected once it has ended, like the objects that have opened it
        self.on_end = []
        self._start_pool = lambda stream: []
        self._iterators = []
        self._from_pool = iter(())
        self._batches = iter(())
        self._first = []
        # It is a reference cycle, and holds the blocks that no rank has taken.
        gc.collect()

    def _stop_execution(self) -> None:
        if self.supervisor is not None:
            stop_execution(self.supervisor)

    def _run(self) -> None:
        try:
            while not _starting.acquire(timeout=_LOOK_S):
                self.check()
            try:
                if self.head:
                    self.head.await_first()
                    self.check()
                self._start()
                if self._iterators and not coordinator_of(self._iterators[self._rank]):
                    # such an execution begins at its first row
                    first = next(self._from_pool, None)
                    self._first = [] if first is None else [first]
            finally:
                _starting.release()
            self._is_ready.set()
            self._await_actor()
        except LeftError:
            pass
        except BaseException as error:
            self._error = error
            assert self.head
            self.head.give_up()
        finally:
            self._is_ready.set()
            if self._is_left.is_set():
                self._clean()

    def _await_actor(self) -> None:
        """Wait until the pool has an actor, or nothing to make."""
        has_actor = coordinator_of(self._iterators[self._rank]) is None
        with contextlib.suppress(ray.exceptions.RayError):
            while not has_actor and not self._is_left.wait(_LOOK_S):
                has_actor = ray.get(self.supervisor.has_actors.remote())
        self.has_begun = True
        if self.head:
            self.head.pool_is_there()

    def _start(self) -> None:
        self._iterators = self._start_pool(self)
        self.check()
        iterator = begun(self._iterators[self._rank])
        self._from_pool = host_batches(iterator)
