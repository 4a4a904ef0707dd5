"""The place of a rank in its stream, and the distance from there to another micro-batch. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Segment


class Remaining:
    """Micro-batches that a rank's stream still brings, in order.

    Args:
        segments: the stream's, in order; they may be many, and are asked for one by one.
        per_step: M.
        rank, world_size: the rank gets the micro-batches m of each step with m mod W = its number.
    """

    def __init__(
        self, segments: Iterable[Segment], per_step: int, rank: int, world_size: int
    ) -> None:
        self._later: Iterator[Segment] = iter(segments)
        self._known = deque[Segment]()
        self._per_rank = per_step // world_size
        self._rank = rank
        self._world_size = world_size
        self._num_taken = 0  # micro-batches of the first segment

    def take(self) -> None:
        """The next micro-batch was taken."""
        self._num_taken += 1
        if self._num_taken == self._length(self._segments()[0]):
            self._known.popleft()
            self._num_taken = 0

    @property
    def next(self) -> MicroBatchId | None:
        """The one that comes next; None = all were taken."""
        segments = self._segments()
        if not segments:
            return None
        step, turn = divmod(self._num_taken, self._per_rank)
        first = segments[0]
        return MicroBatchId(
            first.split,
            first.epoch,
            first.step_of(step),
            self._rank + turn * self._world_size,
        )

    @property
    def is_at_start(self) -> bool:
        """True if the next one is the first of its segment."""
        return self._num_taken == 0

    def before(self, position: MicroBatchId) -> int | None:
        """Return how many come before the one at a place; None = it does not come, or no more."""
        num = -self._num_taken
        for segment in self._each():
            if (segment.split, segment.epoch) == (position.split, position.epoch):
                number = segment.number_of(position.step)
                if number is None:
                    return None
                turn = (position.micro - self._rank) // self._world_size
                num += number * self._per_rank + turn
                return num if num >= 0 else None
            if segment.epoch > position.epoch:
                return None
            num += self._length(segment)
        return None

    def _length(self, segment: Segment) -> int:
        return segment.num_delivered * self._per_rank

    def _segments(self) -> deque[Segment]:
        """The segments that are known, with the next one if there is any."""
        if not self._known:
            self._known.extend(
                segment for segment in [next(self._later, None)] if segment
            )
        return self._known

    def _each(self) -> Iterator[Segment]:
        yield from list(self._known)
        for segment in self._later:
            self._known.append(segment)
            yield segment
