"""Steps that a run leaves out, see `plan.skip`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Skipped:
    """Steps to leave out, counted from 0.

    Attributes:
        ranges: the first step and the end of each range, in ascending order; between two of them are other steps.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Self:
        """Make it of ranges in any order, which may overlap."""
        joined = list[tuple[int, int]]()
        for first, end in sorted(ranges):
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(end, joined[-1][1])
            else:
                joined.append((first, end))
        return cls(tuple(joined))

    def within(self, first: int, end: int) -> Skipped:
        """The part of it in [first, end)."""
        cut = ((max(first, start), min(end, stop)) for start, stop in self.ranges)
        return Skipped(tuple((start, stop) for start, stop in cut if start < stop))

    def moved(self, by: int) -> Skipped:
        """Return these steps, with a number added to each."""
        return Skipped(tuple((first + by, end + by) for first, end in self.ranges))

    @property
    def count(self) -> int:
        """Number of steps."""
        return sum(end - first for first, end in self.ranges)

    def has(self, step: int) -> bool:
        """Return whether a step is left out."""
        return any(first <= step < end for first, end in self.ranges)

    def step_after(self, first: int, number: int) -> int:
        """Return the step with so many other steps that are not left out between a first step and it."""
        step = first + number
        for start, end in self.within(first, 1 << 62).ranges:
            if step < start:
                break
            step += end - start
        return step


NOTHING = Skipped()
