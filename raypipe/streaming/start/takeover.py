"""Place at which the pool takes over from the ranks, which make the first micro-batches themselves. Pure.

Takeover   the place, as the stream's Supervisor knows it
joined     a rank's own micro-batches, then the pool's, without a gap and without repetition
"""

from __future__ import annotations

from collections.abc import Iterator

from raypipe.plan.places import MicroBatchId
from raypipe.streaming.moves import stream_place
from raypipe.transform.fields import MicroBatch


class Takeover:
    """Place at which the pool takes over from the ranks. Pure.

    Attributes:
        num: micro-batches that each rank makes before it.
        is_final: whether it has been told to the pool, and so no longer changes.
        error: the pickled error with which the pool has failed; empty = it has not.
    """

    def __init__(self) -> None:
        self.num = 0
        self.is_final = False
        self.error = b""
        self._may_grow = True

    def extend(self, num: int) -> None:
        """Rank 0 makes so many micro-batches, if the pool has not begun."""
        if self._may_grow and not self.is_final:
            self.num = max(self.num, num)

    def end(self, num: int) -> None:
        """A rank cannot make more than so many: the pool takes over there, if it has not begun."""
        if not self.is_final:
            self.num = min(self.num, num)
            self._may_grow = False

    @property
    def state(self) -> tuple[int, bool, bytes]:
        """The attributes, for a rank."""
        return self.num, self.is_final, self.error

    def fix(self) -> int:
        """The pool begins; returns the place."""
        self.is_final = True
        return self.num


class GapError(Exception):
    """The pool does not begin at the next place."""


class HeadStartLostError(Exception):
    """The rank could not make a micro-batch behind which the pool has already begun.

    Attributes:
        error: the reason.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def joined(
    head: Iterator[MicroBatch],
    pool: Iterator[MicroBatch],
    places: Iterator[MicroBatchId],
) -> Iterator[MicroBatch]:
    """Yield a rank's own micro-batches, then the pool's from the next place on.

    The pool may begin earlier, where another rank could make fewer.

    Args:
        places: places of the rank's share, in order.

    Raises:
        GapError: the pool begins later.
    """
    for batch in head:
        place = next(places)
        assert batch.position == place
        yield batch
    upcoming = next(places, None)
    if upcoming is None:
        return
    first = None
    for batch in pool:
        if _order(batch.position) >= _order(upcoming):
            first = batch
            break
    if first is None or first.position != upcoming:
        raise GapError(f"the pool does not begin at {upcoming}")
    yield first
    del first, batch
    yield from pool


def _order(position: MicroBatchId) -> tuple[int, int, int, int]:
    return *stream_place(position), position.micro
