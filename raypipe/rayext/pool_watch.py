"""Watches the pool of a running stream: makes room for actors that a lost node left without one, says at once when
none runs for want of room, ends a stall.

Ray restarts an actor where its CPUs are to be had. If the cluster has shrunk there are none: the micro-batches
that the actor holds are never given to another, all that follow wait for them in order, and the stream stands
still although most actors are idle. So an idle actor is let go, and its CPUs go to one that is waited for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.data._internal.execution.backpressure_policy.backpressure_policy import BackpressurePolicy
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator

from raypipe.errors import ResourceError
from raypipe.rayext.admission import holders, waited_for

if TYPE_CHECKING:
    from ray.data import DataContext

_SUPERVISOR_KEY, _TIMEOUT_KEY = "raypipe.streaming.supervisor", "raypipe.stall_timeout_s"
_PERIOD_S = 1.0
# A restart takes a process's start, some seconds; one that has not begun after so long has no CPUs.
_PATIENCE_S = 5.0
# Actors are queued for a moment even where there is room.
_QUEUE_S = 2.0


def configure(context: DataContext, supervisor: Any, stall_timeout_s: float) -> None:
    """Settings of the watch for executions under this context."""
    context.set_config(_SUPERVISOR_KEY, supervisor)
    context.set_config(_TIMEOUT_KEY, stall_timeout_s)


class PoolWatch(BackpressurePolicy):
    """Asked by Ray Data's scheduler, at each turn, whether a stage may take more; says yes, and looks around."""

    def __init__(self, data_context: Any, topology: Any, resource_manager: Any) -> None:
        super().__init__(data_context, topology, resource_manager)
        self._supervisor = data_context.get_config(_SUPERVISOR_KEY)
        self._timeout_s = data_context.get_config(_TIMEOUT_KEY)
        now = time.monotonic()
        self._looked_at, self._whole_since = now, now
        self._progress = (0, now)
        # An actor ran, or none was queued for CPUs, and whether it was said that none runs.
        self._some_ran_at, self._queued_since, self._told = now, now, False

    def can_add_input(self, op: Any) -> bool:
        now = time.monotonic()
        if isinstance(op, ActorPoolMapOperator) and now - self._looked_at >= _PERIOD_S:
            self._looked_at = now
            self._make_room(op, now)
            self._tell_of_none(op, now)
            self._end_stall(op, now)
        return True

    def _make_room(self, op: Any, now: float) -> None:
        pool = op._actor_pool
        states = pool._running_actors.items()
        waited_for = sum(1 for _, state in states if state.is_restarting and state.num_tasks_in_flight)
        if not waited_for:
            self._whole_since = now
            return
        idle = [actor for actor, state in states if not (state.is_restarting or state.num_tasks_in_flight)]
        if not idle or now - self._whole_since < _PATIENCE_S:
            return
        if ray.available_resources().get("CPU", 0.0) < (pool.per_actor_resource_usage().cpu or 0.0):
            for actor in idle[:waited_for]:
                pool._release_running_actor(actor)
            self._supervisor.note.remote(
                f"there are no CPUs for {waited_for} transform actors that died with work in hand: "
                "idle ones make room for them",
                "no_room",
            )
            self._whole_since = now

    def _tell_of_none(self, op: Any, now: float) -> None:
        info = op.get_actor_info()
        waiting = info.pending + info.restarting
        cpus = op._actor_pool.per_actor_resource_usage().cpu or 0.0
        if info.running:
            if self._told:
                after = now - self._some_ran_at
                self._supervisor.note.remote(f"transform actors run again, after {after:.0f} s", "no_room")
            self._some_ran_at = self._queued_since = now
            self._told = False
        elif not waiting or cpus not in waited_for():  # they start
            self._queued_since = now
        elif not self._told and now - self._queued_since > _QUEUE_S:
            self._told = True
            left = self._timeout_s - (now - self._progress[1])
            self._supervisor.note.remote(
                f"no transform actor runs: {waiting} wait for {cpus:g} CPUs each; the run ends in {left:.0f} s "
                f"(pool.stall_timeout_s){_who()}. Add CPU nodes, or stop other jobs (`ray job list`)",
                "no_room",
            )

    def _end_stall(self, op: Any, now: float) -> None:
        finished = op.metrics.num_task_outputs_generated
        waiting = op.num_active_tasks() or self._topology[op].total_enqueued_input_blocks()
        if finished != self._progress[0] or not waiting:
            self._progress = (finished, now)
        elif now - self._progress[1] > self._timeout_s:
            info = op.get_actor_info()
            free = ray.available_resources().get("CPU", 0.0)
            raise ResourceError(
                f"the stream stands still: no micro-batch was finished for {self._timeout_s:g} s "
                f"(pool.stall_timeout_s). Transform actors: {info.running} run, {info.restarting} are waited for "
                f"after they died, {info.pending} have not started; the cluster has {free:g} CPUs free"
                f"{_who()}. Add CPU nodes, lower pool.min_actors or pool.cpus_per_actor, or see what the actors "
                "do (ray stack)"
            )


def _who() -> str:
    who = holders()
    return f"; {who}" if who else ""
