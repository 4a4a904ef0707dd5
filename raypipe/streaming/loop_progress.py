"""The place of a loop in its run, behind the batches that it has taken. Pure."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from raypipe.plan.places import Cursor, MicroBatchId, Split
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
        segments: its segments, in a mapping of its own; empty = no epoch is under way.
        last: place of the batch that was taken last in this epoch; None = none was.
        ended_split: whether that was the last one of a training, or of a validation.
        in_step: place of the last batch that was taken of the training step under way; None = none is.
    """

    def __init__(self, plan: Plan, start: Cursor) -> None:
        self._plan = plan
        self.start = start
        self.cursor = start
        self.epoch = start.epoch - 1
        self.segments: Segments = {}
        self._begin()

    def _begin(self) -> None:
        """No batch of the epoch was taken."""
        self.last: MicroBatchId | None = None
        self.ended_split = False
        self.in_step: MicroBatchId | None = None
        # the next place of a loop that has left batches of the epoch
        self._behind: Cursor | None = None

    @property
    def is_at_end(self) -> bool:
        """True if no epoch is left at the cursor."""
        return next(self._plan.segments(self.cursor), None) is None

    def next_epoch(self) -> bool:
        """Begin the epoch at the cursor; returns whether there is one."""
        self._begin()
        # a training and its validation, or one of them and another epoch's
        segments = list(islice(self._plan.segments(self.cursor), 2))
        if segments:
            self.epoch = segments[0].epoch
        self.segments = {
            segment.split: segment
            for segment in segments
            if segment.epoch == self.epoch
        }
        return bool(segments)

    def leave_epoch(self) -> None:
        """Go behind the epoch, over what was not taken of it."""
        if self.cursor.epoch <= self.epoch:
            self.cursor = self._after("val" if "val" in self.segments else "train")

    def leave_loop(self) -> None:
        """The loop over the epochs was left: the next one begins at the cursor."""
        self.segments = {}

    def take(self, batch: Batch, is_at_end: bool) -> None:
        """Take a batch: its place is the loop's.

        Args:
            is_at_end: whether it belongs to the validation behind an epoch's training.
        """
        place = self.last = batch.position
        self.ended_split = batch.ends_split
        if place.split == "train":
            self._behind = None
            self.in_step = place
            if batch.ends_step:
                self.in_step = None
                self.cursor = self._plan.cursor(place.epoch, place.step + 1)
            if batch.ends_split:
                # steps that are skipped after it are done
                self.cursor = self._after("train")
        elif is_at_end:
            if self._behind:
                self._behind = self._after("train")
            if batch.ends_split and self.cursor.epoch <= place.epoch:
                self.cursor = self._after("val")

    def leave_early(self, split: Split) -> None:
        """A loop has left the epoch's batches of a split before their end."""
        self._behind = self._after(split)

    def place(self, is_in_loop: bool) -> Cursor:
        """Return the place from which a resume does what the loop would do next.

        Args:
            is_in_loop: whether the loop over the epochs continues; else the next one begins at the cursor.
        """
        is_left = is_in_loop and self.cursor.epoch == self.epoch
        return self._plan.normalized((is_left and self._behind) or self.cursor)

    def _after(self, split: Split) -> Cursor:
        """The place behind the epoch's training, or behind its validation."""
        if split == "val":
            return self._plan.cursor(self.epoch + 1, 0)
        segment = self.segments.get("train")
        end = segment.num_steps if segment else self._plan.steps_per_epoch
        return self._plan.cursor(self.epoch, end)
