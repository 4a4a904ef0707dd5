"""Progress of a rank in its run, and the place at which a resume continues. Pure."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from raypipe.plan.places import Cursor, Split
from raypipe.plan.schedule import Plan, Segment

if TYPE_CHECKING:
    from raypipe.device.prefetcher import Batch

Segments = dict[Split, Segment]
"""The rest of an epoch: of its training, if any is left, and its validation, if the plan has one."""


class Progress:
    """Place of a loop over epochs, which takes their batches, and may leave them early.

    Args:
        plan: the run's plan.
        start: the first place, see `Plan.start`.

    Attributes:
        start: that place.
        cursor: place after the last step of which all batches were taken, or after an epoch.
        epoch: the epoch that was begun last; before the first one the number before it.
        segments: its segments; empty = no epoch is under way.
        num_in_step: batches that were taken of the training step under way, behind the cursor.
    """

    def __init__(self, plan: Plan, start: Cursor) -> None:
        self._plan = plan
        self.start = start
        self.cursor = start
        self.epoch = start.epoch - 1
        self.segments: Segments = {}
        self.num_in_step = 0
        # the split that the loop has left early
        self._left: Split | None = None

    @property
    def is_at_end(self) -> bool:
        """True if no epoch is left at the cursor."""
        return next(self._plan.segments(self.cursor), None) is None

    def next_epoch(self) -> bool:
        """Begin the epoch at the cursor; returns whether there is one."""
        self._left = None
        self.num_in_step = 0
        segments = self._plan.segments(self.cursor)
        by_epoch = groupby(segments, lambda segment: segment.epoch)
        for epoch, of_epoch in by_epoch:
            self.epoch = epoch
            self.segments = {segment.split: segment for segment in of_epoch}
            return True
        self.segments = {}
        return False

    def leave_epoch(self) -> None:
        """Go behind the epoch, over what was not taken of it."""
        if self.cursor.epoch > self.epoch:
            return
        if "val" in self.segments:
            self._stand_at(self.epoch + 1, 0)
        else:
            self._stand_at(self.epoch, self.segments["train"].num_steps)

    def leave_loop(self) -> None:
        """The loop over the epochs was left: the next one begins at the cursor."""
        self.segments = {}

    def take(self, batch: Batch, is_at_end: bool) -> None:
        """Count a batch.

        Args:
            is_at_end: whether it belongs to the validation behind an epoch's training.
        """
        place = batch.position
        if place.split == "train":
            self._left = None
            self.num_in_step += 1
            segment = self.segments.get("train")
            if batch.ends_split and segment:
                # steps that are skipped after it are done
                self._stand_at(place.epoch, segment.num_steps)
            elif batch.ends_step:
                self._stand_at(place.epoch, place.step + 1)
        elif is_at_end:
            if self._left:
                self._left = "train"
            if batch.ends_split and self.cursor.epoch <= place.epoch:
                self._stand_at(place.epoch + 1, 0)

    def leave_early(self, split: Split) -> None:
        """A loop has left the epoch's batches of a split before their end."""
        self._left = split

    def place(self, is_in_loop: bool) -> Cursor:
        """Return the place from which a resume does what the loop would do next.

        Args:
            is_in_loop: whether the loop over the epochs continues; else the next one begins at the cursor.
        """
        if not (is_in_loop and self._left and self.cursor.epoch == self.epoch):
            return self._plan.normalized(self.cursor)
        if self._left == "val":
            after = self._plan.cursor(self.epoch + 1, 0)
        else:
            after = self._plan.cursor(self.epoch, self._plan.steps_per_epoch)
        return self._plan.normalized(after)

    def _stand_at(self, epoch: int, step: int) -> None:
        self.cursor = self._plan.cursor(epoch, step)
        self.num_in_step = 0
