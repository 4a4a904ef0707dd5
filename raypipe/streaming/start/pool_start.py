"""Start of a stream's pool by Ray, in the calling thread or in another one; it can be left at any time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from raypipe.rayext.cluster import ANSWER_S, connect, connect_by_thread
from raypipe.rayext.failures import cause_of
from raypipe.rayext.iteration import (
    ExecutionWatch,
    begun,
    coordinator_of,
    stop_execution,
)
from raypipe.rayext.startup import Wait
from raypipe.streaming.memory.rank_memory import RankMemory
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.start.head_start import HeadStart
from raypipe.streaming.supervisor import end_actors, stream_name
from raypipe.transform.fields import MicroBatch

if TYPE_CHECKING:
    from ray.data import DataIterator

_LOOK_S = 0.1
_LEAVE_S = 60.0  # longest wait for a call to Ray that cannot be interrupted
_FOLLOWED_S = 5.0
# One stream of a process starts at a time: each counts the CPUs that are free.
_starting = threading.Lock()


class PoolIterators(NamedTuple):
    """Iterators of all ranks, and the most actors of the pool that makes them."""

    iterators: list[DataIterator]
    max_actors: int


class _LeftError(Exception):
    """The start was left."""


class PoolStart:
    """Start of a pool.

    Args:
        spec: the stream.
        make_iterators: starts the pool, or on other ranks gets its iterators; calls `check` now and then.
        rank, world_size: number of this rank, and W.
        supervisor: handle of the stream's Supervisor; None = `make_iterators` sets it.
        head: the rank's own first micro-batches; None = it makes none.

    Attributes:
        supervisor: see above.
        on_end: functions to call at the end of the stream.
    """

    def __init__(
        self,
        spec: StreamSpec,
        make_iterators: Callable[[PoolStart], PoolIterators],
        rank: int,
        world_size: int = 1,
        supervisor: Any = None,
        head: HeadStart | None = None,
    ) -> None:
        self._spec = spec
        self._make_iterators = make_iterators
        self._rank = rank
        self._world_size = world_size
        self.supervisor = supervisor
        self.on_end: list[Callable[[], None]] = []
        self._head = head
        self._iterators: list[DataIterator] = []
        self._batches: Iterator[MicroBatch] = iter(())
        self._first: list[MicroBatch] = []
        self._error: BaseException | None = None
        self._watch: ExecutionWatch | None = None
        self._is_left = threading.Event()
        self._is_ready = threading.Event()
        self._is_cleaned = False
        self._has_taken_over = False
        self._cleaning = threading.Lock()
        self._thread: threading.Thread | None = None
        self._following: threading.Thread | None = None
        self._memory: RankMemory | None = None

    @property
    def has_head_start(self) -> bool:
        """True if the rank makes the first micro-batches itself."""
        return self._head is not None

    @property
    def has_begun(self) -> bool:
        """True once the pool has actors, and its place no longer changes; always, if the pool makes everything."""
        return self._head is None or self._has_taken_over

    @property
    def is_left(self) -> bool:
        """True once the stream ends."""
        return self._is_left.is_set()

    def check(self) -> None:
        """End the start here if it was left."""
        if self._is_left.is_set():
            raise _LeftError

    def connect(self) -> None:
        """Connect this process to Ray, see `raypipe.rayext.cluster.connect`."""
        wait = Wait(ANSWER_S, self.check)
        if self._thread:
            connect_by_thread(wait)
        else:
            connect(wait=wait)
        self.check()

    def reserve(self) -> str:
        """Tell the Supervisor, before the pool can begin, what this rank makes; return the folder of its memory.

        Where other streams make the same, it makes only the first few.
        """
        memory = self._open_memory()
        if memory.are_others() and self._head:
            self._head.be_brief()
        if self._head:
            self.supervisor.head_extends.remote(self._head.reserve())
        return memory.folder

    def _open_memory(self) -> RankMemory:
        if self._memory is None:
            self._memory = RankMemory(self._spec, stream_name(self.supervisor))
            self.on_end.append(self._memory.close)
        return self._memory

    def run(self, connected: Callable[[Any, int], None]) -> None:
        """Start the pool, and return once it has begun.

        Args:
            connected: is called with the Supervisor's handle and the most actors of the pool.
        """
        self._start(connected)
        self._is_ready.set()

    def run_in_thread(self, connected: Callable[[Any, int], None]) -> None:
        """Start the pool in a thread. An error of it comes with the first batch; see `run`."""
        self._thread = threading.Thread(
            target=self._run, args=(connected,), name="raypipe-pool-start", daemon=True
        )
        self._thread.start()
        # Several ranks have a Supervisor from the beginning, and may not need the pool before they leave.
        if self._world_size > 1:
            self._start_following()

    def batches(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the pool, once it has started."""
        while not self._is_ready.wait(_LOOK_S):
            if self._is_left.is_set():
                return
        if self._error is not None:
            raise self._error
        if self._is_left.is_set():
            return
        while self._first:
            yield self._first.pop()
        for batch in self._batches:
            if self._error is not None:
                raise self._error
            yield batch
            # its block's memory is to be free before the next one arrives
            del batch

    def describe(self) -> str:
        """Name what holds up the first batch; empty = the Supervisor knows."""
        if self._is_ready.is_set() or self.supervisor is not None:
            return ""
        return "Ray starts, or the cluster is asked for room"

    def leave(self) -> None:
        """Let threads that wait here leave."""
        self._is_left.set()
        if self._head:
            self._head.stop(waits=False)
        if self.supervisor is not None:
            stop_execution(self.supervisor)

    def end(self) -> None:
        """End what was started; a start that cannot be left yet ends it itself."""
        self._is_left.set()
        if self._head:
            self._head.stop()
            self._leave_rest(self._head)
        thread = self._thread
        if thread is threading.current_thread():
            # the loader was collected here: the start ends what it has started
            return
        if thread:
            deadline = time.monotonic() + _LEAVE_S
            while thread.is_alive() and time.monotonic() < deadline:
                if self.supervisor is not None:
                    stop_execution(self.supervisor)
                thread.join(_LOOK_S)
            if thread.is_alive():
                return
        self._clean()
        following = self._following
        if following and following is not threading.current_thread():
            # at exit, a thread that still asks Ray would use what Ray has freed
            following.join(_FOLLOWED_S)

    def _leave_rest(self, head: HeadStart) -> None:
        """Let other ranks make what they still need: a pool that rank 0 leaves may never start."""
        if self._rank == 0 and self._world_size > 1 and ray.is_initialized():
            self.supervisor.head_extends.remote(head.num_places)

    def _clean(self) -> None:
        with self._cleaning:
            if self._is_cleaned:
                return
            self._is_cleaned = True
        with contextlib.suppress(ValueError):  # a thread is in it, which leaves
            getattr(self._batches, "close", lambda: None)()
        if self.supervisor is not None:
            end_actors(self.supervisor, self._iterators, self._rank, self._world_size)
        for call in self.on_end:
            call()
        # an execution is to be collected once it has ended
        self._iterators = []
        self._batches = iter(())
        self._first = []

    def _run(self, connected: Callable[[Any, int], None]) -> None:
        try:
            while not _starting.acquire(timeout=_LOOK_S):
                self.check()
            try:
                self._start(connected)
                if coordinator_of(self._iterators[self._rank]) is None:
                    # such an execution begins at its first row
                    self._first = [
                        batch
                        for batch in [next(self._batches, None)]
                        if batch is not None
                    ]
            finally:
                _starting.release()
        except _LeftError:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            self._is_ready.set()
            if self._is_left.is_set():
                self._clean()

    def _fail(self, error: BaseException) -> None:
        """Let all ranks end with an error of the pool, after what they have made themselves: nobody takes over."""
        self._error = error
        self._is_ready.set()
        if self._head:
            self._head.hear(self._head.num_claimed, is_final=True)
        if self._world_size > 1:
            # A peer that waits for this rank in a collective would not end by itself.
            self.supervisor.pool_failed.remote(ray.cloudpickle.dumps(error))

    def _start(self, connected: Callable[[Any, int], None]) -> None:
        iterators, max_actors = self._make_iterators(self)
        self._iterators = iterators
        self.check()
        connected(self.supervisor, max_actors)
        iterator = begun(iterators[self._rank])
        self._batches = host_batches(iterator, self._open_memory())
        self._watch = ExecutionWatch(iterators[self._rank])
        if self._world_size == 1:
            self._start_following()

    def _start_following(self) -> None:
        if self._head:
            self._following = threading.Thread(
                target=self._follow,
                args=(self._head,),
                name="raypipe-takeover",
                daemon=True,
            )
            self._following.start()

    def _follow(self, head: HeadStart) -> None:
        """Agree with the Supervisor on where the pool takes over, until that is final.

        The Supervisor may start late: rank 0 continues, and tells it without waiting for an answer.
        """
        asked = list[Any]()
        is_final = False
        with contextlib.suppress(ray.exceptions.RayError):
            while not (is_final and head.is_done):
                if self._is_left.wait(_LOOK_S) or not self._execution_lives():
                    return
                asked.append(self._ask(head))
                answered, asked = ray.wait(asked, num_returns=len(asked), timeout=0)
                if answered:
                    num, is_final, error = ray.get(answered[-1])
                    if error:
                        self._fail(ray.cloudpickle.loads(error))
                        return
                    head.hear(num, is_final)
                    self._has_taken_over = is_final

    def _execution_lives(self) -> bool:
        """Return whether the pool's execution has not ended: the rank reads nothing from it yet."""
        try:
            if self._watch:
                self._watch.check()
        except Exception as error:
            if not self._is_left.is_set():
                is_death = not isinstance(error, ray.exceptions.RayTaskError)
                if is_death and self._rank == 0:
                    self.supervisor.note.remote(
                        "the coordinator of the stream died while the ranks made their first micro-batches",
                        "coordinator_died",
                    )
                self._fail(cause_of(error))
            return False
        return True

    def _ask(self, head: HeadStart) -> Any:
        """Tell the Supervisor about this rank, and ask where the pool takes over."""
        if head.is_short:
            return self.supervisor.head_ends.remote(head.num_claimed)
        if self._rank == 0:
            return self.supervisor.head_extends.remote(head.reserve())
        return self.supervisor.takeover.remote()
