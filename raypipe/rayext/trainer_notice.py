"""Notices of Ray Train's that nodes of the trainers are about to go, and the checkpoints that they ask for."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

_AGAIN_S = 15.0  # between two checkpoints after a notice
_AGREE_S = 1.0  # between two agreements of the ranks of a train function
_NEAR_S = 5.0  # before the last checkpoint, from when on they agree after each step
# Between the last checkpoint and the node's end: Ray Train notes a checkpoint up to 0.5 s after its report, and
# clocks of machines differ.
_SPARE_S = 1.0
_UNKNOWN_S = 120.0  # after which Ray Train ends the trainers where a node's end is not known
_COMMIT_S = 10.0  # for which a train function waits at most until Ray Train has noted its last checkpoint


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
    """Decides when a run makes checkpoints because its nodes are about to go, and ends it before they do.

    It makes one at each notice, and then every 15 s, or after half the time that is left, if that is less. The
    last is made when there is no time for a further step and its checkpoint. Then the train function ends, in a
    way that Ray Train counts as a preemption: a step that is finished later is lost, and so is a checkpoint that
    Ray Train has not noted when it ends the trainers.

    Args:
        tell: called with the text of each new notice.

    Attributes:
        is_last: whether the checkpoint that is due is the last, after which `begin_step` ends the train function.
            Rank 0 decides; the others are told.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.is_last = False
        self._tell = tell
        self._known: set[str] = set()  # nodes
        self._due_at = self._told_at = 0.0  # of time.time(), as Ray's deadline is
        self._room_s = math.inf  # that is left for steps before the last checkpoint
        self._step_s = self._checkpoint_s = 0.0  # what one takes at most, of late
        self._begun_at, self._asked_at = time.monotonic(), 0.0  # the step; the checkpoint that is being made
        self._steps, self._steps_between, self._agreed_at = 0, 1, time.monotonic()

    def begin_step(self) -> None:
        """Called by all ranks before a step.

        Raises:
            RayActorError: the last checkpoint was made.
        """
        if self.is_last:
            _leave()
        self._begun_at = time.monotonic()
        if self._asked_at:
            self.saved_in(self._begun_at - self._asked_at)
            self._asked_at = 0.0

    def saved_in(self, seconds: float) -> None:
        """Note how long a checkpoint took; `begin_step` does so for one that is whole before the next step."""
        self._checkpoint_s = max(self._checkpoint_s, seconds)

    def is_due(self, at_end: bool = False) -> bool:
        """Tell rank 0, which alone asks, after a step, whether to make a checkpoint now; it counts as made.

        Args:
            at_end: whether nobody will ask for some time, so that one is due in any case.
        """
        try:
            info = noticed()
        except LookupError:
            return False
        if info is None:
            return False
        now, self._step_s = time.time(), max(time.monotonic() - self._begun_at, 0.8 * self._step_s)
        if new := sorted(set(info.preempted_node_ids) - self._known):
            self._known.update(new)
            ranks = ", ".join(map(str, info.preempted_ranks))
            nodes = ", ".join(node[:8] for node in new)
            self._tell(f"the node of trainers {ranks} is about to go ({nodes}): a checkpoint is made")
            self._due_at, self._told_at = 0.0, now
        ends_at = info.deadline_ms / 1000 if info.deadline_ms else self._told_at + _UNKNOWN_S
        turn_s = self._step_s + self._checkpoint_s
        self._room_s = ends_at - now - _SPARE_S - 1.5 * turn_s  # a step may take longer than the ones before it
        self.is_last = self._room_s <= 0
        # One that would still be being written when the last is due would only delay that.
        is_due = at_end or (now >= self._due_at and self._room_s > self._checkpoint_s)
        if not (is_due or self.is_last):
            return False
        self._due_at = now + min(_AGAIN_S, max(self._room_s, 0.0) / 2)
        self._asked_at = time.monotonic()
        return True

    def is_near(self) -> bool:
        """Tell rank 0 whether a node ends so soon that ranks have to agree after each step."""
        return self._room_s <= _NEAR_S

    def agreed(self, rank: int, at_end: bool = False) -> bool:
        """Tell all ranks of a train function what `is_due` tells rank 0. They ask after each step, and meet once a
        second.
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
        asked = rank == 0 and self.is_due(at_end)
        due, self.is_last, self._steps_between = broadcast_from_rank_zero(
            (asked, self.is_last, 1 if self.is_near() else between)
        )
        return due


def _leave() -> None:
    """End this train function, once Ray Train has noted what all ranks have reported."""
    import ray.train
    from ray.exceptions import RayActorError

    with contextlib.suppress(Exception):  # a rank that is gone already will report no more
        ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED, _COMMIT_S)
    # An error of this kind, and no other, is what Ray Train takes for a node that was taken away.
    raise RayActorError(
        error_msg="the node of a trainer is about to go, and the last checkpoint is made", preempted=True
    )
