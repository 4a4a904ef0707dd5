"""Streams of all ranks, made by Ray: rank 0 starts one, splits it, and hands each rank its iterator.

At every (re)start of the worker group, and where the ranks go to another place, they start one from there.
"""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from raypipe.errors import ConfigError, RaypipeError
from raypipe.plan.places import Cursor
from raypipe.plan.schedule import Segment
from raypipe.rayext.allocation import check_own, cluster_resources, preflight
from raypipe.rayext.cluster import connect
from raypipe.rayext.controller import own_controller, process_of
from raypipe.rayext.iteration import begun, stop_execution
from raypipe.rayext.processes import is_ray_worker, this_process
from raypipe.rayext.tweaks import quiet_broadcasts
from raypipe.streaming.lifetime import HostStream
from raypipe.streaming.moves import Move
from raypipe.streaming.pipeline import splits
from raypipe.streaming.room import ask_for_room, make_room
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import end_actors, start_supervisor

if TYPE_CHECKING:
    from ray.data import DataIterator

# Images that an actor makes while a stream starts: 5 s pass until its first batch, at 1 ms for a photo.
_START_IMAGES = 5_000
# A rank that would skip a long part waits so long for the others to say that they do, too.
_AGREE_S = 60.0


class _Shared(NamedTuple):
    """Rank 0's message: plan and place of the stream that it has started, and the parts that all ranks use."""

    fingerprint: str
    start_name: str
    iterators: list[DataIterator]
    supervisor: Any
    max_actors: int


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

    def open(self, start: Cursor, only: Segment | None = None) -> HostStream:
        """Start the stream, on all ranks.

        Args:
            start: its first place.
            only: the one segment that it brings; None = all from there on.
        """
        rank = self._rank
        give_back = None
        if rank == 0:
            give_back = ask_for_room(self._spec.pool)
        shared = self._share(start, only)
        self._max_actors = shared.max_actors
        self._has_started = True
        supervisor = shared.supervisor

        def end() -> None:
            end_actors(supervisor, shared.iterators, rank)
            if give_back:
                give_back()

        moves = None
        if self._world_size > 1:
            moves = functools.partial(_leaves, supervisor, rank, self._world_size)
        return HostStream(
            host_batches(begun(shared.iterators[rank])),
            supervisor,
            actors=shared.max_actors,
            readers=int("train" in self._spec.readers()),
            stop=functools.partial(stop_execution, supervisor),
            end=end,
            start_images=_START_IMAGES * shared.max_actors,
            moves=moves,
        )

    def _share(self, start: Cursor, only: Segment | None) -> _Shared:
        """Start the stream on rank 0, and return it on all ranks.

        Raises:
            ConfigError, RaypipeError: the ranks want different streams, or not at the same time.
        """
        start_name = f"epoch {start.epoch}, step {start.step}"
        if only:
            start_name = (
                f"step {only.first_step} of the validation of epoch {only.epoch}"
            )
        shared = None
        if self._rank == 0:
            shared = self._start(start, only, start_name)
        if self._in_train and self._world_size > 1:
            shared = self._broadcast(shared, start_name)
        assert shared is not None
        fingerprint = self._spec.plan.fingerprint
        if shared.fingerprint != fingerprint:
            raise ConfigError(
                f"rank {self._rank} has plan {fingerprint}, and rank 0 has {shared.fingerprint}: give all ranks "
                "the same stores and settings, whole; raypipe hands each rank its share"
            )
        if shared.start_name != start_name:
            raise RaypipeError(
                f"rank {self._rank} starts the stream at {start_name}, and rank 0 at {shared.start_name}: "
                "all ranks iterate the same passes of the same epochs"
            )
        if self._in_train and is_ray_worker():
            self._join(shared.supervisor)
        return shared

    def _start(self, start: Cursor, only: Segment | None, start_name: str) -> _Shared:
        """Start the stream's actors, on rank 0."""
        spec = self._spec
        if only:
            spec = replace(spec, plan=spec.plan.only(only))
        pool = spec.pool
        connect()  # a loader outside of Ray Train may be the first here to need Ray
        max_actors = self._max_actors
        # a driver may also call its train function
        if self._in_train and max_actors is None and is_ray_worker():
            resources = ray.get_runtime_context().get_assigned_resources()
            cpus = resources.get("CPU", 0.0)
            check_own(cluster_resources().cpus, self._world_size, cpus, pool)
        if self._world_size == 1:
            make_room(pool.least_actors * pool.cpus_per_actor)
        if max_actors is None:
            max_actors = preflight(pool).max_actors
        supervisor = start_supervisor(spec.run, spec.log_format)
        iterators = splits(
            spec,
            start,
            max_actors=max_actors,
            world_size=self._world_size,
            supervisor=supervisor,
            apart=self._apart,
        )
        return _Shared(
            spec.plan.fingerprint, start_name, iterators, supervisor, max_actors
        )

    def _broadcast(self, shared: _Shared | None, start_name: str) -> _Shared:
        """Return rank 0's message on all ranks, which call this.

        The first start may take any time; another one waits for ranks that do not ask for the same no longer than
        pool.stall_timeout_s.
        """
        from ray.train.collective import broadcast_from_rank_zero

        quiet_broadcasts()  # it warns of more than 1,000 bytes; these are about 6,000, once
        if not self._has_started:
            return broadcast_from_rank_zero(shared)
        timeout_s = self._spec.pool.stall_timeout_s
        waiting = ThreadPoolExecutor(1, "raypipe-handover").submit(
            broadcast_from_rank_zero, shared
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
