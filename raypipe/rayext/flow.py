"""What flows through an execution, and that it goes on flowing: three pieces that Ray Data calls.

InFlightPolicy   bounds what is in flight, counted in micro-batches
PoolWatch        makes room for lost actors, says when none runs, ends a stall
InlineMetadata   reads the metadata of finished micro-batches in the execution's own thread
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.data._internal.execution import streaming_executor_state
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
)
from ray.data._internal.execution.backpressure_policy.backpressure_policy import BackpressurePolicy
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.data._internal.execution.metadata_fetcher import InlineMetadataFetcher
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator
from ray.data._internal.execution.operators.base_physical_operator import InternalQueueOperatorMixin
from ray.data._internal.execution.operators.task_pool_map_operator import TaskPoolMapOperator
from ray.data._internal.stats import _StatsManager

from raypipe.config import PoolConfig
from raypipe.errors import ResourceError
from raypipe.rayext.autoscaler import POOL_KEY, SUPERVISOR_KEY
from raypipe.rayext.cluster import is_local

if TYPE_CHECKING:
    from ray.data import DataContext

_LIMIT_KEY = "raypipe.in_flight"

# Seconds between two looks for finished tasks. Ray Data looks every 0.1 s, whatever the pace: micro-batches of
# tiny images would wait in its queues for most of the time. From queue to consumer one needs about three looks.
_MIN_PERIOD_S, _MAX_PERIOD_S = 0.01, 0.1

_WATCH_PERIOD_S = 1.0
# A restart takes a process's start, some seconds; one that has not begun after so long has no CPUs.
_PATIENCE_S = 5.0
# Actors are queued for a moment even where there is room.
_QUEUE_S = 2.0


@dataclass(frozen=True)
class InFlight:
    """How many micro-batches may be in flight: so many, and more for each running actor."""

    fixed: int
    per_actor: int = 0

    def limit(self, actors: int) -> int:
        """For a number of running actors."""
        return self.fixed + self.per_actor * max(1, actors)


def configure(
    context: DataContext, pool: PoolConfig, in_flight: InFlight, actors: int, reads: bool, supervisor: Any
) -> None:
    """Make executions under this context flow so, and size their pools by the rules of `autoscaler`.

    Args:
        in_flight: micro-batches beyond the reader, at most.
        actors: that the pool begins with.
        reads: whether the reader's rows hold encoded samples, and not their places alone.
    """
    _quiet()
    context.set_config(_LIMIT_KEY, in_flight)
    context.set_config(POOL_KEY, pool)
    context.set_config(SUPERVISOR_KEY, supervisor)
    limit = in_flight.limit(actors)
    # In this order: one that says no ends the round.
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, [PoolWatch, InFlightPolicy])
    context.custom_execution_callback_classes = [*context.custom_execution_callback_classes, InlineMetadata]
    context.op_resource_reservation_enabled = False
    # A look takes from the reader only what it has buffered, and there are some 32 looks while as many
    # micro-batches pass as may be in flight.
    context._max_num_blocks_in_streaming_gen_buffer = max(2, limit // 4) if reads else limit


def _quiet() -> None:
    """Keep Ray Data in this process from telling what nobody reads.

    On a local cluster its actor of statistics collects them for the dashboard, and there is none. Every execution
    waits for its start, for an identifier of a dataset, and sends it all figures of all operators once a second:
    17 % of a core.
    """
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # warns that there are no bars
    logging.getLogger("ray.data._internal.execution.streaming_executor").setLevel(logging.WARNING)
    if is_local():
        manager: Any = _StatsManager
        manager.gen_dataset_id_from_stats_actor = staticmethod(lambda: uuid.uuid4().hex)
        for name in ("register_dataset_to_stats_actor", "update_execution_metrics", "update_iteration_metrics"):
            setattr(manager, name, staticmethod(lambda *_, **__: None))


class InFlightPolicy(BackpressurePolicy):
    """Stops the pool from taking, and the reader from yielding, while enough is in flight.

    Ray Data bounds bytes by shares of the object store. That lets a reader of tiny rows run ahead without end, and
    lets a pool fill the store although the trainer is the bottleneck. Here what is in flight is what the
    configuration says, at every stage, whatever the size of the object store.
    """

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


class InlineMetadata(ExecutionCallback):
    """Called with each execution that Ray Data has built, before that starts.

    Ray Data fetches metadata in a thread, for blocks whose metadata may be long in coming. Here each micro-batch
    brings its own with it, and the thread costs twice:

    - Python runs one thread at a time, and the execution's is what limits a stream of many ranks: with the other
      one it takes a third more CPU time per micro-batch.
    - With the thread, a row is charged to the reader with the size of its serialised object; without, with that of
      its data, which is what `InFlightPolicy` reckons with. For the place of a micro-batch these are 1,000 and 25
      bytes: the reader was let to yield a fortieth of what there was room for.
    """

    def before_execution_starts(self, executor: Any) -> None:
        executor._metadata_fetcher = InlineMetadataFetcher()


class PoolWatch(BackpressurePolicy):
    """Always says yes, and looks around.

    Ray restarts an actor where its CPUs are to be had. If the cluster has shrunk there are none: the micro-batches
    that the actor holds are never given to another, all that follow wait for them in order, and the stream stands
    still although most actors are idle. So an idle actor is let go, and its CPUs go to one that is waited for.
    """

    def __init__(self, data_context: Any, topology: Any, resource_manager: Any) -> None:
        super().__init__(data_context, topology, resource_manager)
        self._supervisor = data_context.get_config(SUPERVISOR_KEY)
        self._timeout_s = data_context.get_config(POOL_KEY).stall_timeout_s
        now = time.monotonic()
        self._looked_at, self._whole_since = now, now
        self._progress = (0, now)
        # When an actor ran, or none was queued for CPUs; and whether it was said that none runs.
        self._queued_since, self._told = now, False

    def can_add_input(self, op: Any) -> bool:
        now = time.monotonic()
        if isinstance(op, ActorPoolMapOperator) and now - self._looked_at >= _WATCH_PERIOD_S:
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
            self._queued_since, self._told = now, False
        elif not waiting or cpus not in _waited_for():  # they start
            self._queued_since = now
        elif not self._told and now - self._queued_since > _QUEUE_S:
            self._told = True
            left = max(0.0, self._timeout_s - (now - self._progress[1]))
            self._supervisor.note.remote(
                f"no transform actor runs: {waiting} wait for {cpus:g} CPUs each; the run ends in {left:.0f} s "
                "(pool.stall_timeout_s). Add CPU nodes, or stop other jobs (`ray job list`)",
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
                f"after they died, {info.pending} have not started; the cluster has {free:g} CPUs "
                "free. Add CPU nodes, lower pool.min_actors or pool.cpus_per_actor, or see what the actors do "
                "(ray stack)"
            )


def _waited_for() -> set[float]:
    """Of how many CPUs each there are actors that no node has room for."""
    worker: Any = ray._private.worker.global_worker
    waiting = get_cluster_resource_state(worker.gcs_client).pending_resource_requests
    return {each.request.resources_bundle.get("CPU", 0.0) for each in waiting}


_quiet()  # in the actor that runs the execution, which imports this with the context
