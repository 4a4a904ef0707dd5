"""raypipe's policies for an execution of Ray Data: the limit of blocks in flight, and the control of its pool.

    InFlightPolicy   bounds the number of blocks in flight
    StreamAutoscaler keeps the pool (see `pool`), and records metrics; never asks for nodes

Ray Data has no public way to set either. It calls the policies that a setting of its context names, and makes the
autoscalers of its actors and its cluster with two functions, which `raypipe.rayext.patches` replaces.

By default, Ray Data grows a pool, and the cluster, as long as they are busy. A pool that only fills the buffer is
busy too, so the cluster would get more nodes of every type (ray#45331).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.data import DataContext, Dataset, ExecutionResources
from ray.data._internal.execution.backpressure_policy.backpressure_policy import (
    BackpressurePolicy,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.config import PoolConfig
from raypipe.logs import LogFormat, configure_logs
from raypipe.metrics.prometheus import StreamMetrics
from raypipe.metrics.tracer import counted
from raypipe.rayext.block_flow import BlockFlow
from raypipe.rayext.data_context import CONTEXT_KEY, take_process
from raypipe.rayext.lost_blocks import LostBlocks
from raypipe.rayext.patches import install
from raypipe.rayext.pool import PoolKeeper
from raypipe.rayext.processes import is_ray_worker, this_process
from raypipe.rayext.trace_sender import sending_trace

logger = logging.getLogger(__name__)

_METRICS_PERIOD_S = 1.0
_LOOK_PERIOD_S = 0.1  # the period of Ray Data's own loop


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
        actors: number of actors that the pool has from its first block on.
        traces: whether the execution records events for a trace.
        left_out: blocks that ranks may have made themselves, and take only to leave them out.
    """

    pool: PoolConfig
    fixed: int
    per_actor: int
    reads: bool
    supervisor: Any
    ranks: int = 1
    run: str = ""
    log_format: LogFormat = "text"
    actors: int = 0
    traces: bool = False
    left_out: int = 0

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
    context.set_config(CONTEXT_KEY, settings)
    # Each turn takes from the reader at most the blocks that it has buffered.
    limit = settings.limit(actors)
    if settings.reads:
        context._max_num_blocks_in_streaming_gen_buffer = max(2, limit // 4)
    else:
        context._max_num_blocks_in_streaming_gen_buffer = limit
    return context


def single_rows(rows: Dataset) -> Dataset:
    """Return the same rows, each as its own block, in a Dataset of the user's own context.

    Ray Data joins the rows that a ReadTask yields to blocks of its target size. `target_max_block_size = 1`, as
    `context_of` has it, would cut the user's blocks as well. The tasks of `repartition` need a CPU by default, for
    which they would wait forever while a pool holds all of them (ray#44687). It has no argument for that, so its
    operator is changed.
    """
    blocks: Any = rows.repartition(target_num_rows_per_block=1)
    try:
        blocks._logical_plan.dag.ray_remote_args["num_cpus"] = 0
    except (AttributeError, TypeError):
        logger.warning(
            "Ray %s has no Dataset._logical_plan.dag.ray_remote_args: a stream in a Dataset needs a CPU more",
            ray.__version__,
        )
    return blocks


class InFlightPolicy(BackpressurePolicy):
    """Stops the pool from taking blocks, and the reader from yielding them, while enough are in flight.

    Ray Data bounds bytes by shares of the object store. This lets a reader of tiny rows run ahead without limit,
    and lets a pool fill the store although the trainer is the bottleneck. This policy limits the blocks in flight
    at every stage to the configured number, independently of the object store's size.
    """

    def __init__(self, data_context: Any, topology: Any, resource_manager: Any) -> None:
        super().__init__(data_context, topology, resource_manager)
        self._settings: Settings = data_context.get_config(CONTEXT_KEY)
        self._flow = BlockFlow(topology)
        self._next_look = 0.0  # time.perf_counter()

    def _limit(self) -> int:
        (pool,) = self._flow.pool.get_autoscaling_actor_pools()
        return self._settings.limit(pool.num_running_actors())

    def can_add_input(self, op: Any) -> bool:
        if op is self._flow.reader:
            # Only one read task runs at a time: rows of a later task would fill the queue before earlier rows.
            return op.num_active_tasks() == 0
        if op is not self._flow.pool:
            return True
        active = op.num_active_tasks()
        waiting = self._flow.waiting()
        limit = self._limit()
        if active + waiting < limit:
            return True
        # Blocks that other ranks will leave out must not stop those that a rank waits for: the others may wait for
        # this rank in their loops.
        return (
            self._flow.waiting_of(self._settings.ranks) > 0
            and active < limit
            and active + waiting < limit + self._settings.left_out
        )

    def max_task_output_bytes_to_read(self, op: Any) -> int | None:
        """Return the bytes of the rows that the queue before the pool has room for, by their mean size."""
        if op is not self._flow.reader:
            return None
        self._pause()
        room = self._limit() - self._flow.queued()
        yielded = op.metrics.num_task_outputs_generated
        if room > 0 and not self._settings.reads:
            # places are tiny, and Ray misjudges their size
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
        self._flow = BlockFlow(topology)
        queue = self._flow.output_queue if self._flow.ends_with_pool else None
        self._lost = LostBlocks(self._flow.pool, queue)
        self._reported_at = 0.0
        # The reader runs on this process's node, since Ray waits forever for a plain task on a node that has
        # become silent, even after it has declared the node dead. The affinity is soft: Ray starts no task on a
        # node that is about to go, so a task with a hard affinity would fail, and Ray would not retry it.
        node = ray.get_runtime_context().get_node_id()
        self._flow.reader._ray_remote_args["scheduling_strategy"] = (
            NodeAffinitySchedulingStrategy(node, soft=True)
        )
        self._keeper = PoolKeeper(
            self._flow.pool,
            self._lost,
            settings.pool,
            settings.supervisor,
            time.monotonic(),
            settings.actors,
            settings.run,
        )
        self._metrics = StreamMetrics(settings.run)
        self._ranks = settings.ranks
        self._supervisor = settings.supervisor
        self._name = f"execution {uuid.uuid4().hex}"
        # A process that is not a Ray worker belongs to a user, who may stop it with Ctrl-Z.
        self._process = this_process("coordinator") if is_ray_worker() else None
        self._trace = contextlib.ExitStack()
        if settings.traces:
            coordinator = this_process("coordinator")
            self._trace.enter_context(sending_trace(settings.supervisor, coordinator))
        self._answer: Any = None  # reference to the Supervisor's answer to a report
        self._num_waiting = 0  # ranks that wait, as they say, whether or not a finished block is there for them

    def try_trigger_scaling(self) -> None:
        """Do the work of a turn: size the pool, record metrics, report to the Supervisor."""
        now = time.monotonic()
        flow = self._flow
        if flow.pool.has_execution_finished():
            self._keeper.release_all()
            return
        self._take_answer()
        waiting = flow.waiting()
        ranks_waiting = max(
            flow.waiting_of(self._ranks), min(1.0, self._num_waiting / self._ranks)
        )
        self._keeper.keep(
            now,
            finished=flow.finished,
            waiting=waiting,
            ranks_waiting=ranks_waiting,
        )
        if now - self._reported_at >= _METRICS_PERIOD_S:
            self._reported_at = now
            self._report(now, waiting)

    def _report(self, now: float, waiting: int) -> None:
        """Record metrics, and report the state of the execution to the Supervisor.

        Args:
            waiting: number of finished blocks that no rank has taken.
        """
        flow = self._flow
        actors = flow.pool.get_actor_info()
        num_in_flight = flow.pool.num_active_tasks() + waiting
        self._metrics.show(flow.finished, num_in_flight, waiting, actors)
        counted(
            "blocks",
            queued=flow.queued(),
            working=flow.pool.num_active_tasks(),
            finished=waiting,
        )
        counted(
            "actors",
            running=actors.running,
            pending=actors.pending,
            restarting=actors.restarting,
        )
        state = ""
        if flow.finished:
            state = flow.description(
                actors,
                self._ranks,
                self._num_waiting,
                self._lost.num_silent(),
            )
        ready = 1.0 - flow.waiting_of(self._ranks)
        answer = self._supervisor.execution_progress.remote(
            self._name, now - self._keeper.taken_at, self._process, state, ready
        )
        self._answer = self._answer or answer

    def _take_answer(self) -> None:
        """Take the Supervisor's last answer; without one, nothing is known of the ranks."""
        if self._answer is None or not ray.wait([self._answer], timeout=0)[0]:
            return
        try:
            answer = ray.get(self._answer)
            self._num_waiting = answer.num_waiting
            self._keeper.give_way(answer.given_cpus)
        except ray.exceptions.RayError:  # it may have been restarted
            self._num_waiting = 0
        self._answer = None

    def on_executor_shutdown(self) -> None:
        """Record the final metrics, and report the end to the supervisor."""
        self._lost.drop()
        self._trace.close()
        self._metrics.show(self._flow.finished)
        if ray.is_initialized():  # otherwise the call would start Ray again
            self._supervisor.process_left.remote(self._name)

    def get_total_resources(self) -> ExecutionResources:
        """Return the resources that the execution may use: no limit."""
        return ExecutionResources.for_limits()
