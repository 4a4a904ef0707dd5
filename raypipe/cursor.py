"""The place where a run stands: all that a resume needs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from raypipe.errors import CursorError, RaypipeError
from raypipe.order import Kept

CURSOR_FILE = "cursor.json"
"""The file of a checkpoint that holds the cursor."""


@dataclass(frozen=True)
class Cursor:
    """All that a resume needs.

    Attributes:
        epoch: training epoch e.
        step: steps of epoch e that are done. Equal to the steps in an epoch: validation e is next.
        fingerprint: of the plan, so that no checkpoint continues another plan's stream.
        ahead: with plan.order="relaxed", numbers, counted through epoch e, of micro-batches that are done before
            their turn; ascending. Of the others, the first step·M - len(ahead) are done.
    """

    epoch: int
    step: int
    fingerprint: str
    ahead: tuple[int, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Cursor:
        """Raises CursorError when the text is not a cursor."""
        try:
            fields = json.loads(text)
            ahead = tuple(int(number) for number in fields.get("ahead", ()))
            return Cursor(int(fields["epoch"]), int(fields["step"]), str(fields["fingerprint"]), ahead)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise CursorError(f"not a cursor: {text[:200]!r} ({error})") from None

    def frontier(self, per_step: int) -> int:
        """The number of the first micro-batch of the epoch that is not done; those in `ahead` come after it."""
        return self.step * per_step - len(self.ahead)

    def left(self, per_step: int) -> Kept:
        """Which micro-batches of the epoch are left, counted from the frontier on."""
        return Kept(np.array(self.ahead, np.int64) - self.frontier(per_step))


def ahead_of(done: int, window: int, numbers: Iterable[int]) -> tuple[int, ...]:
    """Which of the micro-batches that are done came before their turn.

    Args:
        done: how many are done.
        window: how far before its turn one may come; so all below done - window are done.
        numbers: those that are done from there on, in any order, and maybe others below.
    """
    first = max(0, done - window)
    late = sorted({number for number in numbers if number >= first})
    in_turn = 0
    while in_turn < len(late) and late[in_turn] == first + in_turn:
        in_turn += 1
    if first + len(late) != done:
        raise RaypipeError(f"{done} micro-batches are done, but {first + len(late)} were seen: please report this")
    return tuple(late[in_turn:])
