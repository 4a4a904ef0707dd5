"""The epochs of a loader, as a loop takes them: each once, in order, its training before its validation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raypipe.device.prefetcher import Batch
from raypipe.errors import RaypipeError
from raypipe.mistakes import Unlike
from raypipe.plan.schedule import Segment


class Pass(Iterator[Batch]):
    """This rank's micro-batches of an epoch's training, or of its validation: each once, in order.

    After a resume only the rest of them, possibly none. A loop that leaves them is through with them: a state that
    is saved then continues after them, as the loop does. Within the loop, a state is in their midst.

    Args:
        batches, before: its own, and those that come before them; neither holds the loader.
        check, skip, leave: methods of the loader, which ends its stream when nothing holds it.
        accumulation_steps: see `Loader.accumulation_steps`.

    Attributes:
        segment: its place in the plan; None = it is empty.
        begun: whether any batch was asked for.
    """

    def __init__(
        self,
        segment: Segment | None,
        batches: Iterator[Batch],
        before: Iterator[Batch],
        check: Callable[[], None],
        skip: Callable[[Iterator[Batch]], None],
        leave: Callable[[Segment], None],
        accumulation_steps: int,
    ) -> None:
        self.segment, self.begun = segment, False
        self._batches, self._before, self._num_taken = batches, before, 0
        self._check, self._skip, self._leave = check, skip, leave
        self._len = (segment.num_steps - segment.first_step) * accumulation_steps if segment else 0

    def __len__(self) -> int:
        """Micro-batches in all, those that were taken included."""
        return self._len

    def __iter__(self) -> Iterator[Batch]:
        try:
            while (batch := next(self, None)) is not None:
                yield batch
        finally:
            if self.segment and self._num_taken < self._len:
                self._leave(self.segment)

    def __next__(self) -> Batch:
        self.begun = True
        self._skip(self._before)
        batch = next(self._batches, None)
        if batch is not None:
            self._num_taken += 1
            return batch
        if self.segment and self._num_taken < self._len:
            self._check()
            raise RaypipeError(
                f"the rest of epoch {self.segment.epoch}'s {self.segment.split} batches was skipped when what "
                "comes after them was asked for: a stream has one order, so validate at the end of an epoch"
            )
        raise StopIteration


@dataclass(frozen=True)
class Epoch(Unlike, instead="iterate epoch.train, and then epoch.val"):
    """Epoch of a loader, or the rest of it after a resume.

    Attributes:
        number: the epoch's number, from 0.
        train: its training batches.
        val: validation batches after it; empty without validation.
    """

    number: int
    train: Pass
    val: Pass
