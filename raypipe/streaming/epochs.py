"""The epochs of a loader, as a loop takes them: each once, in order, its training before its validation."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from raypipe.device.prefetcher import Batch
from raypipe.mistakes import Unlike
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan, Segment

_logger = logging.getLogger(__name__)


class _Source(Protocol):
    """Source of batches: the loader, which ends its stream when no batches hold it any more."""

    plan: Plan
    rank: int
    world_size: int

    def _deliver(self, batches: Batches, place: MicroBatchId) -> Batch: ...

    def _finish(self, batches: Batches) -> None: ...

    def _leave_early(self, batches: Batches) -> None: ...


class Batches(Iterator[Batch]):
    """This rank's micro-batches of an epoch's training, or of its validation, in order.

    After a resume only the rest of them, possibly none. A validation may be iterated again, at any time: each
    `for` loop gets all of it. A training comes once: a second loop continues where the first was left, and gets
    nothing after the last batch, with a warning if one loop has taken them all.

    A loop that leaves them is through with them: a state that is saved then continues after them, as the loop
    does. Within the loop, a state is between them.

    Args:
        segment: its place in the plan; None = it is empty.
        source: the loader.

    Attributes:
        begun: whether any batch was asked for.
    """

    def __init__(self, segment: Segment | None, source: _Source) -> None:
        self.segment = segment
        self.begun = False
        self._source = source
        self._num_taken = 0
        self._num_loops = 0
        self._was_left = False
        self._was_whole = False  # one loop has taken all of it
        self._len = 0
        if segment:
            per_step = source.plan.config.per_step // source.world_size
            self._len = segment.num_delivered * per_step

    def __len__(self) -> int:
        """Micro-batches in all, those that were taken included."""
        return self._len

    @property
    def is_open(self) -> bool:
        """True if a loop takes more of it: none has begun yet, or one that began has not been left."""
        is_running = not self.begun or self._num_loops > 0
        return self._num_taken < self._len and is_running and not self._was_left

    def leave(self) -> None:
        """Say that no loop takes the rest of it: a validation from now on is the one at the epoch's end.

        A `for` loop that is left by `break` says so itself. Loops of libraries keep their iterators.
        """
        self._was_left = True
        self._source._leave_early(self)

    def is_look(self, also_in_loop: bool) -> bool:
        """Return whether only the first batch was taken, by `next(iter(…))`, or also in a loop that continues."""
        return self._num_taken == 1 < self._len and (
            also_in_loop or not self._num_loops
        )

    def __next__(self) -> Batch:
        self.begun = True
        if self.segment is None or self._num_taken == self._len:
            self._source._finish(self)
            raise StopIteration
        share = (self._source.rank, self._source.world_size)
        place = self._source.plan.place_in(self.segment, self._num_taken, share)
        batch = self._source._deliver(self, place)
        self._num_taken += 1
        return batch

    def __iter__(self) -> Iterator[Batch]:
        if self.segment and self.segment.split == "val":
            # each loop has its own, and gets all of it
            return Batches(self.segment, self._source)._remaining()
        if self.segment and self._num_taken == self._len and self._was_whole:
            _logger.warning(
                "all batches of epoch %d's training were taken, and a training comes once: this loop gets none. "
                "Continue with the next epoch of loader.epochs(). To see the same batches again without training, "
                "make another loader: raypipe.loader(spec, cursor=spec.plan.cursor_at(STEP))",
                self.segment.epoch,
            )
        return self._remaining()

    def _remaining(self) -> Iterator[Batch]:
        self.begun = True
        self._num_loops += 1
        num_before = self._num_taken
        try:
            while (batch := next(self, None)) is not None:
                yield batch
        finally:
            self._num_loops -= 1
            self._was_whole |= not num_before and self._num_taken == self._len
            if not self._num_loops and self._num_taken < self._len:
                self._source._leave_early(self)


@dataclass(frozen=True)
class Epoch(Unlike, instead="iterate epoch.train, and then epoch.val"):
    """Epoch of a loader, or the rest of it after a resume.

    Attributes:
        number: the epoch's number, from 0.
        train: its training batches.
        val: validation batches after it; empty without validation.
    """

    number: int
    train: Batches
    val: Batches
