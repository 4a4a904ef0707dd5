"""Streams of all ranks, made by Ray: rank 0 starts one, splits it, and hands each rank its iterator.

At every (re)start of the worker group, and where the ranks go to another place, they start one from there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from raypipe.background import in_background
from raypipe.config import MAX_INT
from raypipe.errors import ConfigError, RaypipeError
from raypipe.plan.places import MicroBatchId
from raypipe.rayext.agreement import from_rank_zero
from raypipe.rayext.allocation import check_own, cluster_resources, preflight
from raypipe.rayext.cluster import LOCAL_SIZE, keep_sigterm
from raypipe.rayext.cluster_state import is_local
from raypipe.rayext.controller import own_controller, process_of
from raypipe.rayext.placement import remember_group
from raypipe.rayext.processes import is_ray_worker, this_process
from raypipe.rayext.tweaks import quiet_broadcasts
from raypipe.streaming.memory.rank_memory import RankMemory
from raypipe.streaming.spec import StreamSpec, check_pickles
from raypipe.streaming.start.head_marks import Marks
from raypipe.streaming.start.head_start import (
    HeadStart,
    place_is_at_hand,
    threads_of_rank,
)
from raypipe.streaming.start.pool_start import LeftError, PooledStream
from raypipe.streaming.start.room import ActorRoom
from raypipe.streaming.supervisor import (
    POOL,
    announce_trainer,
    end_actors,
    start_supervisor,
    stream_name,
)

if TYPE_CHECKING:
    from ray.data import DataIterator

_logger = logging.getLogger(__name__)

_LOOK_S = 0.1
# The name of rank 0's message of the stream that takes the place of a lost one: its Supervisor and place.
_NEXT = "next"
# Pools in turn that died before this rank had a micro-batch of them, after which their error is raised.
_MAX_VAIN = 3
# The name of rank 0's message that says how many micro-batches each rank makes itself.
_NUM_FIRST = "first"
# Micro-batches of a rank, of its first, among which is looked for one that has ended a process.
_MAX_MARKED = 10_000


class _Opening(NamedTuple):
    """Rank 0's message: plan and place of the stream that it starts, and the parts that are there at once.

    Attributes:
        supervisor: handle of the stream's Supervisor; None = this process is not connected to Ray yet.
        head_start: the most micro-batches that each rank makes itself, of the first ones; 0 = none.
    """

    fingerprint: str
    place: MicroBatchId
    supervisor: Any
    head_start: int


class RayStreams:
    """Opens streams of one rank, and knows the pool of the one that is open.

    Args:
        spec: the stream.
        rank, world_size: number of this rank, and W.
        in_train: whether Ray Train has started the ranks.
        max_actors: most actors of the pool; None = as many as there is room for at the first start.
        apart: whether the execution of a single rank runs in an actor, too.
        siblings: processes of the run that have an execution each, and equal parts of the CPUs.

    Attributes:
        on_start: called once the pool starts, maybe by another thread.
        waited_s: returns the seconds for which the rank has waited for a batch; 0 = it does not wait.
    """

    def __init__(
        self,
        spec: StreamSpec,
        rank: int,
        world_size: int,
        in_train: bool,
        max_actors: int | None,
        apart: bool,
        siblings: int = 1,
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._in_train = in_train
        # Once it is known, it stays: a stream that starts again gets the CPUs that it had.
        self._max_actors = max_actors
        self._apart = apart
        self._siblings = siblings
        self._has_started = False
        self._num_vain = 0
        run = None
        if in_train:
            run = ""
            # it has none in a train function that its driver itself calls
            with contextlib.suppress(Exception):
                run = ray.train.get_context().get_experiment_name()
        self._marks = Marks(spec.plan.fingerprint, rank, run)
        self._may_head_start = spec.pool.head_start != 0
        # places at which processes have ended in their head starts
        self._ended = set[str]()
        self._now: PooledStream | None = None
        self.on_start: Callable[[], None] = lambda: None
        self.waited_s: Callable[[], float] = lambda: 0.0
        remember_group()

    @property
    def supervisor(self) -> Any:
        """Handle of the Supervisor; None = this process is not connected to Ray yet."""
        return self._now.supervisor if self._now else None

    @property
    def actors(self) -> int:
        """The most actors of the pool; 0 = this rank does not know yet."""
        return self._max_actors or 0

    @property
    def is_shared(self) -> bool:
        """True if other ranks take their shares from the same execution."""
        return self._world_size > 1

    @property
    def has_begun(self) -> bool:
        """True once the pool has an actor, or nothing to make; always, if it makes everything."""
        return self._now is not None and self._now.has_begun

    @property
    def num_readers(self) -> int:
        """Readers at one time; 0 = the actors read the store."""
        return int("train" in self._spec.readers(is_local()))

    def awaited(self) -> str:
        """Name what holds up the first batch; empty = the Supervisor knows."""
        return self._now.awaited() if self._now else ""

    def open(self, place: MicroBatchId) -> PooledStream:
        """Start the stream at the step of a place, on all ranks."""
        lost = self._now if self._now and self._now.lost else None
        opening = self._go_on(place, lost) if lost else self._agree(place)
        instead = lost.lost if lost and self.is_shared else None
        self._has_started = True
        head = None
        # A sample that ends its process would end each one if it left no mark.
        if opening.head_start and (self._marks.set(place) or self._world_size > 1):
            head = HeadStart(
                self._spec,
                place,
                self._rank,
                self._world_size,
                threads_of_rank(self._in_train or self._siblings > 1),
                self._marks,
                self._apart,
                opening.head_start,
                instead,
            )
        stream = PooledStream(
            self._spec,
            functools.partial(self._iterators, place, lost is not None),
            self._rank,
            self._world_size,
            opening.supervisor,
            head,
        )
        self._now = stream
        if stream.supervisor is not None:
            # before anything is made: a rank that freezes from here on is found
            self._join(stream)
        if head:
            stream.on_end.append(functools.partial(self._leave, head))
            keep_sigterm()
        try:
            stream.start()
        except BaseException:
            stream.close()
            raise
        return stream

    def _leave(self, head: HeadStart) -> None:
        """The stream has ended. The next one leaves all to the pool, which can replace a process, if need be."""
        self._marks.remove()
        if head.is_lost:
            self._may_head_start = False

    def _agree(self, place: MicroBatchId) -> _Opening:
        """Agree on the stream that all ranks start.

        Raises:
            ConfigError, RaypipeError: the ranks want different streams, or not at the same time.
        """
        fingerprint = self._spec.plan.fingerprint
        place = replace(place, micro=0)
        head_start = 0
        supervisor = None
        if self._rank == 0:
            head_start = self._head_start_at(place)
            if self._is_trainer or self._world_size > 1:
                supervisor = self._start_supervisor()
        opening = _Opening(fingerprint, place, supervisor, head_start)
        if self._world_size == 1:
            return opening
        opening = self._broadcast(opening)
        if opening.fingerprint != fingerprint:
            raise ConfigError(
                f"rank {self._rank} has plan {fingerprint}, and rank 0 has {opening.fingerprint}: give all ranks "
                "the same stores and settings, whole; raypipe hands each rank its share"
            )
        if opening.place != place:
            raise RaypipeError(
                f"rank {self._rank} starts the stream at {_titled(place)}, "
                f"and rank 0 at {_titled(opening.place)}: "
                "all ranks iterate the same passes of the same epochs"
            )
        return opening

    def _go_on(self, place: MicroBatchId, lost: PooledStream) -> _Opening:
        """Agree on the stream that takes the place of a lost one.

        Ranks wait for each other in their loops, and the one that asks here may be a step behind. So it waits for
        none: it makes micro-batches from its own step on, and rank 0 tells the others where its pool starts.

        Raises:
            BaseException: the error of the loss, if no such stream can start, or several in turn brought nothing.
        """
        assert lost.lost
        self._num_vain = 0 if lost.has_brought else self._num_vain + 1
        if self._num_vain == _MAX_VAIN:
            raise lost.lost
        if not self.is_shared:
            return self._agree(place)
        place = replace(place, micro=0)
        if self._ended or not self._may_head_start:
            raise lost.lost
        supervisor = lost.supervisor
        if self._rank == 0:
            supervisor = self._start_supervisor()
            _share(lost, _NEXT, (supervisor, place))
            self._leave_lost(lost.supervisor)
        return _Opening(self._spec.plan.fingerprint, place, supervisor, MAX_INT)

    def _leave_lost(self, supervisor: Any) -> None:
        """Leave the Supervisor of a stream whose execution was lost."""
        end_actors(supervisor, (), self._rank, self._world_size)

    def _meet(self, place: MicroBatchId, stream: PooledStream) -> None:
        """Join the stream that rank 0 opens in the place of a lost one; rank 0 waits until all ranks have.

        One that waits for others in its loop joins later, and may need their micro-batches before.
        """
        if self._rank == 0:
            while ray.get(stream.supervisor.num_joined.remote()) < self._world_size:
                stream.check()
                time.sleep(_LOOK_S)
            return
        supervisor, start = _shared(stream, _NEXT)
        lost = stream.supervisor
        stream.supervisor = supervisor
        self._join(stream)
        self._leave_lost(lost)
        plan = self._spec.plan
        behind = plan.num_micro_batches(place) - plan.num_micro_batches(start)
        assert stream.head, "a shared stream goes on by a head start"
        stream.head.num_behind = behind // self._world_size

    def _head_start_at(self, place: MicroBatchId) -> int:
        """Return the most micro-batches that each rank may make itself from a place on."""
        if not (self._may_head_start and place_is_at_hand(self._spec, place)):
            return 0
        # without a head start, the call that starts the pool does this
        check_pickles(self._spec)
        if not self._has_started:
            self._ended = self._marks.found()
        if not self._ended:
            return MAX_INT
        num_ranks = max(self._world_size, self._spec.share[1])
        upcoming = self._spec.plan.micro_batches(place)
        for number, position in enumerate(islice(upcoming, _MAX_MARKED * num_ranks)):
            if str(position) in self._ended:
                _logger.warning(
                    "a process has ended in its head start, at %s: from there on the pool makes the micro-batches "
                    "now (pool.head_start)",
                    position,
                )
                return number // num_ranks
        return MAX_INT

    def _iterators(
        self, place: MicroBatchId, goes_on: bool, stream: PooledStream
    ) -> list[DataIterator]:
        """Start the pool on rank 0, and return the ranks' iterators on all ranks.

        Args:
            goes_on: whether the stream takes the place of a lost one.
        """
        if goes_on and self.is_shared:
            self._meet(place, stream)
        if self._rank == 0:
            try:
                iterators = self._start(place, stream)
            except BaseException as error:
                if self._world_size > 1 and ray.is_initialized():
                    # a peer that waits for this rank in a collective would not end by itself
                    if isinstance(error, LeftError):
                        # this rank just leaves: they make all that they need
                        _share(stream, _NUM_FIRST, math.inf)
                        error = RaypipeError(
                            "rank 0 has left the stream while its pool started"
                        )
                    _share(stream, POOL, error)
                raise
            if goes_on:
                stream.supervisor.note.remote(
                    "the coordinator died: another pool starts; until then the ranks make micro-batches",
                    "coordinator_died",
                )
            if self._world_size > 1:
                _share(stream, POOL, (iterators, self._max_actors))
        else:
            self._hold_memory(stream)
            if stream.head:
                num_first = _shared(stream, _NUM_FIRST)
                stream.head.let(num_first)
            iterators, self._max_actors = _shared(stream, POOL)
        stream.check()
        self.on_start()
        return iterators

    def _start(self, place: MicroBatchId, stream: PooledStream) -> list[DataIterator]:
        """Start the stream's actors, on rank 0."""
        from raypipe.streaming.pipeline import splits  # this imports ray.data

        spec = self._spec
        settings = spec.pool
        # a loader outside of Ray Train may be the first here to need Ray
        stream.connect(self._siblings > 1)
        room = ActorRoom(settings)
        stream.on_end.append(room.give_back)
        room.ask_for(stream.check)
        if self._is_trainer and self._max_actors is None:
            resources = ray.get_runtime_context().get_assigned_resources()
            cpus = resources.get("CPU", 0.0)
            check_own(cluster_resources().cpus, self._world_size, cpus, settings)
        if self._world_size == 1:
            room.make(stream.check)
        if self._max_actors is None:
            self._max_actors = preflight(
                settings, wait=room.wait(stream.check)
            ).max_actors
            if self._siblings > 1:
                self._max_actors = min(self._max_actors, self._fair_share())
        stream.check()
        if stream.supervisor is None:
            stream.supervisor = self._start_supervisor()
            self._join(stream)
        stream.on_lack = functools.partial(
            room.insist, stream.supervisor if self._world_size == 1 else None
        )
        num_first = 0
        are_others = self._hold_memory(stream).are_others()
        if stream.head:
            num_first = stream.head.fix(are_others, is_local())
            if stream.head.measured:
                stream.supervisor.block_measured.remote(*stream.head.measured)
            if self._world_size > 1:
                _share(stream, _NUM_FIRST, num_first)
        stream.check()
        return splits(
            spec,
            place,
            max_actors=self._max_actors,
            world_size=self._world_size,
            supervisor=stream.supervisor,
            apart=self._apart,
            num_first=num_first * self._world_size,
        )

    def _hold_memory(self, stream: PooledStream) -> RankMemory:
        """Hold this node's folder of finished micro-batches until the stream ends; the last rank removes it."""
        memory = RankMemory(self._spec, stream_name(stream.supervisor))
        stream.on_end.append(memory.close)
        return memory

    @property
    def _is_trainer(self) -> bool:
        """True in a process of Ray Train's; a driver may also call its train function itself."""
        return self._in_train and is_ray_worker()

    def _start_supervisor(self) -> Any:
        """Start the stream's Supervisor, which knows this process from its own start on."""
        trainer = this_process("trainer 0") if self._is_trainer else None
        spec = self._spec
        return start_supervisor(
            spec.run, spec.log_format, trainer=trainer, num_ranks=self._world_size
        )

    def _fair_share(self) -> int:
        """Return the actors that there is room for if each process of the run has as many."""
        num_pools = self._siblings
        if is_local():
            num_pools = min(num_pools, int(os.environ.get(LOCAL_SIZE, num_pools)))
        pool = self._spec.pool
        cpus = cluster_resources().cpus / num_pools
        return max(pool.least_actors, int(cpus / pool.cpus_per_actor))

    def _broadcast(self, opening: _Opening) -> _Opening:
        """Return rank 0's message on all ranks, which call this.

        The first start may take any time; another one waits for ranks that do not ask for the same no longer than
        pool.stall_timeout_s.
        """
        quiet_broadcasts()  # Ray Train warns of more than 1,000 bytes
        if not self._has_started:
            return from_rank_zero(opening)
        timeout_s = self._spec.pool.stall_timeout_s
        broadcast = functools.partial(from_rank_zero, opening)
        waiting = in_background("raypipe-handover", broadcast)
        try:
            return waiting.result(timeout_s)
        except TimeoutError:
            raise RaypipeError(
                f"rank {self._rank} starts the stream again at {_titled(opening.place)}, "
                f"and other ranks have not for {timeout_s:g} s (pool.stall_timeout_s): "
                "all ranks iterate the same passes, also a validation that is made again"
            ) from None

    def _join(self, stream: PooledStream) -> None:
        """Join the Supervisor's watch, with Ray Train's controller, and watch the Supervisor."""
        stream.watch_supervisor(self.waited_s)
        if not self._is_trainer:
            return
        supervisor = stream.supervisor
        if self._rank:  # it has known rank 0 from its start on
            announce_trainer(supervisor, self._rank)
            return
        controller = own_controller()
        process = process_of(controller) if controller else None
        if process:
            supervisor.process_joined.remote("controller", process)


def _titled(place: MicroBatchId) -> str:
    """The place of a stream's start, as errors name it."""
    validation = "validation of " if place.split == "val" else ""
    return f"{validation}epoch {place.epoch}, step {place.step}"


def _share(stream: PooledStream, name: str, message: Any) -> None:
    """Tell the other ranks, which ask for it by `_shared`."""
    stream.supervisor.share.remote(name, ray.cloudpickle.dumps(message))


def _shared(stream: PooledStream, name: str) -> Any:
    """Wait for rank 0's message; raise the error that it has met."""
    while True:
        stream.check()
        for key in (name, POOL):
            if message := ray.get(stream.supervisor.shared.remote(key)):
                found = ray.cloudpickle.loads(message)
                if isinstance(found, BaseException):
                    raise found
                if key == name:
                    return found
        time.sleep(_LOOK_S)
