"""Streams of all ranks, made by Ray: rank 0 starts one, splits it, and hands each rank its iterator.

At every (re)start of the worker group, and where the ranks go to another place, they start one from there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import ray

from raypipe.errors import ConfigError, RaypipeError
from raypipe.plan.places import Cursor, MicroBatchId
from raypipe.plan.schedule import Segment
from raypipe.rayext.allocation import check_own, cluster_resources, preflight
from raypipe.rayext.cluster import keep_sigterm
from raypipe.rayext.cluster_state import is_local
from raypipe.rayext.controller import own_controller, process_of
from raypipe.rayext.placement import remember_group
from raypipe.rayext.processes import is_ray_worker, this_process
from raypipe.rayext.tweaks import quiet_broadcasts
from raypipe.streaming.lifetime import HostStream
from raypipe.streaming.moves import Move
from raypipe.streaming.spec import StreamSpec, check_pickles
from raypipe.streaming.start.head_marks import Marks
from raypipe.streaming.start.head_start import (
    HeadStart,
    micro_batches_of_rank,
    place_is_at_hand,
    threads_of_rank,
)
from raypipe.streaming.start.pool_start import PoolIterators, PoolStart
from raypipe.streaming.start.room import ask_for_room, make_room
from raypipe.streaming.start.takeover import GapError, HeadStartLostError, joined
from raypipe.streaming.supervisor import start_supervisor
from raypipe.transform.fields import MicroBatch

_logger = logging.getLogger(__name__)

_LOOK_S = 0.1
# Images that an actor makes while a stream starts: 5 s pass until its first batch, at 1 ms for a photo.
_START_IMAGES = 5_000
# A rank that would skip a long part waits so long for the others to say that they do, too.
_AGREE_S = 60.0


class _Opening(NamedTuple):
    """Rank 0's message: plan and place of the stream that it starts, and the parts that are there at once.

    Attributes:
        supervisor: handle of the stream's Supervisor; None = this process is not connected to Ray yet.
        has_head_start: whether the ranks make the first micro-batches themselves.
    """

    fingerprint: str
    start_name: str
    supervisor: Any
    has_head_start: bool


class RayStreams:
    """Opens streams of one rank.

    Args:
        spec: the stream.
        rank, world_size: number of this rank, and W.
        in_train: whether Ray Train has started the ranks.
        max_actors: most actors of the pool; None = as many as there is room for at the first start.
        apart: whether the execution of a single rank runs in an actor, too.
    """

    def __init__(
        self,
        spec: StreamSpec,
        rank: int,
        world_size: int,
        in_train: bool,
        max_actors: int | None,
        apart: bool,
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._in_train = in_train
        # Once it is known, it stays: a stream that starts again gets the CPUs that it had.
        self._max_actors = max_actors
        self._apart = apart
        self._has_started = False
        run = _run_name() if in_train else None
        self._marks = Marks(spec.plan.fingerprint, rank, run)
        self._may_head_start = spec.pool.head_start != 0
        remember_group()

    def open(self, start: Cursor, only: Segment | None = None) -> HostStream:
        """Start the stream, on all ranks.

        Args:
            start: its first place.
            only: the one segment that it brings; None = all from there on.
        """
        rank = self._rank
        world_size = self._world_size
        spec = self._spec
        if only:
            spec = replace(spec, plan=spec.plan.only(only))
        opening = self._agree(spec, start, only)
        self._has_started = True
        supervisor = opening.supervisor
        moves = None
        if world_size > 1:
            moves = functools.partial(_leaves, supervisor, rank, world_size)
        head = None
        # A sample that ends its process would end each one if it left no mark.
        if opening.has_head_start and (self._marks.set() or world_size > 1):
            free = None if rank == 0 else 1
            threads = threads_of_rank(self._in_train)
            # from then on nothing of it can end this process, though the loop has yet to take what it made
            on_last = self._marks.remove
            on_make = self._marks.making
            head = HeadStart(
                spec, start, rank, world_size, free, threads, on_last, on_make
            )
        make = functools.partial(self._iterators, spec, start)
        pool = PoolStart(spec, make, rank, world_size, supervisor, head)
        host = HostStream(
            pool.batches(),
            stop=pool.leave,
            end=pool.end,
            actors=self._max_actors or 0,
            readers=lambda: int("train" in self._spec.readers(is_local())),
            start_images=_START_IMAGES,
            moves=moves,
            starts=pool.run,
            needs_ray=True,
            describe=pool.describe,
            has_begun=lambda: pool.has_begun,
        )
        if head is None:
            pool.on_end.append(self._marks.forget)
            return host
        pool.on_end.append(self._marks.remove)
        keep_sigterm()
        head.start()
        places = micro_batches_of_rank(spec, start, rank, world_size)
        return host._replace(
            batches=self._joined(head, pool, places), starts=pool.run_in_thread
        )

    def _joined(
        self, head: HeadStart, pool: PoolStart, places: Iterator[MicroBatchId]
    ) -> Iterator[MicroBatch]:
        """The rank's own micro-batches, and then the pool's."""
        try:
            yield from joined(head.batches(), pool.batches(), places)
        except GapError as error:
            if pool.is_left:
                return
            # The next start leaves all to the pool, which can replace a bad sample's process.
            self._may_head_start = False
            raise HeadStartLostError(head.error or error) from head.error

    def _agree(self, spec: StreamSpec, start: Cursor, only: Segment | None) -> _Opening:
        """Agree on the stream that all ranks start.

        Raises:
            ConfigError, RaypipeError: the ranks want different streams, or not at the same time.
        """
        start_name = f"epoch {start.epoch}, step {start.step}"
        if only:
            start_name = (
                f"step {only.first_step} of the validation of epoch {only.epoch}"
            )
        fingerprint = self._spec.plan.fingerprint
        has_head_start = self._may_head_start
        if self._rank == 0 and has_head_start:
            first = next(spec.plan.micro_batches(start), None)
            has_head_start = first is not None and place_is_at_hand(spec, first)
        if self._rank == 0:
            if has_head_start:  # Without one, the call that starts the pool does this.
                check_pickles(spec)
            if not self._has_started and self._marks.found():
                _logger.warning(
                    "a process has ended while it made a micro-batch itself, so the pool makes the first ones now "
                    "(pool.head_start)"
                )
                self._may_head_start = has_head_start = False
        opening = _Opening(fingerprint, start_name, None, has_head_start)
        if self._world_size == 1 or not self._in_train:
            return opening
        if self._rank == 0:
            supervisor = start_supervisor(spec.run, spec.log_format)
            opening = opening._replace(supervisor=supervisor)
        opening = self._broadcast(opening, start_name)
        if opening.fingerprint != fingerprint:
            raise ConfigError(
                f"rank {self._rank} has plan {fingerprint}, and rank 0 has {opening.fingerprint}: give all ranks "
                "the same stores and settings, whole; raypipe hands each rank its share"
            )
        if opening.start_name != start_name:
            raise RaypipeError(
                f"rank {self._rank} starts the stream at {start_name}, and rank 0 at {opening.start_name}: "
                "all ranks iterate the same passes of the same epochs"
            )
        return opening

    def _iterators(
        self, spec: StreamSpec, start: Cursor, pool: PoolStart
    ) -> PoolIterators:
        """Start the pool on rank 0, and return the ranks' iterators on all ranks."""
        if self._rank == 0:
            shared = self._start(spec, start, pool)
            if self._world_size > 1:
                message = ray.cloudpickle.dumps(tuple(shared))
                pool.supervisor.share.remote(message)
        else:
            while not (message := ray.get(pool.supervisor.shared.remote())):
                pool.check()
                time.sleep(_LOOK_S)
            shared = PoolIterators(*ray.cloudpickle.loads(message))
        # Once it is known, it stays: a stream that starts again gets the CPUs that it had.
        self._max_actors = shared.max_actors
        if self._in_train and is_ray_worker():
            self._join(pool.supervisor)
        return shared

    def _start(self, spec: StreamSpec, start: Cursor, pool: PoolStart) -> PoolIterators:
        """Start the stream's actors, on rank 0."""
        from raypipe.streaming.pipeline import splits  # this imports ray.data

        settings = spec.pool
        # a loader outside of Ray Train may be the first here to need Ray
        pool.connect()
        pool.check()
        pool.on_end.append(ask_for_room(settings))
        max_actors = self._max_actors
        # a driver may also call its train function
        if self._in_train and max_actors is None and is_ray_worker():
            resources = ray.get_runtime_context().get_assigned_resources()
            cpus = resources.get("CPU", 0.0)
            check_own(cluster_resources().cpus, self._world_size, cpus, settings)
        if self._world_size == 1:
            make_room(settings.least_actors * settings.cpus_per_actor)
        if max_actors is None:
            max_actors = preflight(settings).max_actors
        pool.check()
        if pool.supervisor is None:
            pool.supervisor = start_supervisor(spec.run, spec.log_format)
        ranks_folder = pool.reserve()
        iterators = splits(
            spec,
            start,
            max_actors=max_actors,
            world_size=self._world_size,
            supervisor=pool.supervisor,
            apart=self._apart,
            head_start=pool.has_head_start,
            ranks_folder=ranks_folder,
        )
        return PoolIterators(iterators, max_actors)

    def _broadcast(self, opening: _Opening, start_name: str) -> _Opening:
        """Return rank 0's message on all ranks, which call this.

        The first start may take any time; another one waits for ranks that do not ask for the same no longer than
        pool.stall_timeout_s.
        """
        from ray.train.collective import broadcast_from_rank_zero

        quiet_broadcasts()  # it warns of more than 1,000 bytes
        if not self._has_started:
            return broadcast_from_rank_zero(opening)
        timeout_s = self._spec.pool.stall_timeout_s
        waiting = ThreadPoolExecutor(1, "raypipe-handover").submit(
            broadcast_from_rank_zero, opening
        )
        try:
            return waiting.result(timeout_s)
        except TimeoutError:
            raise RaypipeError(
                f"rank {self._rank} starts the stream again at {start_name}, and other ranks have not for "
                f"{timeout_s:g} s (pool.stall_timeout_s): all ranks iterate the same passes, "
                "also a validation that is made again"
            ) from None

    def _join(self, supervisor: Any) -> None:
        """Tell the Supervisor of this trainer's process, and of Ray Train's controller."""
        trainer = f"trainer {self._rank}"
        supervisor.process_joined.remote(trainer, this_process(trainer))
        controller = own_controller() if self._rank == 0 else None
        process = process_of(controller) if controller else None
        if process:
            supervisor.process_joined.remote("controller", process)


def _run_name() -> str:
    """The name of Ray Train's run; empty where it has none, in a train function that its driver itself calls."""
    with contextlib.suppress(Exception):
        return ray.train.get_context().get_experiment_name()
    return ""


def _leaves(supervisor: Any, rank: int, world_size: int, move: Move) -> bool:
    """Tell the other ranks of a move of this one; returns whether it leaves the execution, since all do.

    It waits for them no longer than `_AGREE_S`, and then reads on, as one that computes for so long does later.
    """
    supervisor.rank_moves.remote(rank, world_size, move)
    deadline = time.monotonic() + _AGREE_S
    answer = "wait"
    while move.leaves and answer == "wait":
        time.sleep(0.05)
        answer = ray.get(supervisor.answer.remote(rank, time.monotonic() > deadline))
    return answer == "leave"
