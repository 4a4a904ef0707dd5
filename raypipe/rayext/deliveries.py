"""Finished blocks on their way to the ranks: which actors made them, and where their data are.

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


class Deliveries:
    """Deliveries of an execution's last queue.

    It holds the blocks that each rank took last, as the rank itself does until it takes the next one.

    Args:
        queue: Ray Data's output queue, whose `append` and `pop` are wrapped.
    """

    def __init__(self, queue: Any) -> None:
        self._finished: dict[
            bytes, str
        ] = {}  # block in the queue → the actor that made it
        self._fetched: dict[
            int, deque[tuple[Any, str]]
        ] = {}  # rank → the last blocks that it took
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
        found: dict[Any, dict[str, Any]] = {}
        with contextlib.suppress(ray.exceptions.RayError):
            found = get_object_locations(blocks, _ANSWER_MS)
        alive = {node["NodeID"] for node in nodes()}
        lost = []
        for reference, place in found.items():
            is_small = (place.get("object_size") or 0) < _SMALL
            if not (
                is_small
                or place.get("did_spill")
                or alive.intersection(place["node_ids"])
            ):
                where = (
                    ", ".join(node[:8] for node in place["node_ids"])
                    or "a node that is gone"
                )
                lost.append(f"object {reference.hex()[:16]} was on {where}")
        return lost
