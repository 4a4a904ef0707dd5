"""Blocks of one of raypipe's executions: their numbers between its operators, and their way to the ranks.

Ray Data counts a block as finished when it has a reference to it. Its data stay on the node of the actor that made
it until a rank fetches them. If that node dies first, only the same actor can make the block again, so it must be
restarted although it has no block in work.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.experimental import get_object_locations

from raypipe.rayext.cluster_state import nodes

# A rank fetches the block that it waits for, and one ahead.
_FETCHED = 2
_ANSWER_MS = 500
# bytes; Ray keeps smaller objects in the memory of the process that asked for them
_SMALL = 100 * 1024


class BlockFlow:
    """The operators of one of raypipe's executions, and the numbers of blocks between them."""

    def __init__(self, topology: Any) -> None:
        (self.pool,) = (op for op in topology if op.get_autoscaling_actor_pools())
        (self.reader,) = self.pool.input_dependencies
        *_, (self._last, last_state) = topology.items()
        self.output_queue = last_state.output_queue

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
        self, actors: Any, ranks: int, num_waiting: int, lost: list[str]
    ) -> str:
        """Describe the state of the blocks and of the pool's actors.

        Args:
            ranks: number of ranks.
            num_waiting: ranks that say that they have waited for a second or more.
            lost: descriptions of blocks that are lost, see `Deliveries.lost`.
        """
        active = self.pool.num_active_tasks()
        queued = self.queued()
        waiting = self.waiting()
        if lost:
            state = (
                f"{actors.running} transform actors run, {actors.restarting} restart"
            )
            return f"a finished block is lost with its node, and is made again ({lost[0]}; {state})"
        if not actors.running:
            return f"no transform actor runs ({actors.pending} have not started, {actors.restarting} restart)"
        if waiting and not active:
            num_busy = ranks - num_waiting
            if not num_busy or self.waiting_of(ranks) * ranks < num_waiting:
                return f"a rank fetches a finished block from its node, and {waiting} wait behind it"
            return f"{waiting} finished blocks wait for {num_busy} other ranks"
        if active or queued:
            return f"{actors.running} transform actors work on {active} blocks, and {queued} are queued"
        return f"{actors.running} transform actors are idle and wait for the reader"

    def waiting_of(self, ranks: int) -> float:
        """Return the share of the ranks that have no finished block."""
        queue = self.output_queue
        if ranks == 1:
            return float(not queue.has_next())
        return sum(not queue.has_next(rank) for rank in range(ranks)) / ranks


class Deliveries:
    """Deliveries of an execution's last queue.

    It holds the blocks that each rank took last, as the rank itself does until it takes the next one.

    Args:
        queue: Ray Data's output queue, whose `append` and `pop` are wrapped.
    """

    def __init__(self, queue: Any) -> None:
        # Block in the queue → the actor that made it.
        self._finished: dict[bytes, str] = {}
        # Rank → the last blocks that it took.
        self._fetched: dict[int, deque[tuple[Any, str]]] = {}
        queue.append = self._noting(queue.append, self._appended)
        queue.pop = self._noting(queue.pop, self._popped)

    @staticmethod
    def _noting(
        method: Callable[..., Any], note: Callable[[Any], None]
    ) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            if result is not None:
                bundle = result
            else:
                bundle = next(iter(args), None)
            if hasattr(bundle, "block_refs"):
                note(bundle)
            return result

        return noted

    def _appended(self, bundle: Any) -> None:
        for block in bundle.block_refs:
            self._finished[block.binary()] = block.task_id().actor_id().hex()

    def _popped(self, bundle: Any) -> None:
        last = self._fetched.setdefault(
            bundle.output_split_idx or 0, deque(maxlen=_FETCHED)
        )
        for block in bundle.block_refs:
            if maker := self._finished.pop(block.binary(), ""):
                last.append((block, maker))

    def makers(self) -> set[str]:
        """Return the ids of the actors whose finished blocks may not have reached their ranks yet."""
        fetched = (
            maker for last in list(self._fetched.values()) for _, maker in list(last)
        )
        return {*list(self._finished.values()), *fetched}

    def drop(self) -> None:
        """Drop the blocks: the execution has ended."""
        self._fetched.clear()

    def lost(self) -> list[str]:
        """Return a description of each block that a rank has taken and whose data are on no living node."""
        blocks = [
            block for last in list(self._fetched.values()) for block, _ in list(last)
        ]
        locations: dict[Any, dict[str, Any]] = {}
        with contextlib.suppress(ray.exceptions.RayError):
            locations = get_object_locations(blocks, _ANSWER_MS)
        alive = {node["NodeID"] for node in nodes()}
        lost = []
        for reference, location in locations.items():
            if (location.get("object_size") or 0) < _SMALL or location.get("did_spill"):
                continue
            if not alive.intersection(location["node_ids"]):
                names = ", ".join(node[:8] for node in location["node_ids"])
                lost.append(
                    f"object {reference.hex()[:16]} was on {names or 'a node that is gone'}"
                )
        return lost
