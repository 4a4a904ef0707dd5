"""Head start: each rank makes the first micro-batches of its share itself, while Ray and the pool start.

A micro-batch has the same bits in every process. So a thread of the rank makes the first ones, as the inline
engine does, and the pool begins behind them:

    place of the rank's share    0  1  2  3  4  5 | 6  7  8  …       the pool takes over at 6
    made by                      the rank         | the pool

`raypipe.streaming.start.takeover` has the place at which the pool takes over.

A rank makes what it can read without object storage: micro-batches from files on disk, and from shards that are in
the node's cache. At the first one that is not, it waits for the pool.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice

from raypipe.cpus import num_cpus
from raypipe.errors import RaypipeError
from raypipe.metrics.prometheus import Recorder
from raypipe.metrics.tracer import traced
from raypipe.plan.places import PADDING, Cursor, MicroBatchId
from raypipe.storage.filesystem import is_remote
from raypipe.stores.base import is_at_hand
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch
from raypipe.transform.process_state import process_kept
from raypipe.transform.user_code import copied, failed

# Time from the first actor to the first micro-batch of the pool at the rank, which the rank covers.
_COVER_S = 1.0
# The same, as a share of the time that the start has taken.
_COVER_SHARE = 0.25
# Micro-batches that wait for the loop: in bytes, in number, and where the loop has a single CPU.
_MAX_AHEAD_BYTES = 256 << 20
_MAX_AHEAD = 64
_MAX_AHEAD_OF_ONE_CPU = 2
_MAX_THREADS = 4
# Micro-batches that a rank makes where other streams make the same: pools share their work, and ranks do not.
_FEW = 4
_LOOK_S = 0.5
# The thread's nice value after its first micro-batch. At 0 it delays the imports of Ray's processes, and the pool
# begins 1 to 2 s later on two cores. Above 5, a busy machine would let it rest while it holds the interpreter.
_NICENESS = 5
_STOP_S = 10.0  # time for the micro-batch in work


class HeadStart:
    """Thread of one rank that makes its first micro-batches, until the pool takes over.

    Args:
        spec: the stream.
        start: its first place.
        rank, world_size: number of this rank, and W.
        num_free: micro-batches that the rank may make before it has heard of the pool.
        num_threads: threads with which it makes one.
        on_last: called in the thread once it has made the last one, unless an error ends it.
        on_make: called in the thread with True before it makes a micro-batch, and with False after it.

    Attributes:
        num_claimed: micro-batches that the rank has made, or makes now.
        error: reason for which it cannot make the next one; None = it can.
    """

    def __init__(
        self,
        spec: StreamSpec,
        start: Cursor,
        rank: int,
        world_size: int,
        num_free: int | None = None,
        num_threads: int = 1,
        on_last: Callable[[], None] = lambda: None,
        on_make: Callable[[bool], None] = lambda makes: None,
    ) -> None:
        pool = replace(spec.pool, cpus_per_actor=float(num_threads))
        self._spec = replace(spec, pool=pool)
        self._places = micro_batches_of_rank(spec, start, rank, world_size)
        self._most = spec.plan.num_micro_batches(start) // world_size
        if spec.pool.head_start >= 0:
            self._most = min(self._most, spec.pool.head_start)
        self._on_last = on_last
        self._on_make = on_make
        self._limit = self._most if num_free is None else min(self._most, num_free)
        self._is_final = False
        self._is_brief = False
        self._started_at = time.monotonic()
        self._has_remote = any(
            is_remote(store.address) for store in spec.stores.values()
        )
        self._upcoming = micro_batches_of_rank(spec, start, rank, world_size)
        self._num_at_hand = 0
        # the next micro-batch would have to be fetched
        self._is_at_limit = False
        self._max_ahead = _MAX_AHEAD if num_cpus() > 1 else _MAX_AHEAD_OF_ONE_CPU
        self._micro_batches_of_step = spec.plan.config.per_step // world_size
        self._is_asked = False  # the loop has asked for a micro-batch
        self.num_claimed = 0
        self.error: BaseException | None = None
        self._made = deque[MicroBatch]()
        self._num_bytes = 0
        self._seconds_each = 0.0
        self._began_at = 0.0  # the making of the micro-batch in work; 0 = none is
        self._is_stopped = False
        self._is_done = False
        self._maker: MicroBatchMaker | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name="raypipe-head-start", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, waits: bool = True) -> None:
        """Let the thread, and one that waits in `batches`, end.

        Args:
            waits: wait for the micro-batch in work.
        """
        with self._changed:
            self._is_stopped = True
            self._made.clear()
            self._changed.notify_all()
        thread = self._thread
        if waits and thread.is_alive() and thread is not threading.current_thread():
            thread.join(_STOP_S)

    @property
    def is_done(self) -> bool:
        """True once the rank makes no more."""
        return self._is_done

    @property
    def is_short(self) -> bool:
        """True once it has stopped before the place that it was to reach."""
        has_stopped = self._is_done or self._is_at_limit
        return has_stopped and self.num_claimed < self._limit

    @property
    def num_places(self) -> int:
        """Micro-batches that the rank could make at most."""
        return self._most

    def reserve(self) -> int:
        """Return how many micro-batches this rank, rank 0, is to make if an actor starts now."""
        with self._changed:
            if self._is_done:
                return self.num_claimed
            if self._spec.pool.head_start >= 0:
                return self._count_at_hand(self._most)
            if self._is_brief:
                few = max(self.num_claimed, _FEW)
                return self._count_at_hand(min(self._most, few))
            lead = 1
            if self._seconds_each:
                # on a busy machine, the pool's first micro-batch takes longer too
                spent_s = time.monotonic() - self._started_at
                cover_s = max(_COVER_S, _COVER_SHARE * spent_s)
                lead += math.ceil(cover_s / self._seconds_each)
            return self._count_at_hand(min(self._most, self.num_claimed + lead))

    def be_brief(self) -> None:
        """Make only the first few, and those that the pool counts on: other streams make the same."""
        with self._changed:
            if not self._is_brief and self._spec.pool.head_start < 0:
                self._is_brief = True
                self._limit = min(self._limit, max(self.num_claimed, _FEW))

    def hear(self, num: int, is_final: bool) -> None:
        """The pool takes over behind so many micro-batches, as far as the Supervisor knows now."""
        with self._changed:
            self._limit = min(num, self._most)
            self._is_final = self._is_final or is_final
            self._changed.notify_all()

    def batches(self) -> Iterator[MicroBatch]:
        """Yield what the rank makes, until it makes no more."""
        with self._changed:
            self._is_asked = True
            self._changed.notify_all()
        while True:
            with self._changed:
                while not (self._made or self._is_done or self._is_stopped):
                    self._changed.wait(_LOOK_S)
                    self._check_time()
                if self._is_stopped or not self._made:
                    return
                batch = self._made.popleft()
                self._num_bytes -= _size(batch)
                self._changed.notify_all()
            yield batch
            del batch

    def _count_at_hand(self, num: int) -> int:
        """Return how many of the first `num` micro-batches can be made from files of this machine."""
        while self._has_remote and self._num_at_hand < num:
            position = next(self._upcoming)
            if not place_is_at_hand(self._spec, position):
                self._upcoming = chain([position], self._upcoming)
                return self._num_at_hand
            self._num_at_hand += 1
        return num

    def _check_time(self) -> None:
        """Give up a micro-batch that takes longer than its limit: its thread may never end."""
        limit_s = self._spec.transform.time_limit_s
        spent_s = time.monotonic() - self._began_at
        if self._began_at and limit_s and spent_s > limit_s and not self._is_done:
            self._give_up(
                RaypipeError(
                    f"a micro-batch takes longer than transform.time_limit_s={limit_s:g} in the process of the "
                    "rank: set pool.head_start=0, so that an actor makes it, which can be replaced"
                )
            )

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            if not self._is_done:
                self.num_claimed -= self._began_at > 0
                self.error = error
                self._is_done = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            spec = replace(
                self._spec,
                transforms=copied(self._spec.transforms),
                columns=replace(
                    self._spec.columns, function=copied(self._spec.columns.function)
                ),
            )
            self._maker = maker = MicroBatchMaker(spec)
            metrics = Recorder(spec.run)
            if maker.draws_globally:
                # its draws would mix with those of the loop
                return
            for position in islice(self._places, self._most):
                if not self._claim():
                    break
                self._on_make(True)
                with traced("make", [position]), process_kept(generators=False):
                    batch, bad = maker.make(position)
                self._on_make(False)
                maker.settle([batch], bad)
                _count(metrics, position, bad)
                if not self._put(batch):
                    break
                del batch
                if self.num_claimed == 1:
                    _make_way()
        except SystemExit as error:
            self._give_up(failed("the transform", error))
        except BaseException as error:
            self._give_up(error)
        finally:
            with self._changed:
                self._is_done = True
                self._began_at = 0.0
                self._changed.notify_all()
            if self.error is None:
                self._on_last()
            self._free_groups()

    def _free_groups(self) -> None:
        """Free the groups of samples that stores keep in memory: from here on, readers read them."""
        with contextlib.suppress(RaypipeError):
            for store in self._spec.readers().values():
                store.close()

    def _claim(self) -> bool:
        """Wait until the rank may make the next micro-batch; returns whether it is to make it."""
        with self._changed:
            while not self._is_stopped:
                if self.num_claimed < self._limit and not self._is_far_ahead():
                    upcoming = self.num_claimed + 1
                    # once the pool has begun, others count on them: they may be fetched
                    if self._is_final or self._count_at_hand(upcoming) == upcoming:
                        self._is_at_limit = False
                        self.num_claimed = upcoming
                        self._began_at = time.monotonic()
                        return True
                    self._is_at_limit = True
                if self._is_final and self.num_claimed >= self._limit:
                    return False
                self._changed.wait()
            return False

    def _is_far_ahead(self) -> bool:
        if not self._made:
            return False
        max_ahead = self._max_ahead
        if not self._is_asked:
            # the loop builds its model, and needs the interpreter for that
            max_ahead = min(max_ahead, self._micro_batches_of_step)
        num_bytes = self._num_bytes + _size(self._made[-1])
        return len(self._made) >= max_ahead or num_bytes > _MAX_AHEAD_BYTES

    def _put(self, batch: MicroBatch) -> bool:
        """Add a finished micro-batch; returns whether the rank is to go on."""
        with self._changed:
            if self._is_done:
                # given up: the pool makes it
                return False
            seconds = time.monotonic() - self._began_at
            self._began_at = 0.0
            if self._seconds_each:
                self._seconds_each += (seconds - self._seconds_each) / 4
            elif self.num_claimed > 1 or self._most == 1:
                # the first includes what is loaded once
                self._seconds_each = seconds
            self._made.append(batch)
            self._num_bytes += _size(batch)
            self._changed.notify_all()
            return True


def micro_batches_of_rank(
    spec: StreamSpec, start: Cursor, rank: int, world_size: int
) -> Iterator[MicroBatchId]:
    """Yield the places of a rank's share, from a cursor on."""
    return (
        position
        for position in spec.plan.micro_batches(start)
        if position.micro % world_size == rank
    )


def _make_way() -> None:
    """Leave the CPUs to Ray's processes, which the rank waits for once it has its first micro-batch."""
    if sys.platform == "linux":  # elsewhere, all threads of a process have one priority
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, _NICENESS))


def place_is_at_hand(spec: StreamSpec, position: MicroBatchId) -> bool:
    """Return whether this process can read a micro-batch's samples without object storage."""
    store = spec.stores[position.split]
    indices = spec.plan.indices(position)
    try:
        return is_at_hand(store, indices[indices != PADDING], spec.wanted.names)
    except RaypipeError:
        # the pool says what is wrong with it
        return False


def threads_of_rank(in_train: bool) -> int:
    """Return how many threads make a micro-batch: half of the CPUs, since Ray starts on the others.

    Args:
        in_train: whether Ray Train started this process. Then others have the CPUs of its machine.
    """
    return 1 if in_train else max(1, min(_MAX_THREADS, num_cpus() // 2))


def _size(batch: MicroBatch) -> int:
    return sum(array.nbytes for array in batch.arrays().values())


def _count(metrics: Recorder, position: MicroBatchId, bad: list[BadSample]) -> None:
    num_substituted = sum(sample.substitute is not None for sample in bad)
    metrics.add(
        {"bad_samples_total": len(bad), "substituted_samples_total": num_substituted},
        split=position.split,
    )
