"""Makes a running stream's pool follow what its ranks need, and the cluster the pool.

    the ranks wait, and the actors are busy        the pool grows by a factor
    the ranks do not wait, and actors are idle     it shrinks to those that are busy, with some to spare

A pool that has filled the buffer while the trainers are busy is not waited for, so it never grows, whatever CPU it
uses; one that is waited for although its actors are idle (a slow reader, a straggler) would not be helped by more.

Ray Data grows a pool, and the cluster, as long as they are busy: a pool that only fills the buffer is, and a
cluster that is busy with it gets more nodes of every type (ray#45331). Here PoolSizer decides instead. Actors that
the cluster has no room for are pending; Ray's autoscaler adds nodes for them, and takes a node away that has had
none for its idle time-out.

Ray Data has no way to say so, but by what its executor calls to make its autoscalers: these are replaced, for
executions that have our settings, in every process that reads them: what they name imports this module.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.data._internal.actor_autoscaler import ActorPoolScalingRequest
from ray.data._internal.actor_autoscaler.default_actor_autoscaler import DefaultActorAutoscaler
from ray.data._internal.cluster_autoscaler.rate_based_cluster_autoscaler import RateBasedClusterAutoscaler
from ray.data._internal.cluster_autoscaler.resource_utilization_gauge import RollingLogicalUtilizationGauge
from ray.data._internal.execution import streaming_executor

from raypipe.config import PoolConfig

if TYPE_CHECKING:
    from ray.data import DataContext

POOL_KEY, SUPERVISOR_KEY = "raypipe.pool", "raypipe.supervisor"
"""Settings of Ray Data's context that hold the PoolConfig of an execution, and the handle of its Supervisor."""

_PERIOD_S = 0.1
_RESERVE_S = 10.0

# Share of the actors that must be at work for more of them to help.
_BUSY = 0.8
# The pool grows to so many times its size at once.
_GROW_FACTOR = 2
# Share of the time for which ranks may wait, and still be said not to.
_CALM = 0.05
# Actors that are left beside the busy ones when the pool shrinks. Busy ones are λ·t by Little's law; how many are
# busy at once varies about that.
_SPARE = 1.25


@dataclass(frozen=True)
class Decision:
    """A new size, and why."""

    size: int
    reason: str


class PoolSizer:
    """Decides on a pool's size within its bounds and at its pace; knows no clock but the seconds it is told."""

    def __init__(self, rules: PoolConfig, now: float) -> None:
        self._rules, self._at = rules, now
        # Sums over two windows of time: seconds, and those times waiting, active and running.
        self._growth, self._calm = np.zeros(4), np.zeros(4)

    def observe(self, now: float, *, waiting: float, active: int, running: int, pending: int) -> Decision | None:
        """What is seen at a moment, and held since the last one; returns a new size where there should be one.

        Args:
            waiting: share of the ranks for which no finished micro-batch is there, in [0, 1].
            active, running, pending: actors at work, started, and not yet, for want of a node or of time.
        """
        seen = (now - self._at) * np.array([1, waiting, active, running])
        self._at, self._growth, self._calm = now, self._growth + seen, self._calm + seen
        rules, size = self._rules, running + pending
        if self._growth[0] >= rules.grow_after_s:
            seconds, waited, worked, ran = self._growth.tolist()
            self._growth = np.zeros(4)
            if waited > rules.grow_wait * seconds:
                self._calm = np.zeros(4)
                if not pending and worked > _BUSY * ran and size < rules.max_actors:
                    return Decision(
                        min(rules.max_actors, _GROW_FACTOR * size),
                        f"the ranks waited for {waited / seconds:.0%} of the last {seconds:.0f} s, and "
                        f"{worked / ran:.0%} of the actors were busy",
                    )
        if self._calm[0] >= rules.shrink_after_s:
            seconds, waited, worked, _ = self._calm.tolist()
            self._calm = np.zeros(4)
            enough = max(rules.min_actors, math.ceil(worked / seconds * _SPARE))
            if enough < size and waited <= _CALM * seconds:
                return Decision(
                    enough,
                    f"the ranks waited for {waited / seconds:.0%} of the last {seconds:.0f} s, in which "
                    f"{worked / seconds:.1f} actors were busy",
                )
        return None


class PoolAutoscaler(DefaultActorAutoscaler):
    """Sizes the actor pool; called at each turn of Ray Data's scheduler."""

    def __init__(self, topology: Any, resource_manager: Any, *, config: Any, rules: PoolConfig, supervisor: Any):
        self._rules, self._supervisor = rules, supervisor
        self._sizer: PoolSizer | None = None  # until the first micro-batch is there
        self._looked_at = time.monotonic()
        self._target: int | None = None
        super().__init__(topology, resource_manager, config=config)
        *_, (self._last_op, self._last) = topology.items()

    def _validate_actor_pool_autoscaling_config(self, actor_pool: Any, op: Any) -> None:
        """Nothing: utilisation, which it is about, decides nothing here."""

    def _derive_target_scaling_config(self, actor_pool: Any, op: Any, op_state: Any) -> ActorPoolScalingRequest:
        finished = op.has_completed() or (op._inputs_complete and not op_state.total_enqueued_input_blocks())
        if finished or actor_pool.current_size() < actor_pool.min_size():
            return super()._derive_target_scaling_config(actor_pool, op, op_state)
        now = time.monotonic()
        if now - self._looked_at < _PERIOD_S:
            return ActorPoolScalingRequest.no_op()
        self._looked_at = now
        if not op.metrics.num_task_outputs_generated:  # the first actors are only starting
            return ActorPoolScalingRequest.no_op()
        if self._sizer is None:
            self._sizer = PoolSizer(self._rules, now)
        running, pending = actor_pool.num_running_actors(), actor_pool.num_pending_actors()
        decision = self._sizer.observe(
            now, waiting=self._waiting(), active=actor_pool.num_active_actors(), running=running, pending=pending
        )
        size = running + pending
        if decision is not None:
            self._target = decision.size
            self._supervisor.scaled.remote(f"{size} → {decision.size} transform actors: {decision.reason}")
            if decision.size > size:
                return ActorPoolScalingRequest.upscale(delta=decision.size - size, reason=decision.reason)
        if self._target is not None and self._target < size:
            self._shrink(actor_pool, size - self._target)
        return ActorPoolScalingRequest.no_op()

    def _shrink(self, pool: Any, surplus: int) -> None:
        """Let pending actors go, and then idle ones, those first that are alone on their node: it can then go too.

        Actors that have work in hand are let go at a later turn.
        """
        while surplus and pool._try_remove_pending_actor():
            surplus -= 1
        states = pool._running_actors.items()
        on_node = Counter(state.actor_location for _, state in states)
        idle = [
            (on_node[state.actor_location], state.actor_location, actor)
            for actor, state in states
            if not (state.num_tasks_in_flight or state.is_restarting)
        ]
        for _, _, actor in sorted(idle, key=lambda found: found[:2])[:surplus]:
            pool._release_running_actor(actor)

    def _waiting(self) -> float:
        """Share of the ranks for which no finished micro-batch is there."""
        queue, ranks = self._last.output_queue, self._last_op.num_output_splits()
        if ranks == 1:
            return float(not queue.has_next())
        return sum(not queue.has_next(rank) for rank in range(ranks)) / ranks


class ReservingAutoscaler(RateBasedClusterAutoscaler):
    """Asks for no nodes; keeps this execution's claim to its share of those that are there."""

    def try_trigger_scaling(self) -> None:
        now = time.monotonic()
        if now - self._last_request_time >= _RESERVE_S:
            self._send_resource_request([])


_rays_actor_autoscaler = streaming_executor.create_actor_autoscaler
_rays_cluster_autoscaler = streaming_executor.create_cluster_autoscaler


def _create_actor_autoscaler(topology: Any, resource_manager: Any, config: Any) -> Any:
    context = next(iter(topology)).data_context
    rules = context.get_config(POOL_KEY)
    if rules is None:
        return _rays_actor_autoscaler(topology, resource_manager, config)
    supervisor = context.get_config(SUPERVISOR_KEY)
    return PoolAutoscaler(topology, resource_manager, config=config, rules=rules, supervisor=supervisor)


def _create_cluster_autoscaler(
    topology: Any, resource_manager: Any, data_context: DataContext, *, execution_id: str
) -> Any:
    if data_context.get_config(POOL_KEY) is None:
        return _rays_cluster_autoscaler(topology, resource_manager, data_context, execution_id=execution_id)
    return ReservingAutoscaler(
        list(topology),
        execution_id=execution_id,
        max_cluster_limits=data_context.execution_options.resource_limits,
        utility_calculator=RollingLogicalUtilizationGauge(resource_manager),
        label_selector=data_context.execution_options.label_selector,
    )


streaming_executor.create_actor_autoscaler = _create_actor_autoscaler
streaming_executor.create_cluster_autoscaler = _create_cluster_autoscaler
