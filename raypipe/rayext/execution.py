"""raypipe's policies for an execution of Ray Data: the limit of blocks in flight, and the control of its pool.

    InFlightPolicy   bounds the number of blocks in flight
    StreamAutoscaler keeps the pool (see `pool`), and records metrics; never asks for nodes

Ray Data has no public way to set either. It calls the policies that a setting of its context names, and makes the
autoscalers of its actors and its cluster with two functions, which `raypipe.rayext.patches` replaces.

By default, Ray Data grows a pool, and the cluster, as long as they are busy. A pool that only fills the buffer is
busy too, so the cluster would get more nodes of every type (ray#45331).
"""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.data import DataContext, ExecutionResources
from ray.data._internal.execution.backpressure_policy.backpressure_policy import (
    BackpressurePolicy,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.config import PoolConfig
from raypipe.logs import LogFormat, configure_logs
from raypipe.metrics.prometheus import StreamMetrics
from raypipe.rayext.deliveries import Deliveries
from raypipe.rayext.ours import KEY, take_process
from raypipe.rayext.patches import install
from raypipe.rayext.pool import PoolKeeper
from raypipe.rayext.watch import in_worker, this_process

_METRICS_PERIOD_S = 1.0
_LOOK_PERIOD_S = 0.1  # the period of Ray Data's own loop
_START_S = 15.0  # time for the first block


# Settings of a user's context that a stream takes over, for Ray Data's logs. All others decide what is delivered,
# and whether the stream moves: `max_errored_blocks` would drop blocks in silence.
_USERS = (
    "enable_auto_log_stats",
    "verbose_stats_logs",
    "log_internal_stack_trace",
    "enable_per_node_metrics",
    "enable_stats_summary_collection",
)


@dataclass(frozen=True)
class Settings:
    """Settings of one of raypipe's executions.

    Attributes:
        pool: sizes of the pool, and the limit of a stall.
        fixed, per_actor: blocks that may be in flight: a fixed number, and more per running actor.
        reads: whether the reader's rows contain encoded samples, and not only their places.
        supervisor: handle of the stream's Supervisor.
        ranks: number of ranks that the rows are split over.
    """

    pool: PoolConfig
    fixed: int
    per_actor: int
    reads: bool
    supervisor: Any
    ranks: int = 1
    run: str = ""
    log_format: LogFormat = "text"

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A process that receives the settings runs the execution or works for it.
        self.__dict__.update(state)
        install(StreamAutoscaler)
        take_process()

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self  # Ray Data copies contexts within a process

    def limit(self, actors: int) -> int:
        """Return how many blocks may be in flight, for a number of running actors."""
        return self.fixed + self.per_actor * max(1, actors)


def context_of(settings: Settings, actors: int) -> DataContext:
    """Return the context of an execution whose rows are blocks and keep their order: Ray's defaults, changed.

    Args:
        actors: number of actors that the pool starts with.
    """
    install(StreamAutoscaler)
    context = DataContext()
    users = DataContext.get_current()
    for name in _USERS:
        if hasattr(users, name):  # not every release has each
            setattr(context, name, getattr(users, name))
    context.target_max_block_size = 1  # every yielded row becomes one block
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = True
    context.issue_detectors_config.detectors = []  # one warns about memory=0; PoolKeeper ends hanging streams
    # While a trainer pauses, no block moves. Ray 2.60 would end the execution after half an hour, and every ten
    # seconds let a block of the reader pass the limit.
    context.execution_no_progress_timeout_s = -1
    context.output_backpressure_guard_release_interval_s = 1e9
    # each poll walks all pages, including shared ones: 3% of a core
    context.memory_usage_poll_interval_s = None
    context.op_resource_reservation_enabled = False
    context.set_config("backpressure_policies.enabled", [InFlightPolicy])
    context.set_config(KEY, settings)
    # Each turn takes from the reader at most the blocks that it has buffered.
    limit = settings.limit(actors)
    if settings.reads:
        context._max_num_blocks_in_streaming_gen_buffer = max(2, limit // 4)
    else:
        context._max_num_blocks_in_streaming_gen_buffer = limit
    return context


class _Flow:
    """The operators of one of raypipe's executions, and the numbers of blocks between them."""

    def __init__(self, topology: Any) -> None:
        (self.pool,) = (op for op in topology if op.get_autoscaling_actor_pools())
        (self.reader,) = self.pool.input_dependencies
        *_, (self._last, self._last_state) = topology.items()
        self.deliveries = Deliveries(self._last_state.output_queue)

    @property
    def finished(self) -> int:
        """Blocks that the pool has finished."""
        return self.pool.metrics.num_task_outputs_generated

    def waiting(self) -> int:
        """Return the number of blocks that the pool has finished and no rank has taken."""
        left = (
            self._last.metrics.block_outputs_taken
            - self._last_state.output_queue.num_blocks
        )
        return self.finished - left

    def queued(self) -> int:
        """Return the number of blocks that the reader has yielded and no actor has received."""
        return (
            self.reader.metrics.num_task_outputs_generated
            - self.pool.metrics.num_tasks_submitted
        )

    def description(self, actors: Any, ranks: int, num_waiting: int) -> str:
        """Describe the state of the blocks and of the pool's actors.

        Args:
            ranks: number of ranks.
            num_waiting: ranks that say that they have waited for a second or more.
        """
        active = self.pool.num_active_tasks()
        queued = self.queued()
        waiting = self.waiting()
        if num_waiting and (lost := self.deliveries.lost()):
            state = (
                f"{actors.running} transform actors run, {actors.restarting} restart"
            )
            return f"a finished block is lost with its node, and is made again ({lost[0]}; {state})"
        if not actors.running:
            return f"no transform actor runs ({actors.pending} have not started, {actors.restarting} restart)"
        if waiting and not active:
            others = ranks - num_waiting
            if not others or self.waiting_of(ranks) * ranks < num_waiting:
                return f"a rank fetches a finished block from its node, and {waiting} wait behind it"
            return f"{waiting} finished blocks wait for {others} other ranks"
        if active or queued:
            return f"{actors.running} transform actors work on {active} blocks, and {queued} are queued"
        return f"{actors.running} transform actors are idle and wait for the reader"

    def waiting_of(self, ranks: int) -> float:
        """Return the share of the ranks that have no finished block."""
        queue = self._last_state.output_queue
        if ranks == 1:
            return float(not queue.has_next())
        return sum(not queue.has_next(rank) for rank in range(ranks)) / ranks


class InFlightPolicy(BackpressurePolicy):
    """Stops the pool from taking blocks, and the reader from yielding them, while enough are in flight.

    Ray Data bounds bytes by shares of the object store. This lets a reader of tiny rows run ahead without limit,
    and lets a pool fill the store although the trainer is the bottleneck. This policy limits the blocks in flight
    at every stage to the configured number, independently of the object store's size.
    """

    def __init__(self, data_context: Any, topology: Any, resource_manager: Any) -> None:
        super().__init__(data_context, topology, resource_manager)
        self._settings: Settings = data_context.get_config(KEY)
        self._flow = _Flow(topology)
        self._next_look = 0.0  # time.perf_counter()

    def _limit(self) -> int:
        (pool,) = self._flow.pool.get_autoscaling_actor_pools()
        return self._settings.limit(pool.num_running_actors())

    def can_add_input(self, op: Any) -> bool:
        if op is self._flow.reader:
            # Only one read task runs at a time: rows of a later task would fill the queue before earlier rows.
            return op.num_active_tasks() == 0
        return (
            op is not self._flow.pool
            or op.num_active_tasks() + self._flow.waiting() < self._limit()
        )

    def max_task_output_bytes_to_read(self, op: Any) -> int | None:
        """Return the bytes of the rows that the queue before the pool has room for, by their mean size."""
        if op is not self._flow.reader:
            return None
        self._pause()
        room = self._limit() - self._flow.queued()
        yielded = op.metrics.num_task_outputs_generated
        if (
            room > 0 and not self._settings.reads
        ):  # places are tiny, and Ray misjudges their size
            return None
        if yielded:
            mean_bytes = op.metrics.bytes_task_outputs_generated / yielded
        else:
            mean_bytes = 1
        return math.floor(max(0, room) * mean_bytes)

    def _pause(self) -> None:
        """Wait until a period has passed since the last turn. Ray Data's loop waits for running tasks, but not if
        all have finished, so it would keep a whole core busy while the trainer is the bottleneck.
        """
        time.sleep(max(0.0, self._next_look - time.perf_counter()))
        self._next_look = time.perf_counter() + _LOOK_PERIOD_S


class StreamAutoscaler:
    """Autoscaler that Ray Data calls at each turn of its scheduler; it never asks for nodes.

    Actors without room in the cluster are pending, and Ray's autoscaler adds nodes for them. It removes a node
    that has had no actor for its idle timeout.
    """

    def __init__(self, topology: Any, settings: Settings) -> None:
        configure_logs(settings.log_format, run=settings.run)
        self._flow = _Flow(topology)
        self._shown_at = 0.0
        # The reader runs on this process's node, since Ray waits forever for a plain task on a node that has
        # become silent, even after it has declared the node dead. The affinity is soft: Ray starts no task on a
        # node that is about to go, so a task with a hard affinity would fail, and Ray would not retry it.
        node = ray.get_runtime_context().get_node_id()
        self._flow.reader._ray_remote_args["scheduling_strategy"] = (
            NodeAffinitySchedulingStrategy(node, soft=True)
        )
        self._keeper = PoolKeeper(
            self._flow.pool, settings.pool, settings.supervisor, time.monotonic()
        )
        self._metrics = StreamMetrics(settings.run)
        self._ranks = settings.ranks
        self._supervisor = settings.supervisor
        self._name = f"execution {uuid.uuid4().hex}"
        # A process that is not a Ray worker belongs to a user, who may stop it with Ctrl-Z.
        self._process = this_process("coordinator") if in_worker() else None
        self._left = 0
        self._left_at = time.monotonic() + _START_S
        self._said: Any = None  # the Supervisor's answer to the last report
        self._num_waiting = 0  # ranks that wait, as they say, whether or not a finished block is there for them

    def try_trigger_scaling(self) -> None:
        """Do the work of a turn: size the pool, record metrics, report to the supervisor."""
        now = time.monotonic()
        flow = self._flow
        self._hear()
        waiting = flow.waiting()
        ranks_waiting = max(
            flow.waiting_of(self._ranks), min(1.0, self._num_waiting / self._ranks)
        )
        self._keeper.keep(
            now,
            finished=flow.finished,
            waiting=waiting,
            ranks_waiting=ranks_waiting,
            fetches=self._num_waiting > 0,
            makers=flow.deliveries.makers,
        )
        if now - self._shown_at >= _METRICS_PERIOD_S:
            self._shown_at = now
            info = flow.pool.get_actor_info()
            self._metrics.show(
                flow.finished, flow.pool.num_active_tasks() + waiting, waiting, info
            )
            if flow.finished - waiting != self._left:
                self._left = flow.finished - waiting
                self._left_at = now
            if flow.finished:
                at = flow.description(info, self._ranks, self._num_waiting)
            else:
                at = ""
            ready = 1.0 - flow.waiting_of(self._ranks)
            said = self._supervisor.execution_progress.remote(
                self._name, now - self._left_at, self._process, at, ready
            )
            self._said = self._said or said

    def _hear(self) -> None:
        """Take the Supervisor's last answer; without one, nothing is known of the ranks."""
        if self._said is not None and ray.wait([self._said], timeout=0)[0]:
            said, self._said = self._said, None
            try:
                word = ray.get(said)
                self._num_waiting = word.num_waiting
                self._keeper.give_way(word.given_cpus)
            except ray.exceptions.RayError:  # it may have been restarted
                self._num_waiting = 0

    def on_executor_shutdown(self) -> None:
        """Record the final metrics, and report the end to the supervisor."""
        self._flow.deliveries.drop()
        self._metrics.show(self._flow.finished)
        if ray.is_initialized():  # otherwise the call would start Ray again
            self._supervisor.process_left.remote(self._name)

    def get_total_resources(self) -> ExecutionResources:
        """Return the resources that the execution may use: no limit."""
        return ExecutionResources.for_limits()
