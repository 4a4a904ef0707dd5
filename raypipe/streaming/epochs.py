"""The epochs of a loader, as a loop takes them: each once, in order, its training before its validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raypipe.device.prefetcher import Batch
from raypipe.errors import RaypipeError
from raypipe.metrics.meter import Meter
from raypipe.plan.schedule import Segment


class Rest:
    """What is left of an epoch's training, or of its validation, for this rank.

    Args:
        batches: its micro-batches.
        segment: its place in the plan; None = it is empty.
        meter: learns of what is skipped.
        after: what comes before it.

    Attributes:
        begun: whether any batch was asked for.
    """

    def __init__(
        self, batches: Iterator[Batch], segment: Segment | None, meter: Meter, after: Rest | None = None
    ) -> None:
        self.segment, self.begun = segment, False
        self._batches, self._meter, self._after, self._skipped = batches, meter, after, False

    def take(self) -> Batch:
        """The next batch, see `Pass`."""
        self.begun = True
        if self._after:
            self._after.skip()
        if self._skipped:
            assert self.segment
            raise RaypipeError(
                f"the rest of epoch {self.segment.epoch}'s {self.segment.split} batches was skipped when what "
                "comes after them was asked for: a stream has one order, so validate at the end of an epoch"
            )
        return next(self._batches)

    def skip(self) -> None:
        """Skip what was not taken, here and before it."""
        if self._after:
            self._after.skip()
        for _ in self._batches:
            self._skipped = self._meter.skips = True


class Pass(Iterator[Batch]):
    """This rank's micro-batches of an epoch's training, or of its validation: each once, in order.

    After a resume only the rest of them, possibly none.

    Attributes:
        segment: its place in the plan; None = it is empty.
    """

    def __init__(self, loader: object, rest: Rest, accumulation: int) -> None:
        self._loader = loader  # which ends its stream when nothing holds it
        self._rest, self.segment = rest, rest.segment
        segment = self.segment
        self._len = (segment.num_steps - segment.first_step) * accumulation if segment else 0

    @property
    def begun(self) -> bool:
        """Whether any batch was asked for."""
        return self._rest.begun

    def __len__(self) -> int:
        """Micro-batches in all, those that were taken included."""
        return self._len

    def __next__(self) -> Batch:
        return self._rest.take()


@dataclass(frozen=True)
class Epoch:
    """One epoch, or the rest of it after a resume.

    Attributes:
        number: the epoch's number, from 0.
        train: its training batches.
        val: the batches of the validation after it; empty if the plan has none.
    """

    number: int
    train: Pass
    val: Pass
