"""Ray Train's preemption notices for the trainers' nodes, and the checkpoints that follow them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

_AGAIN_S = 15.0  # period of checkpoints after a notice
_NEAR_S = 5.0  # time before the last checkpoint in which ranks agree after each step
# Reserve between the last checkpoint and the node's end: Ray Train registers a checkpoint up to 0.5 s after its
# report, and the machines' clocks differ.
_SPARE_S = 1.0
_UNKNOWN_S = 120.0  # time until Ray Train ends the trainers if a node's end is unknown
_COMMIT_S = 10.0  # longest wait of a train function for Ray Train to register its last checkpoint


def noticed() -> Any:
    """Return Ray Train's PreemptionInfo of this worker's run, without a remote call; None = no notice.

    There is none before Ray 2.60, and outside of Ray Train's workers.
    """
    from ray.train.v2._internal.execution import context

    try:
        return context.get_train_context().preemption_context.preemption_info
    except (AttributeError, RuntimeError):
        return None


class Notice:
    """Decides on checkpoints of a run whose nodes are about to go, and ends the run before the nodes end.

    A checkpoint is due at each notice, and then every 15 s or after half of the remaining time, if that is less.
    The last is due when no time remains for another step and its checkpoint. Then the train function ends with an
    error that Ray Train counts as a preemption. A later step would be lost, as would a checkpoint that Ray Train
    has not registered before it ends the trainers.

    Attributes:
        is_last: whether the due checkpoint is the last one, after which `begin_step` ends the train function. Rank
            0 decides it, and all ranks agree on it.
    """

    def __init__(self) -> None:
        self.is_last = False
        self._known: set[str] = set()  # nodes
        self._due_at = self._notified_at = 0.0  # time.time(), like Ray's deadline
        self._room_s = math.inf  # time for steps before the last checkpoint
        self._step_s = self._checkpoint_s = 0.0  # recent maximum
        self._begun_at = time.monotonic()
        self._asked_at = 0.0  # start of the step, and of the current checkpoint

    def begin_step(self) -> None:
        """Start a step; all ranks must call it.

        Raises:
            RayActorError: the last checkpoint has been made.
        """
        if self.is_last:
            _leave()
        self._begun_at = time.monotonic()
        if self._asked_at:
            self.saved_in(self._begun_at - self._asked_at)
            self._asked_at = 0.0

    def saved_in(self, seconds: float) -> None:
        """Record a checkpoint's duration; `begin_step` does so if the checkpoint ends before the next step."""
        self._checkpoint_s = max(self._checkpoint_s, seconds)

    def is_due(self, tell: Callable[[str], None], at_end: bool = False) -> bool:
        """Return whether to make a checkpoint now, which then counts as made. Only rank 0 calls it, after a step.

        Args:
            tell: called with the text of each new notice.
            at_end: whether no call follows for some time, so that a checkpoint is due in any case.
        """
        info = noticed()
        if info is None:
            return False
        now = time.time()
        step_s = time.monotonic() - self._begun_at
        self._step_s = max(step_s, 0.8 * self._step_s)
        if new := sorted(set(info.preempted_node_ids) - self._known):
            self._known.update(new)
            ranks = ", ".join(map(str, info.preempted_ranks))
            nodes = ", ".join(node[:8] for node in new)
            tell(
                f"the node of trainers {ranks} is about to go ({nodes}): making a checkpoint"
            )
            self._due_at = 0.0
            self._notified_at = now
        if info.deadline_ms:
            ends_at = info.deadline_ms / 1000
        else:
            ends_at = self._notified_at + _UNKNOWN_S
        turn_s = self._step_s + self._checkpoint_s
        # a step may take longer than those before
        self._room_s = ends_at - now - _SPARE_S - 1.5 * turn_s
        self.is_last = self._room_s <= 0
        # A checkpoint that is still being written when the last one is due would only delay it.
        is_due = at_end or (now >= self._due_at and self._room_s > self._checkpoint_s)
        if not (is_due or self.is_last):
            return False
        self._due_at = now + min(_AGAIN_S, max(self._room_s, 0.0) / 2)
        self._asked_at = time.monotonic()
        return True

    def is_near(self) -> bool:
        """Return, on rank 0, whether a node ends so soon that ranks have to agree after each step."""
        return self._room_s <= _NEAR_S


def _leave() -> None:
    """End this train function, after Ray Train has registered the reports of all ranks."""
    import ray.train
    from ray.exceptions import RayActorError

    with contextlib.suppress(Exception):
        # a rank that has already ended reports nothing more
        ray.train.get_all_reported_checkpoints(
            ray.train.CheckpointConsistencyMode.COMMITTED, _COMMIT_S
        )
    # Only an error of this type counts as a preemption in Ray Train.
    raise RayActorError(
        error_msg="the node of a trainer is about to go, and the last checkpoint has been made",
        preempted=True,
    )
