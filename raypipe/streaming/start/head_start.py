"""Head start: each rank makes the first micro-batches of its share itself, while Ray and the pool start.

A micro-batch has the same bits in every process. So a thread of the rank makes the first n, as the inline engine
does, and the pool begins behind them. A library's steps that draw from the generators of the process, and items
of a Dataset, are made only while the loop waits, or, where another thread takes the micro-batches, not at all. A
user's function that may draw from them is left to the pool, which can replace a process that it ends, unless the
pool before it was lost:

    place of the rank's share    0  1  2  3  4  5 | 6  7  8  …       n = 6
    made by                      the rank         | the pool

Rank 0 sets n before the pool is laid out, and sends it to the other ranks. It counts micro-batches that it can
read without object storage: from files on disk, and from shards that are in the node's cache. A rank whose pool is
not there yet at n goes on, up to twice as far, and leaves out as many of the pool's: too large an n would let the
pool wait for a single thread.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, takewhile

from raypipe.config import MAX_INT
from raypipe.cpus import num_cpus, queued_s
from raypipe.errors import RaypipeError
from raypipe.metrics.prometheus import Recorder
from raypipe.metrics.tracer import traced
from raypipe.plan.places import PADDING, MicroBatchId
from raypipe.storage.filesystem import is_remote
from raypipe.stores.base import is_at_hand
from raypipe.streaming.bad_samples import counts_of
from raypipe.streaming.items import DatasetItems
from raypipe.streaming.lifetime import HeadStartLostError
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.start.head_marks import Marks
from raypipe.transform.fields import MicroBatch
from raypipe.transform.process_state import process_kept
from raypipe.transform.user_code import failed

# Seconds in which a pool that is laid out has a micro-batch, where its processes import all that they need, and on
# one machine, where they are forks: 1.0 to 1.2 on two cores, and 2.0 to 2.6 for items of a Dataset.
_COVER_S = 5.0
_COVER_BY_FORKS_S = 1.5
# so many times n are made at most while the pool is not there
_MOST_TIMES = 2
# Longest wait for the second micro-batch, whose time says how many fit into these seconds. The first includes what
# is loaded once.
_MEASURE_S = 1.0
# Longest wait of the pool's start for the first micro-batch: beside it, on two cores, one of 0.3 s takes 1.3 s.
_FIRST_S = 0.5
# Micro-batches that a rank makes where other streams make the same: pools share their work, and ranks do not.
_FEW = 4
_MAX_AHEAD_BYTES = 256 << 20
_MAX_AHEAD_OF_ONE_CPU = 2
_MAX_THREADS = 4
_LOOK_S = 0.5
# The thread's nice value after its first micro-batch. At 0 it delays the imports of Ray's processes, and the pool
# begins 1 to 2 s later on two cores. Above 5, a busy machine would let it rest while it holds the interpreter.
_NICENESS = 5
_STOP_S = 10.0  # time for the micro-batch in work


class HeadStart:
    """Thread of one rank that makes its first micro-batches.

    Args:
        spec: the stream.
        start: its first place.
        rank, world_size: number of this rank, and W, of those that share an execution.
        num_threads: threads with which it makes one.
        marks: those of the process; None = it leaves none.
        is_apart: whether another thread than the loop's takes the micro-batches.
        most: how many it may make at all.
        instead: the error that ended the pool before this one, which comes again if this rank cannot go on by
            itself; None = there was none. Ranks that go on are at different steps, and wait for each other in
            their loops: so each makes what it lacks from its own step on, wherever it is read from.

    Attributes:
        num_behind: micro-batches of this rank from its first place to that which rank 0 counts n from; negative =
            it is ahead.
        is_lost: whether it could not make one of them.
        measured: split, seconds and bytes of a micro-batch, not the first, by which the pool finds the size of
            its blocks before its actors can tell; None = unknown.
    """

    def __init__(
        self,
        spec: StreamSpec,
        start: MicroBatchId,
        rank: int,
        world_size: int,
        num_threads: int = 1,
        marks: Marks | None = None,
        is_apart: bool = False,
        most: int = MAX_INT,
        instead: BaseException | None = None,
    ) -> None:
        self._is_shared = world_size > 1
        if not self._is_shared:
            rank, world_size = spec.share
        pool = replace(spec.pool, cpus_per_actor=float(num_threads))
        self._spec = replace(spec, pool=pool)
        self.measured: tuple[str, float, int] | None = None
        self._share = functools.partial(
            spec.plan.micro_batches, start, share=(rank, world_size)
        )
        stores = spec.stores.values()
        self._has_remote = any(is_remote(store.address) for store in stores)
        self._total = spec.plan.num_micro_batches(start) // world_size
        self._most = min(self._total, most)
        # a set number is that of a start
        self._is_measured = spec.pool.head_start < 0 or instead is not None
        if not self._is_measured:
            self._most = min(self._most, spec.pool.head_start)
        self._marks = marks
        self._is_apart = is_apart
        self._draws_globally = False
        self._is_awaited = False  # the loop waits for a micro-batch
        self._num_of_step = spec.plan.config.per_step // world_size
        self._instead = instead
        self._num: int | None = None  # n, once it is known
        # after so many the rank takes the pool's, as far as it is known
        self._end: int | None = None
        self.num_behind = 0
        self._num_begun = 0
        self._num_made = 0
        self._num_taken = 0
        self._last_s = 0.0  # seconds for the last one, but the first of several
        self._is_asked = False  # the loop has asked for a micro-batch
        self._made = deque[MicroBatch]()
        self._began_at = 0.0  # the making of the micro-batch in work; 0 = none is
        self._error: BaseException | None = None
        self._is_ready = False
        self._is_done = False
        self._is_stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name="raypipe-head-start", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread, and one that waits in `batches`, end; wait for the micro-batch in work."""
        with self._changed:
            self._is_stopped = True
            self._made.clear()
            self._changed.notify_all()
        thread = self._thread
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(_STOP_S)

    @property
    def is_lost(self) -> bool:
        """True if it could not make one of them."""
        return self._error is not None and self._num_made < (self._num or 0)

    @property
    def num_beyond(self) -> int:
        """Micro-batches that it has handed out before it heard that the pool makes them."""
        return max(0, self._num_taken - (self._num or 0))

    @property
    def has_all(self) -> bool:
        """True if the rank has made all that was left of its share."""
        return max(self._num or 0, self._num_taken) == self._total

    def await_first(self) -> None:
        """Wait for the first micro-batch, not long: Ray's start would have the CPUs that it takes."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_made or self._is_done or self._is_stopped,
                0 if self._has_remote else _FIRST_S,
            )

    def fix(self, are_others: bool = False, is_local: bool = False) -> int:
        """Set n, on rank 0: as many as are made until the pool's first is there. It waits for the first few.

        Args:
            are_others: whether other streams make the same.
            is_local: whether the pool runs on this machine.
        """
        cover_s = _COVER_BY_FORKS_S if is_local else _COVER_S
        with self._changed:
            # from then on it is known whether a rank can make any
            self._changed.wait_for(lambda: self._is_ready or self._is_done)
            num = self._most
            if self._is_measured:
                waits_for_loop = self._draws_globally and not self._is_asked
                self._changed.wait_for(
                    lambda: self._last_s or self._is_done or waits_for_loop, _MEASURE_S
                )
                seconds = self._last_s or _MEASURE_S
                num = self._num_begun + math.ceil(cover_s / seconds)
                if are_others:
                    num = _FEW
            num = min(num, self._most)
            if self._has_remote:
                first = islice(self._share(), num)
                num = len(list(takewhile(self._is_at_hand, first)))
            num = max(num, self._num_begun)
            if self._is_done:
                num = min(num, self._num_made)
            self.let(num)
            if are_others:
                self._end = self._num
        return num

    def let(self, num: float) -> None:
        """Set n, as rank 0 counts it, at most all that is left of the rank's share."""
        with self._changed:
            self._num = int(min(num + self.num_behind, self._total))
            self._end = max(self._num, min(_MOST_TIMES * self._num, self._most))
            self._changed.notify_all()

    def give_up(self) -> None:
        """Make no more, if n is not known: there is no pool behind them."""
        with self._changed:
            if self._num is None:
                self._num = self._num_begun
            self.pool_is_there()

    def pool_is_there(self) -> None:
        """Make no more than n; what was begun beyond is handed out."""
        with self._changed:
            self._end = max(self._num or 0, self._num_begun)
            self._changed.notify_all()

    def batches(self) -> Iterator[MicroBatch]:
        """Yield the first ones, until the pool is there.

        Raises:
            HeadStartLostError: one cannot be made here; with other ranks it is the error itself.
        """
        with self._changed:
            self._is_asked = True
            self._changed.notify_all()
        while True:
            with self._changed:
                while not (self._made or self._is_stopped or self._has_ended()):
                    self._is_awaited = True
                    self._changed.notify_all()
                    self._changed.wait(_LOOK_S)
                    self._check_time()
                self._is_awaited = False
                if self._is_stopped or self._num_taken == self._end:
                    return
                if not self._made:
                    if self._error and (self._instead or self.is_lost):
                        error = self._instead or self._error
                        if self._is_shared:  # the other ranks go on
                            raise error
                        raise HeadStartLostError(str(error)) from self._error
                    return
                batch = self._made.popleft()
                self._num_taken += 1
                self._changed.notify_all()
            yield batch
            del batch

    def _has_ended(self) -> bool:
        is_known = self._num is not None or self._instead is not None
        return self._num_taken == self._end or (self._is_done and is_known)

    def _is_at_hand(self, place: MicroBatchId) -> bool:
        """Return whether a micro-batch can be made from files of this machine."""
        is_anywhere = self._instead is not None or not self._has_remote
        return is_anywhere or place_is_at_hand(self._spec, place)

    def _check_time(self) -> None:
        """Give up a micro-batch that takes longer than its limit: its thread may never end."""
        limit_s = self._spec.transform.time_limit_s
        spent_s = time.monotonic() - self._began_at
        if self._began_at and limit_s and spent_s > limit_s and not self._is_done:
            self._is_done = True
            self._error = RaypipeError(
                f"a micro-batch takes longer than transform.time_limit_s={limit_s:g} in the process of the "
                "rank: set pool.head_start=0, so that an actor makes it, which can be replaced"
            )
            self._changed.notify_all()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._make_all()
        except SystemExit as ended:
            error = failed("the transform", ended)
        except BaseException as failure:
            error = failure
        with self._changed:
            self._error = self._error or error
            self._is_done = True
            self._began_at = 0.0
            self._changed.notify_all()
        if self._marks and self._error is None:
            # nothing of it can end this process now, though the loop has yet to take what was made
            self._marks.remove()
        # from here on, readers read the groups that stores keep in memory
        with contextlib.suppress(RaypipeError):
            for store in self._spec.readers().values():
                store.close()

    def _make_all(self) -> None:
        spec = self._spec.with_own_code()
        maker = MicroBatchMaker(spec)
        with self._changed:
            self._draws_globally = maker.draws_globally
            is_known = (
                self._instead is not None
                or isinstance(self._spec.transforms["train"], DatasetItems)
                or not maker.sample_makers.has_user_code
            )
            if self._draws_globally and (self._is_apart or not is_known):
                # draws must not mix with the loop's, which waits meanwhile
                self._most = 0
                if self._instead:
                    raise self._instead
            self._is_ready = True
            self._changed.notify_all()
        metrics = Recorder(spec.run)
        for place in self._share():
            if not self._may_begin(place):
                return
            if self._marks:
                self._marks.set(place)
            begun_s = _ready_s()
            with traced("make", [place]), process_kept(self._draws_globally):
                batch, bad = maker.make(place)
            if self._num_begun > 1 and self._spec.pool.cpus_per_actor == 1:
                seconds = _ready_s() - begun_s
                if self.measured and self.measured[0] == place.split:
                    # an import, or the loop, may hold the interpreter meanwhile
                    seconds = min(seconds, self.measured[1])
                self.measured = (
                    place.split,
                    seconds,
                    _size(batch),
                )
            maker.settle([batch], bad)
            metrics.add(counts_of(bad), split=place.split)
            if not self._put(batch):
                return
            del batch
            if self._num_begun == 1:
                _make_way()

    def _may_begin(self, place: MicroBatchId) -> bool:
        """Wait until the rank may make the next micro-batch; return whether it is to make it."""
        with self._changed:
            while not self._is_stopped:
                num = self._most if self._end is None else self._end
                if self._num_begun >= num:
                    return False
                is_of_pool = self._num is not None and self._num_begun >= self._num
                if is_of_pool and not self._is_at_hand(place):
                    return False
                if not self._is_far_ahead(place):
                    self._num_begun += 1
                    self._began_at = time.monotonic()
                    return True
                self._changed.wait()
            return False

    def _is_far_ahead(self, place: MicroBatchId) -> bool:
        """Return whether enough waits for the loop, or for n."""
        if self._num is None and not self._is_at_hand(place):
            return True
        if self._draws_globally and not self._is_awaited:
            return True
        if not self._made:
            return False
        if not self._is_asked and len(self._made) >= self._num_of_step:
            # the loop builds its model, and needs the interpreter for that
            return True
        if num_cpus() == 1 and len(self._made) >= _MAX_AHEAD_OF_ONE_CPU:
            return True
        return (len(self._made) + 1) * _size(self._made[-1]) > _MAX_AHEAD_BYTES

    def _put(self, batch: MicroBatch) -> bool:
        """Add a finished micro-batch; return whether the rank is to go on."""
        with self._changed:
            if self._is_done:  # given up
                return False
            if self._num_made or self._most == 1:
                # the first includes what is loaded once
                self._last_s = time.monotonic() - self._began_at
            self._num_made += 1
            self._began_at = 0.0
            self._is_awaited = False
            self._made.append(batch)
            self._changed.notify_all()
            return True


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
        return is_at_hand(store, indices[indices != PADDING], spec.names)
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


def _ready_s() -> float:
    """Seconds of a clock that stands while the calling thread waits for a CPU, and goes on while it sleeps."""
    return time.perf_counter() - queued_s()
