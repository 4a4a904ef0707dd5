"""Buckets: samples of a like shape, so that each micro-batch has one shape. Numpy only.

    bucket       | 0: n_0 samples      | 1: n_1 …  | …      a sample is in that of the nearest aspect ratio
    places       | 0 | 1 | … ⌊n_0/U⌋-1 | …         | … T-1  places of U samples; fewer than U of each are left over
    epoch        a permutation of all T places, as many as make whole steps; each bucket permutes its samples

All of it is keyed anew in each pass, so other samples and places are left over. Any place is found in O(buckets).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypipe.plan.draws import Drawn
from raypipe.plan.order import NUM_ROUNDS, Domain, GlobalOrder, derive_keys, permute
from raypipe.plan.selection import Chosen

Sides = tuple[int, int]
"""(height, width), pixels."""


def nearest(widths: np.ndarray, heights: np.ndarray, buckets: Sequence[Sides]) -> np.ndarray:
    """The bucket of each image, intp (n,), by its sides, positive (n,), which are whole numbers.

    It is that of the nearest aspect ratio, by the ratio of the ratios; of several such that of the nearest area,
    likewise; of several such the first.
    """
    widths, heights = widths.astype(np.float64), heights.astype(np.float64)
    found = np.zeros(len(widths), np.intp)
    least = np.full((2, len(widths)), np.inf)
    for number, (height, width) in enumerate(buckets):
        # Products of whole numbers are exact here, and so equal ratios are equal numbers.
        ratio = _apart(widths * height, heights * width)
        area = _apart(widths * heights, np.float64(width * height))
        nearer = (ratio < least[0]) | ((ratio == least[0]) & (area < least[1]))
        found[nearer] = number
        least[:, nearer] = ratio[nearer], area[nearer]
    return found


def _apart(one: np.ndarray, other: np.ndarray | np.float64) -> np.ndarray:
    return np.maximum(one, other) / np.minimum(one, other)


class Bucketed:
    """A leaf of which each place of `unit` draws has one bucket, and no pass draws a sample twice.

    Args:
        sides: height and width of each bucket.
        members: the samples of each bucket.
        unit: U, draws in a place.
        seed: the run's.

    Attributes:
        size: draws in a pass, T·U.
        counts: places of each bucket in a pass, int64 (buckets,).
    """

    copies = 1

    def __init__(self, sides: Sequence[Sides], members: Sequence[Chosen], unit: int, seed: int) -> None:
        self.sides, self.members, self.unit, self._seed = tuple(sides), list(members), unit, seed
        self.counts = np.array([len(each.chosen) // unit for each in members], np.int64)
        self._ends = np.cumsum(self.counts)
        self.size = int(self._ends[-1]) * unit

    def draws(self, number: int, positions: np.ndarray) -> Drawn:
        """See `Leaf.draws`."""
        wanted, rows = np.divmod(positions, self.unit)
        keys = derive_keys(NUM_ROUNDS, self._seed, Domain.BUCKET, number)
        places = permute(wanted, self.size // self.unit, keys)
        buckets = np.searchsorted(self._ends, places, side="right")
        inside = (places - self._ends[buckets] + self.counts[buckets]) * self.unit + rows
        indices = np.empty(len(positions), np.int64)
        for bucket in np.unique(buckets).tolist():
            here = buckets == bucket
            indices[here] = self._of_bucket(bucket, number, inside[here])
        return indices, None

    def _of_bucket(self, bucket: int, number: int, positions: np.ndarray) -> np.ndarray:
        members = self.members[bucket]
        seed = int(derive_keys(1, self._seed, Domain.BUCKET_ORDER, bucket)[0])
        return members.indices(GlobalOrder(len(members.chosen), seed).indices(number, positions))

    def bucket_of(self, index: int) -> int:
        """The bucket of a sample that is in one."""
        for number, members in enumerate(self.members):
            place = int(members.numbers(np.array([index]))[0])
            if place < len(members.chosen) and members.chosen[place] == index:
                return number
        raise AssertionError(f"sample {index} is in no bucket")

    def another(self, index: int, key: np.uint64) -> int:
        """A sample of the same bucket, by a key."""
        members = self.members[self.bucket_of(index)]
        return int(members.indices(np.array([key % np.uint64(len(members.chosen))], np.int64))[0])

    def parts(self) -> list[object]:
        """What determines it, as JSON has it, beside the seed."""
        pairs = zip(self.sides, self.members, strict=True)
        return ["buckets", *([*sides, members.signature()] for sides, members in pairs)]
