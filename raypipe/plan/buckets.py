"""Buckets: samples of a like shape, so that each micro-batch has one shape. Numpy only.

    bucket       | 0: n_0 samples      | 1: n_1 …  | …      a sample is in that of the nearest aspect ratio
    places       | 0 | 1 | … ⌊n_0/U⌋-1 | …         | … T-1  places of U draws; fewer than U of each are left over
    epoch        a permutation of all T places, as many as make whole steps; each bucket permutes its samples

All of it is keyed anew in each pass, so other samples and places are left over. Any place is found in O(buckets).
With weights each bucket has its share of the T places, rounded down or up, and draws for these by the weights of
its samples: nothing is left over. Of several stores see `mixed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from raypipe.plan.draws import Drawn, Leaf, Once, Part, Passes
from raypipe.plan.mixture import ONE, Mixture, Seats, Turns, as_shares
from raypipe.plan.order import NUM_ROUNDS, Domain, StoredOrder, derive_keys, permute
from raypipe.plan.places import PADDING
from raypipe.plan.selection import Chosen
from raypipe.plan.weights import Weighted

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


@dataclass(frozen=True)
class Bucket:
    """The samples of a store that are in a bucket.

    Attributes:
        members: which samples these are.
        leaf: draws them; each once in a pass, or by weights; None = there are none, or none that has a weight.
    """

    members: Chosen
    leaf: Leaf | None

    @property
    def size(self) -> int:
        """How many samples it has."""
        return len(self.members.chosen)

    @property
    def weight(self) -> int:
        """Of all its samples, in the unit of the store's other buckets."""
        if self.leaf is None:
            return 0
        return self.leaf.total if isinstance(self.leaf, Weighted) else self.size

    def another(self, key: np.uint64) -> int:
        """One of its samples, by a key."""
        assert self.leaf is not None, "a bucket that is drawn from has samples"
        if isinstance(self.leaf, Weighted):
            return int(self.leaf.draws(0, np.array([key % np.uint64(self.leaf.size)], np.int64))[0][0])
        return int(self.members.indices(np.array([key % np.uint64(self.size)], np.int64))[0])

    def parts(self) -> list[str]:
        """What determines it, as JSON has it, beside the seed and its sides."""
        signature = self.members.signature()
        return [signature, self.leaf.signature()] if isinstance(self.leaf, Weighted) else [signature]


class Bucketed(Leaf):
    """A leaf of which each place of `unit` draws has one bucket.

    Args:
        buckets: of a store.
        unit: U, draws in a place.
        seed: the run's.
        num_places: T, of which each bucket has its share by the weights; 0 = each has as many as its samples fill,
            and no pass draws one twice.
        shuffled: whether places are permuted.

    Attributes:
        size: draws in a pass, T·U.
        has_weights: whether the buckets' places are by weights.
    """

    def __init__(
        self, buckets: Sequence[Bucket], unit: int, seed: int, num_places: int = 0, shuffled: bool = True
    ) -> None:
        self.unit, self._seed, self._shuffled = unit, seed, shuffled
        self._leaves = [bucket.leaf for bucket in buckets]
        self._fixed, self._seats, self.copies = [bucket.size // unit for bucket in buckets], None, 1
        if num_places:
            start = int(derive_keys(1, seed, Domain.BUCKET_SEATS)[0]) % ONE
            self._seats = Seats(as_shares([bucket.weight for bucket in buckets]), num_places, start)
            largest = [(leaf, count + 1) for leaf, count in zip(self._leaves, self._seats.of(0), strict=True)]
            self.copies = max(_sized(leaf, count * unit).copies for leaf, count in largest if leaf)
        self.has_weights = num_places > 0
        self.num_places = num_places or sum(self._fixed)
        self.size = self.num_places * unit

    def counts(self, number: int) -> list[int]:
        """Places of each bucket in a pass."""
        return self._seats.of(number) if self._seats else self._fixed

    def draws(self, number: int, positions: np.ndarray) -> Drawn:
        """See `Leaf.draws`."""
        wanted, rows = np.divmod(positions, self.unit)
        buckets, places = self._places(number, wanted)
        indices, repeats = np.empty(len(positions), np.int64), np.zeros(len(positions), np.int64)
        counts = self.counts(number)
        for bucket in np.unique(buckets).tolist():
            here, leaf = buckets == bucket, self._leaves[bucket]
            assert leaf is not None, "a bucket that has places has samples"
            of_bucket = _sized(leaf, counts[bucket] * self.unit) if self._seats else leaf
            indices[here], again = of_bucket.draws(number, places[here] * self.unit + rows[here])
            if again is not None:
                repeats[here] = again
        return indices, repeats if self._seats else None

    def buckets(self, number: int, positions: np.ndarray) -> np.ndarray:
        """See `Leaf.buckets`."""
        return self._places(number, positions // self.unit)[0]

    def _places(self, number: int, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bucket of each of a pass's places, and the how-manieth of that bucket it is."""
        if self._shuffled:
            wanted = permute(wanted, self.num_places, derive_keys(NUM_ROUNDS, self._seed, Domain.BUCKET, number))
        counts = np.array(self.counts(number))
        ends = np.cumsum(counts)
        buckets = np.searchsorted(ends, wanted, side="right")
        return buckets, wanted - (ends - counts)[buckets]


def _sized(leaf: Leaf, size: int) -> Weighted:
    assert isinstance(leaf, Weighted), "by shares are those that have weights"
    return leaf.resized(size)


def mixed(
    stores: Sequence[Sequence[Bucket]],
    offsets: np.ndarray,
    shares: Mapping[int, Sequence[int]],
    steps: int,
    batch_size: int,
    unit: int,
    seed: int,
) -> Mixture:
    """Several stores by weights and in buckets: a mixture of buckets, each of which is a mixture of the stores.

    Of a global batch's places each bucket has its share, and of a place's draws each store has its share of this
    bucket; each store's samples of a bucket are walked through the run.

    Args:
        stores: the buckets of each store.
        offsets: int64 (stores + 1,), of the stores' samples in the joined store.
        shares: from epoch → share of each store.
        steps: global batches in an epoch.
        batch_size: places in a global batch.
        unit: U, draws in a place.
        seed: the run's.
    """
    totals = [sum(bucket.weight for bucket in store) for store in stores]
    by_bucket = list(zip(*stores, strict=True))
    # From epoch → of each bucket → share of each store in all draws.
    tables: dict[int, list[list[Fraction]]] = {}
    for epoch, of_epoch in shares.items():
        per_weight = [Fraction(share, total) for share, total in zip(of_epoch, totals, strict=True)]
        tables[epoch] = [
            [each * bucket.weight for each, bucket in zip(per_weight, of_bucket, strict=True)]
            for of_bucket in by_bucket
        ]
    whole = {epoch: as_shares([sum(of_bucket) for of_bucket in table]) for epoch, table in tables.items()}
    turns = Turns(whole, steps, batch_size, seed, is_small=True)
    before = {epoch: turns.before(epoch * steps) for epoch in shares}
    parts = list[Part]()
    for number, of_bucket in enumerate(by_bucket):
        inner = {}  # from a place of the bucket on, by its number in the run
        for epoch, table in tables.items():
            some = any(table[number])  # else it has no places from here on
            inner[before[epoch][number]] = as_shares(table[number] if some else [1] * len(stores))
        key = int(derive_keys(1, seed, Domain.BUCKET, number)[0])
        leaves = [bucket.leaf or Once(StoredOrder(0)) for bucket in of_bucket]  # one without samples has no draws
        passes = [Passes(leaf, int(offset)) for leaf, offset in zip(leaves, offsets, strict=False)]
        parts.append(Mixture(passes, Turns(inner, 1, unit, key, is_small=True)))
    return Mixture(parts, turns, unit)


class InTurn:
    """Each sample once, bucket after bucket, in stored order, for validations; each bucket's last place is padded.

    Args:
        members: the samples of each bucket.
        unit: rows in a place.

    Attributes:
        size: rows, those of padding included.
        sizes, counts: samples and places of each bucket.
    """

    def __init__(self, members: Sequence[Chosen], unit: int) -> None:
        self._members, self._unit = list(members), unit
        self.sizes = [len(each.chosen) for each in members]
        self.counts = [-(-size // unit) for size in self.sizes]
        self._ends = np.cumsum(self.counts)
        self.size = int(self._ends[-1]) * unit

    def buckets(self, positions: np.ndarray) -> np.ndarray:
        """The bucket of each row, int64 (n,); of padding at the end that of the last sample."""
        places = np.minimum(positions, self.size - 1) // self._unit
        return np.searchsorted(self._ends, places, side="right")

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """The samples of rows, int64 (n,), PADDING where there is none."""
        buckets, found = self.buckets(positions), np.full(len(positions), PADDING)
        for bucket in np.unique(buckets).tolist():
            members = self._members[bucket]
            rows = positions - (self._ends[bucket] - self.counts[bucket]) * self._unit
            here = (buckets == bucket) & (rows < self.sizes[bucket])
            found[here] = members.indices(rows[here])
        return found
