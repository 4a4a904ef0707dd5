"""Bounds what is in flight, counted in micro-batches.

Ray Data bounds bytes by shares of the object store. That lets a reader of tiny rows run ahead without
end, and lets a pool fill the store although the trainer is the bottleneck. This policy counts instead:
what is in flight is what the configuration says, at every stage, whatever the size of the object store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
    ResourceBudgetBackpressurePolicy,
)
from ray.data._internal.execution.backpressure_policy.backpressure_policy import BackpressurePolicy
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator
from ray.data._internal.execution.operators.base_physical_operator import InternalQueueOperatorMixin

if TYPE_CHECKING:
    from ray.data import DataContext

_LIMIT_KEY = "raypipe.in_flight"


def install(context: DataContext, in_flight: int) -> None:
    """Make executions under this context hold at most `in_flight` micro-batches beyond the reader."""
    context.set_config(_LIMIT_KEY, in_flight)
    context.set_config(
        ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, [ResourceBudgetBackpressurePolicy, InFlightPolicy]
    )


class InFlightPolicy(BackpressurePolicy):
    """Stops the pool from taking, and the reader from yielding, while enough is in flight."""

    @property
    def name(self) -> str:
        return "InFlight"

    def __init__(self, data_context: Any, topology: Any, resource_manager: Any) -> None:
        super().__init__(data_context, topology, resource_manager)
        self._limit = data_context.get_config(_LIMIT_KEY)

    def can_add_input(self, op: Any) -> bool:
        if not isinstance(op, ActorPoolMapOperator):
            return True
        return op.num_active_tasks() + self._waiting_after(op) < self._limit

    def max_task_output_bytes_to_read(self, op: Any) -> int | None:
        """One more row for each call while the rows that wait for the pool are below the limit."""
        if op.input_dependencies and not isinstance(op, ActorPoolMapOperator) and op.output_dependencies:
            pool = op.output_dependencies[0]
            if isinstance(pool, ActorPoolMapOperator):
                return 1 if self._waiting_after(op, until=pool) < self._limit else 0
        return None

    def _waiting_after(self, op: Any, until: Any = None) -> int:
        """Micro-batches that `op` has finished and that have not left the execution (or entered `until`)."""
        waiting = self._topology[op].output_queue.num_blocks
        if isinstance(op, InternalQueueOperatorMixin):
            waiting += op.internal_output_queue_num_blocks()
        for following in op.output_dependencies:
            if isinstance(following, InternalQueueOperatorMixin):
                waiting += following.internal_input_queue_num_blocks()
            if following is not until:
                waiting += self._waiting_after(following)
        return waiting
