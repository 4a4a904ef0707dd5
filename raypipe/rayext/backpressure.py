"""Bounds what is in flight, counted in micro-batches.

Ray Data bounds bytes by shares of the object store. That lets a reader of tiny rows run ahead without
end, and lets a pool fill the store although the trainer is the bottleneck. This policy counts instead:
what is in flight is what the configuration says, at every stage, whatever the size of the object store.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
)
from ray.data._internal.execution.backpressure_policy.backpressure_policy import BackpressurePolicy
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator
from ray.data._internal.execution.operators.base_physical_operator import InternalQueueOperatorMixin
from ray.data._internal.execution.operators.task_pool_map_operator import TaskPoolMapOperator

from raypipe.rayext.pool_watch import PoolWatch

if TYPE_CHECKING:
    from ray.data import DataContext

_LIMIT_KEY = "raypipe.in_flight"

# Seconds between two looks for finished tasks. Ray Data looks every 0.1 s, whatever the pace: micro-batches of
# tiny images would wait in its queues for most of the time. From queue to consumer one needs about three looks.
_MIN_PERIOD_S, _MAX_PERIOD_S = 0.01, 0.1


@dataclass(frozen=True)
class InFlight:
    """How many micro-batches may be in flight.

    Attributes:
        fixed: whatever the size of the pool.
        per_actor: for each running actor, in addition.
    """

    fixed: int
    per_actor: int = 0

    def limit(self, actors: int) -> int:
        """For a number of running actors."""
        return self.fixed + self.per_actor * max(1, actors)


def install(context: DataContext, in_flight: InFlight, actors: int, reads: bool) -> None:
    """Make executions under this context hold at most so many micro-batches beyond the reader.

    Args:
        in_flight: how many.
        actors: that the pool begins with.
        reads: whether the reader's rows hold encoded samples, and not their places alone.
    """
    context.set_config(_LIMIT_KEY, in_flight)
    limit = in_flight.limit(actors)
    # In this order: one that says no ends the round.
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, [PoolWatch, InFlightPolicy])
    context.op_resource_reservation_enabled = False
    # A look takes from the reader only what it has buffered, and there are some 32 looks while as many
    # micro-batches pass as may be in flight.
    context._max_num_blocks_in_streaming_gen_buffer = max(2, limit // 4) if reads else limit


class InFlightPolicy(BackpressurePolicy):
    """Stops the pool from taking, and the reader from yielding, while enough is in flight."""

    def __init__(self, data_context: Any, topology: Any, resource_manager: Any) -> None:
        super().__init__(data_context, topology, resource_manager)
        self._in_flight: InFlight = data_context.get_config(_LIMIT_KEY)
        self._limit = self._in_flight.limit(1)
        self._looked_at, self._rate = (time.perf_counter(), 0), 0.0
        self._next_look = 0.0  # time.perf_counter()

    def can_add_input(self, op: Any) -> bool:
        if isinstance(op, TaskPoolMapOperator):
            # Readers take turns: rows of a later one would fill the queue before those that come first.
            return op.num_active_tasks() == 0
        if not isinstance(op, ActorPoolMapOperator):
            return True
        return op.num_active_tasks() + self._waiting_after(op) < self._limit

    def max_task_output_bytes_to_read(self, op: Any) -> int | None:
        """As many rows of the reader as there is room for before the pool, by their mean size."""
        if isinstance(op, ActorPoolMapOperator):
            self._limit = self._in_flight.limit(op._actor_pool.num_running_actors())
            self._set_period(op.metrics.num_task_outputs_generated)
            self._pause()
        if op.input_dependencies and not isinstance(op, ActorPoolMapOperator) and op.output_dependencies:
            pool = op.output_dependencies[0]
            if isinstance(pool, ActorPoolMapOperator):
                room = max(0, self._limit - self._waiting_after(op, until=pool))
                rows = op.metrics.num_task_outputs_generated
                mean_bytes = op.metrics.bytes_task_outputs_generated / rows if rows else 1
                return math.floor(room * mean_bytes)
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

    def _pause(self) -> None:
        """Let a period pass from look to look. A look waits for tasks that run, and returns at once where all have
        finished: while the trainer is the bottleneck, Ray Data's loop would keep a whole core busy.
        """
        time.sleep(max(0.0, self._next_look - time.perf_counter()))
        period = streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S if self._rate else _MIN_PERIOD_S
        self._next_look = time.perf_counter() + period

    def _set_period(self, num_finished: int) -> None:
        """Look again when 1/32 of what may be in flight has finished, at the pace of the last second or so.

        Called before each look. The period is a constant of Ray Data's module: executions in one process share it.
        CIFAR-10 on 2 cores: 1,650 images/s at 0.1 s, 2,860 with this.
        """
        since, before = self._looked_at
        seconds = (now := time.perf_counter()) - since
        if num_finished == 0 or seconds < 0.5:
            return
        rate = (num_finished - before) / seconds
        self._rate = rate if before == 0 else 0.5 * (self._rate + rate)
        self._looked_at = (now, num_finished)
        period = self._limit / 32 / self._rate if self._rate else _MAX_PERIOD_S
        streaming_executor_state.WAIT_FOR_TASK_COMPLETION_TIMEOUT_S = min(
            max(period, _MIN_PERIOD_S), _MAX_PERIOD_S
        )
