"""plan.order="relaxed": a stage that hands on whichever micro-batch of a small window is ready.

In the strict order one slow micro-batch holds up all that follow. Here those may overtake it, by less than the
window, and never into another segment: each step still has M micro-batches, each still comes once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.data._internal.execution.backpressure_policy.backpressure_policy import BackpressurePolicy
from ray.data._internal.execution.bundle_queue import ReorderingBundleQueue
from ray.data._internal.execution.operators.actor_pool_map_operator import ActorPoolMapOperator
from typing_extensions import override

from raypipe.cursor import Cursor
from raypipe.order import Kept
from raypipe.plan import Plan
from raypipe.rank_group import EVERY_RANK, RankGroup

if TYPE_CHECKING:
    from ray.data import DataContext

_KEY = "raypipe.relaxed"


def configure(context: DataContext, plan: Plan, cursor: Cursor, group: RankGroup) -> None:
    """Settings of the relaxed order for an execution that starts at a cursor; none where the plan is strict."""
    settings = None
    if plan.config.order == "relaxed":
        per_step = plan.config.per_step
        sizes = (group.count((s.num_steps - s.first_step) * per_step) for s in plan.segments(cursor))
        settings = (plan.config.relaxed_window, list(accumulate(sizes)), cursor.left(per_step), group)
    context.set_config(_KEY, settings)


class RelaxedOrder(BackpressurePolicy):
    """Says yes to everything. Ray Data makes its policies once per execution, with the stages in hand, and has no
    better place to give one of them another queue."""

    def __init__(self, data_context: Any, topology: Any, resource_manager: Any) -> None:
        super().__init__(data_context, topology, resource_manager)
        settings = data_context.get_config(_KEY)
        for op in topology:
            if settings and isinstance(op, ActorPoolMapOperator):
                op._output_queue = RelaxedQueue(*settings)


class RelaxedQueue(ReorderingBundleQueue):
    """Ray Data's queue of a stage's outputs in the order of their inputs, with the order relaxed.

    Args:
        window: micro-batches of the whole stream; a bundle may come before fewer than so many that are not ready.
        ends: ascending; a segment's keys end before each of these, and none overtakes one of an earlier segment.
        left: the places, in the stream, of what is left of it: some others may be done already.
        group: the ranks whose micro-batches the keys 0, 1, 2 … are.
    """

    def __init__(self, window: int, ends: list[int], left: Kept, group: RankGroup = EVERY_RANK) -> None:
        super().__init__()
        self._window, self._ends, self._left, self._group = window, ends, left, group
        self._num_taken = 0
        self._ready: list[int] = []  # a heap of keys, one for each bundle

    @override
    def _add_inner(self, bundle: Any, key: int) -> None:  # type: ignore[override]
        super()._add_inner(bundle, key)
        heapq.heappush(self._ready, key)

    @override
    def has_next(self) -> bool:
        super().has_next()  # moves on to the first key that is not done
        if not self._ready:
            return False
        first, current = self._ready[0], self._current_key
        if first == current:
            return True
        same_segment = bisect_right(self._ends, first) == bisect_right(self._ends, current)
        place, awaited = self._left.indices(self._group.in_stream(np.array([first, current])))
        return bool(same_segment and place < awaited + self._window and self._may_wait(current, int(awaited)))

    def _may_wait(self, key: int, place: int) -> bool:
        """Whether a key, and all after it, are less than the window late if it misses one more turn.

        They are, but where other executions, of other groups, have done far more than this key's was ahead of it.
        """
        done = len(self._left.left_out)
        if not done or key >= self._ends[0]:
            return True
        turn = self._group.in_stream(self._num_taken + 1) + done
        return turn + self._group.world_size - self._group.size < place + self._window

    @override
    def _get_next_inner(self) -> Any:
        if not self.has_next():
            raise ValueError("Cannot pop from empty queue.")
        self._num_taken += 1
        return self._inner[heapq.heappop(self._ready)].popleft()

    @override
    def peek_next(self) -> Any:
        return self._inner[self._ready[0]][0] if self.has_next() else None

    @override
    def clear(self) -> None:
        super().clear()
        self._ready.clear()
