"""Notices of Ray Train's that nodes of the trainers are about to go, and the checkpoints that they ask for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

_AGAIN_S = 15.0  # between two checkpoints after a notice
_AGREE_S = 1.0  # between two agreements of the ranks of a train function
_LAST_S = 2.0  # before a node's end, in which each step has a checkpoint


def noticed() -> Any:
    """Return Ray Train's PreemptionInfo of this worker's run, without a call; None = there was no notice.

    Raises:
        LookupError: Ray Train gives none: before Ray 2.60, and outside of its workers.
    """
    from ray.train.v2._internal.execution import context

    try:
        return context.get_train_context().preemption_context.preemption_info
    except (AttributeError, RuntimeError) as error:
        raise LookupError("Ray Train gives this process no notices") from error


class Notice:
    """Decides when a run makes checkpoints because its nodes are about to go.

    It makes one at each notice, and then every 15 s; after half the time that is left, if that is less; and after
    each step of the last 2 s, so that no more than a step is lost.

    Args:
        tell: called with the text of each new notice.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._known: set[str] = set()  # nodes
        self._due_at = self._ends_at = 0.0  # of time.time(), as Ray's deadline is
        self._steps, self._steps_between, self._agreed_at = 0, 1, time.monotonic()

    def is_due(self) -> bool:
        """Tell rank 0, which alone asks, whether to make a checkpoint now; it counts as made."""
        try:
            info = noticed()
        except LookupError:
            return False
        if info is None:
            return False
        if new := sorted(set(info.preempted_node_ids) - self._known):
            self._known.update(new)
            ranks = ", ".join(map(str, info.preempted_ranks))
            nodes = ", ".join(node[:8] for node in new)
            self._tell(f"the node of trainers {ranks} is about to go ({nodes}): a checkpoint is made")
            self._due_at = 0.0
        now = time.time()
        if now < self._due_at:
            return False
        self._ends_at = info.deadline_ms / 1000 if info.deadline_ms else math.inf
        left_s = self._ends_at - now
        self._due_at = now + (0.0 if 0 < left_s <= _LAST_S else max(_AGREE_S, min(_AGAIN_S, left_s / 2)))
        return True

    def is_near(self) -> bool:
        """Tell rank 0 whether a node ends so soon that ranks have to agree after each step."""
        return 0 < self._ends_at - time.time() <= _LAST_S + _AGREE_S

    def agreed(self, rank: int) -> bool:
        """Tell all ranks of a train function what `is_due` tells rank 0. They ask after each step, and meet once a
        second.
        """
        from ray.train.collective import broadcast_from_rank_zero

        try:
            noticed()
        except LookupError:
            return False
        self._steps += 1
        if self._steps < self._steps_between:
            return False
        now = time.monotonic()
        between = max(1, int(self._steps * _AGREE_S / max(now - self._agreed_at, 1e-6)))
        self._steps, self._agreed_at = 0, now
        due: bool
        asked = rank == 0 and self.is_due()
        due, self._steps_between = broadcast_from_rank_zero((asked, 1 if self.is_near() else between))
        return due
