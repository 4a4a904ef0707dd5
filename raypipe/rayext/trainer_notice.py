"""Ray Train's preemption notices for the trainers' nodes, and the checkpoints that follow them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_AGAIN_S, _LEAST_S = 15.0, 1.0  # longest and shortest period of checkpoints after a notice
_AGREE_S = 1.0  # period in which the ranks of a train function agree
_UNKNOWN_S = 120.0  # time until Ray Train ends the trainers if a node's end is unknown


def noticed() -> Any:
    """Return Ray Train's PreemptionInfo of this worker's run, without a remote call; None = no notice.

    Raises:
        LookupError: Ray Train has no notices: before Ray 2.60, or outside its workers.
    """
    from ray.train.v2._internal.execution import context

    try:
        return context.get_train_context().preemption_context.preemption_info
    except (AttributeError, RuntimeError) as error:
        raise LookupError("Ray Train has no preemption notices for this process") from error


class Notice:
    """Decides on checkpoints of a run whose nodes are about to go.

    A checkpoint is due at each notice, and then every 15 s or after half of the remaining time, if that is less.
    Ray Train ends the trainers with the first of their nodes, and starts them again from the last checkpoint.

    Args:
        tell: called with the text of each new notice.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._known: set[str] = set()  # nodes
        self._due_at = self._notified_at = 0.0  # time.time(), like Ray's deadline
        self._steps, self._steps_between, self._agreed_at = 0, 1, time.monotonic()

    def is_due(self, at_end: bool = False) -> bool:
        """Return whether to make a checkpoint now, which then counts as made. Only rank 0 calls it, after a step.

        Args:
            at_end: whether no call follows for some time, so that a checkpoint is due in any case.
        """
        try:
            info = noticed()
        except LookupError:
            return False
        if info is None:
            return False
        now = time.time()
        if new := sorted(set(info.preempted_node_ids) - self._known):
            self._known.update(new)
            ranks = ", ".join(map(str, info.preempted_ranks))
            nodes = ", ".join(node[:8] for node in new)
            self._tell(f"the node of trainers {ranks} is about to go ({nodes}): making a checkpoint")
            self._due_at, self._notified_at = 0.0, now
        if now < self._due_at and not at_end:
            return False
        ends_at = info.deadline_ms / 1000 if info.deadline_ms else self._notified_at + _UNKNOWN_S
        self._due_at = now + min(_AGAIN_S, max(_LEAST_S, (ends_at - now) / 2))
        return True

    def agreed(self, rank: int, at_end: bool = False) -> bool:
        """Return rank 0's `is_due` on all ranks of a train function. All call it after each step; they synchronize
        about once a second.
        """
        from ray.train.collective import broadcast_from_rank_zero

        try:
            noticed()
        except LookupError:
            return False
        self._steps += 1
        if self._steps < self._steps_between and not at_end:
            return False
        now = time.monotonic()
        between = max(1, int(self._steps * _AGREE_S / max(now - self._agreed_at, 1e-6)))
        self._steps, self._agreed_at = 0, now
        due: bool
        due, self._steps_between = broadcast_from_rank_zero((rank == 0 and self.is_due(at_end), between))
        return due
