"""Numbers of blocks between the operators of one of raypipe's executions.

Ray Data counts a block as finished when it has a reference to it. Its data stay on the node of the actor that made
it until a rank fetches them.
"""

from __future__ import annotations

from typing import Any

from ray.data._internal.execution.operators.output_splitter import OutputSplitter


class BlockFlow:
    """The operators of one of raypipe's executions, and the numbers of blocks between them."""

    def __init__(self, topology: Any) -> None:
        (self.pool,) = (op for op in topology if op.get_autoscaling_actor_pools())
        (self.reader,) = self.pool.input_dependencies
        *_, (self._last, last_state) = topology.items()
        self.output_queue = last_state.output_queue
        # so that the blocks in the last queue are the pool's
        self.ends_with_pool = self._last is self.pool or isinstance(
            self._last, OutputSplitter
        )

    @property
    def finished(self) -> int:
        """Blocks that the pool has finished."""
        return self.pool.metrics.num_task_outputs_generated

    def waiting(self) -> int:
        """Return the number of blocks that the pool has finished and no rank has taken."""
        ended = self._last.metrics.block_outputs_taken
        return self.finished - (ended - self.output_queue.num_blocks)

    def queued(self) -> int:
        """Return the number of blocks that the reader has yielded and no actor has received."""
        return (
            self.reader.metrics.num_task_outputs_generated
            - self.pool.metrics.num_tasks_submitted
        )

    def description(
        self, actors: Any, ranks: int, num_waiting: int, silent: int
    ) -> str:
        """Describe the state of the blocks and of the pool's actors.

        Args:
            ranks: number of ranks.
            num_waiting: ranks that say that they have waited for a second or more.
            silent: actors whose nodes do not answer.
        """
        running = actors.running - silent
        others = f", {silent} do not answer" if silent else ""
        active = self.pool.num_active_tasks()
        queued = self.queued()
        waiting = self.waiting()
        if not running:
            return (
                f"no transform actor runs ({actors.pending} have not started, {actors.restarting} restart"
                f"{others})"
            )
        if waiting and not active:
            num_busy = ranks - num_waiting
            if not num_busy or self.waiting_of(ranks) * ranks < num_waiting:
                return f"a rank fetches a finished block from its node, and {waiting} wait behind it"
            return f"{waiting} finished blocks wait for {num_busy} other ranks"
        if active or queued:
            return f"{running} transform actors work on {active} blocks, and {queued} are queued{others}"
        return f"{running} transform actors are idle and wait for the reader{others}"

    def waiting_of(self, ranks: int) -> float:
        """Return the share of the ranks that have no finished block."""
        queue = self.output_queue
        if ranks == 1:
            return float(not queue.has_next())
        return sum(not queue.has_next(rank) for rank in range(ranks)) / ranks
