"""Control of a running stream's pool: its size, the blocks of lost actors, and the end of a stalled stream.

    ranks wait, and actors are busy        the pool grows by a factor
    ranks do not wait, and actors idle     the pool shrinks to the busy actors and some spare ones

If trainers are the bottleneck, the buffer is full, no rank waits, and the pool does not grow, however busy it is.
If ranks wait for idle actors (a slow reader, a straggler), more actors would not help.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.data._internal.actor_autoscaler import ActorPoolScalingRequest

from raypipe.config import PoolConfig
from raypipe.errors import NoRoomError, RaypipeError, ResourceError
from raypipe.rayext.cluster_state import draining, nodes, resource_state
from raypipe.rayext.lost_blocks import LostBlocks
from raypipe.rayext.placement import cpus_name, is_labelled, placement
from raypipe.rayext.silent_nodes import SilentNodes
from raypipe.rayext.startup import another_starts

_WATCH_PERIOD_S = 1.0
# Nodes are asked for an answer once ranks wait, and none has taken a block for so long.
_STILL_S = 1.0

# Share of busy actors above which more actors help.
_BUSY = 0.8
# Factor by which the pool grows at once.
_GROW_FACTOR = 2
# Time without waiting before the pool shrinks, relative to `grow_after_s`: an actor that was given back too early
# costs a start of some seconds, and the wait for it.
_SHRINK_AFTER = 12
# Largest share of time in which ranks wait that still counts as no wait.
_CALM = 0.05
# Actors after the pool shrinks, relative to the mean number of busy ones. The mean is λ·t by Little's law, and the
# number varies around it.
_SPARE = 1.25

# A restart takes a few seconds for the process. An actor that has not started after this time has no CPUs.
_PATIENCE_S = 5.0
_START_S = 15.0  # time for the first block
# Actors are queued for a moment even if there is room.
_QUEUE_S = 2.0
# Share of time in which ranks wait, above which the pool grows.
_WAITED = 0.5


@dataclass(frozen=True)
class Decision:
    """A new size, and the reason."""

    size: int
    reason: str


class PoolSizer:
    """Decides on a pool's size within its bounds and pace; callers pass the time."""

    def __init__(self, rules: PoolConfig, now: float) -> None:
        self._rules = rules
        self._observed_at = now
        # Sums over two windows of time: seconds, and seconds x waiting, active and running. Time in which no rank
        # takes a block does not show what ranks need: it joins the calm window at the next block, up to a limit.
        self._growth = np.zeros(4)
        self._calm = np.zeros(4)
        self._unmoved = np.zeros(4)

    def observe(
        self,
        now: float,
        *,
        waiting: float,
        active: int,
        running: int,
        pending: int,
        moved: bool = True,
    ) -> Decision | None:
        """Record an observation, which counts for the time since the last one; return a new size, or None.

        Args:
            waiting: share of the ranks without a finished micro-batch, in [0, 1].
            active, running, pending: actors that work, that have started, and that have not started yet.
            moved: whether a rank has taken a block since the last observation.
        """
        sums = (now - self._observed_at) * np.array([1, waiting, active, running])
        self._observed_at = now
        self._growth += sums
        self._unmoved += sums
        if moved:
            limit_s = self._rules.grow_after_s
            self._calm += self._unmoved * min(
                1.0, limit_s / max(self._unmoved[0], 1e-9)
            )
            self._unmoved = np.zeros(4)
        larger = self._larger_size(running, pending)
        return larger or self._smaller_size(running + pending)

    def _larger_size(self, running: int, pending: int) -> Decision | None:
        """Return a larger size if ranks have waited for busy actors in the window of growth, once it is over."""
        if self._growth[0] < self._rules.grow_after_s:
            return None
        seconds, waited, worked, ran = self._growth.tolist()
        self._growth = np.zeros(4)
        if waited <= _WAITED * seconds:
            return None
        self._calm = np.zeros(4)
        size = running + pending
        if pending or worked <= _BUSY * ran or size >= self._rules.max_actors:
            return None
        return Decision(
            min(self._rules.max_actors, _GROW_FACTOR * size),
            f"the ranks waited for {waited / seconds:.0%} of the last {seconds:.0f} s, and "
            f"{worked / ran:.0%} of the actors were busy",
        )

    def _smaller_size(self, size: int) -> Decision | None:
        """Return a smaller size if fewer actors were enough in the calm window, once it is over."""
        if self._calm[0] < _SHRINK_AFTER * self._rules.grow_after_s:
            return None
        seconds, waited, worked, _ = self._calm.tolist()
        self._calm = np.zeros(4)
        enough = max(self._rules.min_actors, math.ceil(worked / seconds * _SPARE))
        if enough >= size or waited > _CALM * seconds:
            return None
        return Decision(
            enough,
            f"the ranks waited for {waited / seconds:.0%} of the last {seconds:.0f} s, in which "
            f"{worked / seconds:.1f} actors were busy",
        )


class PoolKeeper:
    """Sizes the pool of an execution, has lost blocks made again, reports a pool without actors, ends a stall.

    Ray restarts an actor if the cluster has CPUs for it. If the cluster has shrunk, it has none. So the actor's
    blocks are given to others, see `lost_blocks`.

    Args:
        op: Ray Data's operator of the pool.
        lost: the execution's blocks.
        rules: the pool's bounds and pace.
        supervisor: handle of the Supervisor, which gets the reports.
        now: seconds of a monotonic clock.
        actors: number of actors that the pool has from its first block on; 0 = as many as it has then.
        run: name of the run. Its pool does not grow while another one starts.

    Attributes:
        taken_at: when a rank has last taken a block; before the first one, when that is due.
    """

    def __init__(
        self,
        op: Any,
        lost: LostBlocks,
        rules: PoolConfig,
        supervisor: Any,
        now: float,
        actors: int = 0,
        run: str = "",
    ) -> None:
        self._run = run
        self._op = op
        self._lost = lost
        self._actors = actors
        self._rules = rules
        self._supervisor = supervisor
        (self._pool,) = op.get_autoscaling_actor_pools()
        self._cpus: float = self._pool.per_actor_resource_usage().cpu or 0.0
        self._sizer: PoolSizer | None = None  # made at the first block
        self._target: int | None = None
        # Times of the last watch, of the last finished block, and when an actor last ran or none waited for CPUs.
        self._watched_at = self._moved_at = self._queued_at = now
        self._finished = 0
        self._has_reported = self._lacks_room = False
        self._taken = 0  # blocks that ranks have taken
        self.taken_at = now + _START_S
        self._silent = SilentNodes()
        # actor that died with blocks → time of its death
        self._dead_since: dict[Any, float] = {}
        self._leaving = set[Any]()  # replaced actors on nodes that are about to go
        self._given = 0.0  # CPUs left to other streams
        self._most: int | None = None  # limit of actors meanwhile; None = none
        # CPUs to take and to release, as the Supervisor was told
        self._awaited: tuple[float, float] | None = None

    def give_way(self, cpus: float) -> None:
        """Leave so many CPUs in all, of those that the pool has, to other streams of the job; keep its least."""
        more = cpus - self._given
        self._given = cpus
        if not cpus or not self._cpus:
            self._most = None
        elif more > 0:
            size = self._pool.current_size()
            if not self._sizer:
                size = max(size, self._actors)
            now = size if self._most is None else min(self._most, size)
            self._most = max(
                self._rules.min_actors, now - math.ceil(more / self._cpus - 1e-9)
            )
        elif more < 0 and self._most is not None:
            self._most += int(-more / self._cpus + 1e-9)

    def keep(
        self,
        now: float,
        *,
        finished: int,
        waiting: int,
        ranks_waiting: float,
    ) -> None:
        """Check the pool; called at each turn of Ray Data's scheduler, about ten times a second.

        Args:
            finished: number of blocks that the pool has finished.
            waiting: number of them that no rank has taken yet.
            ranks_waiting: share of the ranks that wait: without a finished block, or, as they say, for its data.

        Raises:
            RaypipeError: the stream has stalled.
        """
        has_moved = finished - waiting != self._taken
        self._size(now, finished, ranks_waiting, moved=has_moved)
        self._taken = finished - waiting
        if has_moved:
            self.taken_at = now
        self._tell_awaited()
        if now - self._watched_at >= _WATCH_PERIOD_S:
            self._watched_at = now
            self._leave(draining())
            self._make_again(now, ranks_waiting)
            self._report_no_actors(now)
            self._end_stall(now, finished, waiting, ranks_waiting)

    def release_all(self) -> None:
        """Release the actors once all blocks are made, for other streams; Ray starts one if a block is lost."""
        if self._pool.current_size():
            self._pool.shutdown()
            self._tell_awaited()

    def _size(
        self, now: float, finished: int, ranks_waiting: float, moved: bool = True
    ) -> None:
        pool = self._pool
        if (missing := pool.min_size() - pool.current_size()) > 0:
            self._grow(missing, "the pool is below its minimum")
        if self._most is not None and (surplus := pool.current_size() - self._most) > 0:
            self._target = min(self._target or self._most, self._most)
            self._shrink(surplus)
        if not finished:  # the first actors are still starting
            return
        if self._sizer is None:
            self._sizer = PoolSizer(self._rules, now)
            self._start_others()
        running = pool.num_running_actors() - len(self._leaving)
        pending = pool.num_pending_actors()
        decision = self._sizer.observe(
            now,
            waiting=ranks_waiting,
            active=min(running, pool.num_active_actors()),
            running=running,
            pending=pending,
            moved=moved,
        )
        size = running + pending
        if decision is not None:
            self._resize(size, decision)
        if self._target is not None and self._target < size:
            self._shrink(size - self._target)

    def _resize(self, size: int, decision: Decision) -> None:
        """Follow a decision, up to the limit; the pool shrinks at later turns."""
        wanted = decision.size
        if self._most is not None and wanted > self._most:
            wanted = self._most
            if size >= wanted:
                return
        if wanted > size:
            # New actors would take the CPUs of these, or those that a check has promised.
            if self._pool.num_restarting_actors() or another_starts(self._run):
                return
            self._grow(wanted - size, decision.reason)
        self._target = wanted
        self._supervisor.pool_scaled.remote(
            f"{size} → {wanted} transform actors: {decision.reason}"
        )

    def _planned_size(self) -> int:
        """Return how many actors the pool has once those have started that wait for the first block."""
        return self._actors if self._most is None else min(self._actors, self._most)

    def _tell_awaited(self) -> None:
        """Tell the Supervisor how many CPUs the pool will still take, for streams that count free ones."""
        size = self._pool.current_size()
        if self._sizer is None:
            size = max(size, self._planned_size())
        running = self._pool.num_running_actors() - self._pool.num_restarting_actors()
        surplus = size - self._most if self._most is not None else 0
        awaited = max(0, size - running) * self._cpus, max(0, surplus) * self._cpus
        if awaited != self._awaited:
            self._awaited = awaited
            self._supervisor.pool_awaits.remote(*awaited)

    def _start_others(self) -> None:
        """Start the actors that waited for the first block."""
        missing = self._planned_size() - self._pool.current_size()
        if missing > 0 and not another_starts(self._run):
            self._grow(missing, "the first block is finished")

    def _grow(self, num: int, reason: str) -> None:
        options = self._op._ray_remote_args
        if "label_selector" in options:
            options.update(placement())  # nodes may have changed
        self._pool.scale(ActorPoolScalingRequest.upscale(delta=num, reason=reason))

    def _shrink(self, surplus: int) -> None:
        """Release actors that do not run, then idle ones, but never the last running actor.

        Dead actors are released first, whose restart would be useless; then those on nodes without the label,
        which are for other work; next, actors that are the only ones on their node, so that the node can go too.
        Actors with blocks are released at a later turn.
        """
        while surplus and self._pool._try_remove_pending_actor():
            surplus -= 1
        states = dict(self._pool._running_actors)
        on_node = Counter(state.actor_location for state in states.values())
        labelled = {node["NodeID"] for node in nodes() if is_labelled(node)}
        num_running = sum(not state.is_restarting for state in states.values())

        def order(actor: Any) -> tuple[bool, bool, int, str]:
            state = states[actor]
            node = state.actor_location
            return not state.is_restarting, node in labelled, on_node[node], node

        idle = [
            actor
            for actor, state in states.items()
            if not state.num_tasks_in_flight and actor not in self._leaving
        ]
        for actor in sorted(idle, key=order)[:surplus]:
            if not states[actor].is_restarting:
                num_running -= 1
                if not num_running:
                    return
            self._pool._release_running_actor(actor)

    def _make_again(self, now: float, ranks_waiting: float) -> None:
        """Give the blocks of actors that are lost with their node, or find no CPUs to restart, to others."""
        there = nodes()
        hosts = {s.actor_location for s in self._pool._running_actors.values()}
        silent = self._silent.found()
        is_still = ranks_waiting and now - self.taken_at >= _STILL_S
        self._silent.ask(
            node
            for node in there
            if node["NodeID"] in silent or (is_still and node["NodeID"] in hosts)
        )
        alive = {node["NodeID"] for node in there}
        if hosts & alive - silent:
            alive -= silent
        if num := self._lost.make_again(alive, self._stuck(now)):
            self._supervisor.note.remote(
                f"{num} blocks are lost with their actors' node, or wait for its answer: others make them again",
                "blocks_lost",
            )

    def _stuck(self, now: float) -> set[Any]:
        """Return the dead actors with blocks that have had the time to restart, and have not found CPUs."""
        dead = [
            actor
            for actor, state in self._pool._running_actors.items()
            if state.is_restarting and state.num_tasks_in_flight
        ]
        self._dead_since = {actor: self._dead_since.get(actor, now) for actor in dead}
        late = {
            actor
            for actor, since in self._dead_since.items()
            if now - since > _PATIENCE_S
        }
        return late if late and self._cpus in _pending_cpus() else set()

    def _leave(self, going: dict[str, int]) -> None:
        """Replace actors on nodes that are about to go, which get no more blocks from Ray Data.

        Replaced actors are released when they are idle and others run. If no other actor runs, they stay and work.

        Args:
            going: node id → end, see `cluster_state.draining`.
        """
        running = {
            actor: state
            for actor, state in self._pool._running_actors.items()
            if not state.is_restarting
        }
        on_nodes = {a for a, state in running.items() if state.actor_location in going}
        for node, end_ms in going.items():
            unknown = on_nodes - self._leaving
            if new := [a for a in unknown if running[a].actor_location == node]:
                self._grow(len(new), "their node is about to go")
                left = f" in {end_ms / 1000 - time.time():.0f} s" if end_ms else ""
                self._supervisor.note.remote(
                    f"node {node[:8]} is about to go{left}: its {len(new)} transform actors get no more blocks, "
                    "and the pool starts as many on other nodes",
                    "node_drained",
                )
        self._leaving = on_nodes
        if running.keys() - on_nodes:
            for actor in [a for a in on_nodes if not running[a].num_tasks_in_flight]:
                self._leaving.remove(actor)
                self._pool._release_running_actor(actor)

    def _report_no_actors(self, now: float) -> None:
        info = self._op.get_actor_info()
        waiting = info.pending + info.restarting
        if info.running or not waiting or self._cpus not in _pending_cpus():
            # they run, or are starting
            self._queued_at = now
        lacks_room = now - self._queued_at > _QUEUE_S
        if lacks_room != self._lacks_room:
            self._lacks_room = lacks_room
            self._supervisor.pool_lacks_room.remote(lacks_room)
        if info.running:
            self._has_reported = False
        elif lacks_room and not self._has_reported:
            self._has_reported = True
            left = max(0.0, self._rules.stall_timeout_s - (now - self._moved_at))
            text = (
                f"no transform actor runs: {waiting} wait for {self._cpus:g} CPUs each; the run ends in "
                f"{left:.0f} s (pool.stall_timeout_s). Add CPU nodes, or stop other jobs (`ray job list`)"
            )
            if self._finished:
                self._supervisor.note.remote(text, "no_room")
            else:  # a start, for which nodes may have to come, is not a fault
                self._supervisor.pool_waits.remote(text)

    def _end_stall(
        self, now: float, finished: int, waiting: int, ranks_waiting: float
    ) -> None:
        timeout_s = self._rules.stall_timeout_s
        if finished != self._finished or not ranks_waiting:
            # trainers may pause for as long as they like
            self._finished = finished
            self._moved_at = now
        elif now - self._moved_at > timeout_s:
            stalled = f"the stream has stalled: no micro-batch was finished for {timeout_s:g} s"
            if waiting and not self._op.num_active_tasks() and ranks_waiting < 1:
                raise RaypipeError(
                    f"{stalled} (pool.stall_timeout_s), while {waiting} finished blocks wait for other ranks than "
                    "the one that waits: each rank must take all of its batches, and report when the others do"
                )
            info = self._op.get_actor_info()
            # Actors that wait for nodes, as for spot capacity, may start later.
            raise (NoRoomError if info.pending and not info.running else ResourceError)(
                f"{stalled} (pool.stall_timeout_s). Transform actors: {info.running} run, {info.restarting} died "
                f"and have not restarted, {info.pending} have not started; the cluster has {_free_cpus():g} free "
                "CPUs. Add CPU nodes, lower pool.min_actors or pool.cpus_per_actor, or inspect the actors with "
                "`ray stack`"
            )


def _free_cpus() -> float:
    return ray.available_resources().get(cpus_name(), 0.0)


def _pending_cpus() -> set[float]:
    """Return the CPUs per actor of all requests that no node has room for."""
    requests = resource_state().pending_resource_requests
    return {pending.request.resources_bundle.get("CPU", 0.0) for pending in requests}
