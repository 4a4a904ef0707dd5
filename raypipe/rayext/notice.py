"""What Ray Train tells its workers of nodes that are about to go, and when to make checkpoints because of it."""

from __future__ import annotations

import time

_AGAIN_S = 15.0  # between checkpoints of a run that has had a notice


def noticed() -> tuple[str, ...] | None:
    """Nodes of this run's trainers that are about to go, as Ray Train has told this worker, without a call.

    None where it tells nothing: before Ray 2.60, and in a process that is no worker of Ray Train's.
    """
    from ray.train.v2._internal.execution import context

    try:
        info = context.get_train_context().preemption_context.preemption_info
    except (AttributeError, RuntimeError):
        return None
    return tuple(info.preempted_node_ids) if info else ()


class Notice:
    """When a run whose nodes are about to go makes checkpoints: at each notice, and then every 15 s."""

    def __init__(self) -> None:
        self._nodes = self._seen = tuple[str, ...]()
        self._saved_at = 0.0

    def is_due(self, nodes: tuple[str, ...]) -> bool:
        """Whether it is to make one now, by the nodes that are about to go."""
        self._nodes = nodes
        return bool(set(nodes) - set(self._seen)) or (
            bool(nodes) and time.monotonic() - self._saved_at >= _AGAIN_S
        )

    def saved(self) -> None:
        """It makes one."""
        self._seen, self._saved_at = self._nodes, time.monotonic()

    def agreed(self, rank: int) -> bool:
        """Whether to make one, as rank 0 knows it; all ranks of a train function ask, and then make it."""
        from ray.train.collective import broadcast_from_rank_zero

        nodes = noticed()
        if nodes is None:
            return False
        due: bool = broadcast_from_rank_zero(rank == 0 and self.is_due(nodes))
        if due:
            self.saved()
        return due
