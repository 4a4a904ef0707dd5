"""raypipe's part in an execution of Ray Data: what is in flight, and what is done at each turn of its scheduler.

    InFlightPolicy   bounds what is in flight, counted in blocks
    StreamAutoscaler keeps the pool (see `pool`), and shows metrics; asks for no nodes

Ray Data has no public way to say either. It asks policies that a setting of its context names, and makes the
autoscalers of its actors and of its cluster by two functions, which `raypipe.rayext.patches` replaces.

Left alone, Ray Data grows a pool, and the cluster, as long as they are busy: a pool that only fills the buffer is,
and a cluster that is busy with it gets more nodes of every type (ray#45331).
"""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.data import DataContext, ExecutionResources
from ray.data._internal.execution.backpressure_policy.backpressure_policy import BackpressurePolicy
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.config import PoolConfig
from raypipe.logs import LogFormat, configure_logs
from raypipe.metrics.prometheus import StreamMetrics
from raypipe.rayext.ours import KEY, take_process
from raypipe.rayext.patches import install
from raypipe.rayext.pool import PoolKeeper
from raypipe.rayext.watch import Process, end_stopped, in_worker, this_process

_METRICS_PERIOD_S = 1.0
_LOOK_PERIOD_S = 0.1  # as Ray Data's own
_START_S = 15.0  # until a first block may be expected


@dataclass(frozen=True)
class Settings:
    """What an execution of ours is told.

    Attributes:
        pool: the sizes of its pool, and when it stands still.
        fixed, per_actor: blocks that may be in flight, and as many more for each running actor.
        reads: whether the reader's rows hold encoded samples, and not their places alone.
        supervisor: handle of the stream's Supervisor.
        ranks: that its rows are split over.
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
        # A process that receives the settings runs the execution, or works for it.
        self.__dict__.update(state)
        install(StreamAutoscaler)
        take_process()

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self  # Ray Data copies contexts within a process

    def limit(self, actors: int) -> int:
        """Blocks that may be in flight, for a number of running actors."""
        return self.fixed + self.per_actor * max(1, actors)


def context_of(settings: Settings, actors: int) -> DataContext:
    """The context of an execution whose rows are blocks, which come out in order.

    Args:
        actors: that the pool begins with.
    """
    install(StreamAutoscaler)
    context = DataContext.get_current().copy()
    context.target_max_block_size = 1  # every yielded row is its own block: nothing merges or cuts it
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.raise_original_map_exception = True
    context.issue_detectors_config.detectors = []  # one warns of memory=0; PoolKeeper ends what hangs
    context.memory_usage_poll_interval_s = None  # each poll walks all pages, shared ones too: 3 % of a core
    context.op_resource_reservation_enabled = False
    context.set_config("backpressure_policies.enabled", [InFlightPolicy])
    context.set_config(KEY, settings)
    # A look takes from the reader no more than it has buffered.
    limit = settings.limit(actors)
    context._max_num_blocks_in_streaming_gen_buffer = max(2, limit // 4) if settings.reads else limit
    return context


@contextlib.contextmanager
def datasets_with(settings: Settings, actors: int) -> Iterator[None]:
    """Give these settings to the executions of datasets that are made in here; see `context_of`."""
    before = DataContext.get_current()
    DataContext._set_current(context_of(settings, actors))  # DataContext.current() came with Ray 2.55
    try:
        yield
    finally:
        DataContext._set_current(before)


class _Flow:
    """The operators of an execution of ours, and how many blocks there are between them."""

    def __init__(self, topology: Any) -> None:
        (self.pool,) = (op for op in topology if op.get_autoscaling_actor_pools())
        (self.reader,) = self.pool.input_dependencies
        *_, (self._last, self._last_state) = topology.items()

    @property
    def finished(self) -> int:
        """Blocks that the pool has finished."""
        return self.pool.metrics.num_task_outputs_generated

    def waiting(self) -> int:
        """Blocks that the pool has finished, and no rank has taken."""
        left = self._last.metrics.block_outputs_taken - self._last_state.output_queue.num_blocks
        return self.finished - left

    def queued(self) -> int:
        """Blocks that the reader has named, and no actor has been given."""
        return self.reader.metrics.num_task_outputs_generated - self.pool.metrics.num_tasks_submitted

    def description(self, actors: Any) -> str:
        """Describe what the blocks are at, by the numbers of the pool's actors."""
        at_work, queued, waiting = self.pool.num_active_tasks(), self.queued(), self.waiting()
        if not actors.running:
            return f"no transform actor runs ({actors.pending} have not started, {actors.restarting} restart)"
        if at_work or queued:
            return f"{actors.running} transform actors have {at_work} blocks in work, and {queued} are queued"
        if waiting:
            return f"{waiting} finished blocks are there, for other ranks"
        return f"{actors.running} transform actors are idle: the reader is awaited"

    def waiting_of(self, ranks: int) -> float:
        """Share of the ranks for which no finished block is there."""
        queue = self._last_state.output_queue
        if ranks == 1:
            return float(not queue.has_next())
        return sum(not queue.has_next(rank) for rank in range(ranks)) / ranks


class InFlightPolicy(BackpressurePolicy):
    """Stops the pool from taking, and the reader from yielding, while enough is in flight.

    Ray Data bounds bytes by shares of the object store. That lets a reader of tiny rows run ahead without end, and
    lets a pool fill the store although the trainer is the bottleneck. Here what is in flight is what the
    configuration says, at every stage, whatever the size of the object store.
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
            # Readers take turns: rows of a later one would fill the queue before those that come first.
            return op.num_active_tasks() == 0
        return op is not self._flow.pool or op.num_active_tasks() + self._flow.waiting() < self._limit()

    def max_task_output_bytes_to_read(self, op: Any) -> int | None:
        """Of the reader, as many rows as there is room for before the pool, by their mean size."""
        if op is not self._flow.reader:
            return None
        self._pause()
        room, yielded = self._limit() - self._flow.queued(), op.metrics.num_task_outputs_generated
        if room > 0 and not self._settings.reads:  # places take next to nothing, and Ray misjudges their size
            return None
        mean_bytes = op.metrics.bytes_task_outputs_generated / yielded if yielded else 1
        return math.floor(max(0, room) * mean_bytes)

    def _pause(self) -> None:
        """Let a period pass from look to look. A look waits for tasks that run, and returns at once where all have
        finished: while the trainer is the bottleneck, Ray Data's loop would keep a whole core busy.
        """
        time.sleep(max(0.0, self._next_look - time.perf_counter()))
        self._next_look = time.perf_counter() + _LOOK_PERIOD_S


class StreamAutoscaler:
    """An autoscaler of Ray Data's cluster, which it calls at each turn of its scheduler; asks for no nodes.

    Actors that the cluster has no room for are pending; Ray's autoscaler adds nodes for them, and takes a node
    away that has had none for its idle time-out.
    """

    def __init__(self, topology: Any, settings: Settings) -> None:
        configure_logs(settings.log_format, run=settings.run)
        self._flow, self._shown_at = _Flow(topology), 0.0
        # The reader runs on this process's node: for a task on a node that has fallen silent, which is no actor's,
        # Ray waits forever, though it calls the node dead. Once the node is about to go, Ray starts no task on
        # it: one that must be there would fail, and Ray does not try it again.
        node = ray.get_runtime_context().get_node_id()
        self._flow.reader._ray_remote_args["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
        self._keeper = PoolKeeper(self._flow.pool, settings.pool, settings.supervisor, time.monotonic())
        self._metrics, self._ranks = StreamMetrics(settings.run), settings.ranks
        self._supervisor, self._name = settings.supervisor, f"execution {uuid.uuid4().hex}"
        # A process that is no worker of Ray's is its user's, who may stop it with Ctrl-Z.
        self._process = this_process("coordinator") if in_worker() else None
        self._left, self._left_at = 0, time.monotonic() + _START_S
        self._answer: Any = None  # of the supervisor, to what it was told last
        self._watcher: Process | None = None

    def try_trigger_scaling(self) -> None:
        """At each turn."""
        now, flow = time.monotonic(), self._flow
        ranks_waiting = flow.waiting_of(self._ranks)
        self._keeper.keep(now, finished=flow.finished, queued=flow.queued(), ranks_waiting=ranks_waiting)
        if now - self._shown_at >= _METRICS_PERIOD_S:
            self._shown_at, waiting = now, flow.waiting()
            info = flow.pool.get_actor_info()
            self._metrics.show(flow.finished, flow.pool.num_active_tasks() + waiting, waiting, info)
            if flow.finished - waiting != self._left:
                self._left, self._left_at = flow.finished - waiting, now
            self._tell(now - self._left_at, flow.description(info) if flow.finished else "")

    def _tell(self, still_s: float, at: str) -> None:
        """Tell the supervisor how long no rank has taken a block, and what the blocks are at. If it was stopped,
        kill it: Ray restarts it.
        """
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            with contextlib.suppress(ray.exceptions.RayError):
                self._watcher = ray.get(self._answer)
            self._answer = None
        if self._answer is None:
            self._answer = self._supervisor.moves.remote(self._name, still_s, self._process, at)
        elif (watcher := self._watcher) and end_stopped([(watcher.pid, watcher.started)]):  # on this node
            self._supervisor.note.remote(
                f"the supervisor was stopped (SIGSTOP), and killed ({watcher})", "stopped"
            )

    def on_executor_shutdown(self) -> None:
        """At the end."""
        self._metrics.show(self._flow.finished)
        if ray.is_initialized():  # or the call would start it again
            self._supervisor.left.remote(self._name)

    def get_total_resources(self) -> ExecutionResources:
        """What the execution may use: whatever there is."""
        return ExecutionResources.for_limits()
