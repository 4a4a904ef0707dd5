"""Mixtures, and buckets of one store: several samplers by quotas. Numpy only.

A part of share w_i (all shares add up to 1) has ⌊G·w_i⌋ of the G places of a batch, and at most one of the r
places that are left over. Systematic sampling assigns these: the fractions f_i of G·w_i form a line of length
r; the marks u, u + 1, … , u + r - 1 fall on the parts that have one more.

    fractions   |--- 0 ----|-- 1 --|--- 2 ----|------ 3 ------|     r = 2
    marks          ^                     ^                          u = 0.2

u goes round by the golden ratio from batch to batch, so that the total of a part is always near b·G·w_i. Its
places before batch b are a sum of floors, which an algorithm like Euclid's adds up in O(log b). Shares are
integers over 2^40.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from raypipe.plan.order import NUM_ROUNDS, Domain, derive_keys, permute, shuffled
from raypipe.plan.samplers import (
    Draws,
    PassSampler,
    Permuted,
    RunSampler,
    Weighted,
    draw_parts,
)

ONE = 1 << 40
"""What the shares of all parts add up to."""
# A batch of more places is not shuffled whole, to look up a few of them.
_MAX_SHUFFLED = 1 << 12
_STEP = int(ONE * 0.6180339887498949) | 1  # odd, so that u takes all ONE values


def as_shares(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Weights as integers that add up to ONE, in the same proportions to 2^-40."""
    total = sum(Fraction(weight) for weight in weights)
    exact = [Fraction(weight) / total * ONE for weight in weights]
    shares = [int(share) for share in exact]
    # The remainder of the rounding goes to the shares that lost most.
    by_loss = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_loss[: ONE - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def floor_sum(num: int, modulus: int, factor: int, addend: int) -> int:
    """Σ ⌊(factor·n + addend) / modulus⌋ over n = 0 … num - 1, for any integers, modulus > 0."""
    total = 0
    while True:
        quotient, factor = divmod(factor, modulus)
        total += num * (num - 1) // 2 * quotient
        quotient, addend = divmod(addend, modulus)
        total += num * quotient
        highest = factor * num + addend
        if highest < modulus:
            return total
        # The same points under the line, counted along the other axis.
        num, addend = divmod(highest, modulus)
        modulus, factor = factor, modulus


@dataclass(frozen=True)
class _Era:
    """The batches of one set of shares.

    Attributes:
        first: the first of them.
        before: places of each part in the batches before.
        whole: ⌊G·w_i⌋ of each part.
        ends: where the fractions of the parts before each one end on the line, in units of ONE.
        start: u of the first batch.
    """

    first: int
    before: np.ndarray
    whole: np.ndarray
    ends: np.ndarray
    start: int


class Quotas:
    """Number of places that each part has in each batch, by shares that may change at some batches.

    Args:
        shares: from batch → share of each part, see `as_shares`; from batch 0 on, ascending.
        batch_size: G.
        seed: the keys' seed.
    """

    def __init__(
        self, shares: Mapping[int, Sequence[int]], batch_size: int, seed: int
    ) -> None:
        self.batch_size = batch_size
        self._eras = list[_Era]()
        for first, of_parts in shares.items():
            before = self.before(first) if self._eras else [0] * len(of_parts)
            # in Python's integers: a product may have more than 64 bits
            exact = np.array(of_parts, object) * batch_size
            whole = (exact // ONE).astype(np.int64)
            ends = np.append(0, np.cumsum(exact % ONE)).astype(np.int64)
            start = int(derive_keys(1, seed, Domain.QUOTAS, first)[0]) % ONE
            self._eras.append(_Era(first, np.array(before), whole, ends, start))

    def counts(self, batch: int) -> list[int]:
        """Places of each part in a batch."""
        era = self._era(batch)
        mark = (_STEP * (batch - era.first) + era.start) % ONE
        marks = -((mark - era.ends) // ONE)  # below each end
        return (era.whole + np.diff(marks)).tolist()

    def before(self, batch: int) -> list[int]:
        """Places of each part in all batches before one."""
        era = self._era(batch)
        num = batch - era.first
        round_trips = floor_sum(num, ONE, _STEP, era.start)
        marks = [
            round_trips - floor_sum(num, ONE, _STEP, era.start - end)
            for end in era.ends.tolist()
        ]
        return (era.before + num * era.whole + np.diff(marks)).tolist()

    def _era(self, batch: int) -> _Era:
        return next(era for era in reversed(self._eras) if era.first <= batch)


class Bucketed(PassSampler):
    """Samples one store by buckets: all U draws of a place are from one bucket.

        bucket   | 0: n_0 samples      | 1: n_1 …  | …
        places   | 0 | 1 | … ⌊n_0/U⌋-1 | …         | … T-1    of U draws; fewer than U of a bucket are left over
        pass     a permutation of all T places, and each bucket permutes its samples

    Each pass has new keys, so different samples are left over. With weights each bucket has its share of
    the T places, rounded down or up, and draws for these by the weights of its samples: nothing is left over.

    Args:
        buckets: sampler of each.
        unit: U.
        seed: the keys' seed.
        num_places: T, by weights; 0 = each bucket has as many as its samples fill, none of them twice.
        shuffles: whether places are permuted.
        per_pass: see `PassSampler`; 0 = all.
    """

    def __init__(
        self,
        buckets: Sequence[Permuted | Weighted],
        unit: int,
        seed: int,
        num_places: int = 0,
        shuffles: bool = True,
        per_pass: int = 0,
    ) -> None:
        self._buckets = list(buckets)
        self.unit = unit
        self._seed = seed
        self._shuffles = shuffles
        self._counts = [bucket.selection.size // unit for bucket in buckets]
        self._quotas = None
        if num_places:
            shares = as_shares([bucket.weight for bucket in buckets])
            self._quotas = Quotas({0: shares}, num_places, seed)
        self.num_places = num_places or sum(self._counts)
        self.size = self.num_places * unit
        self.per_pass = per_pass or self.size

    def draw_pass(self, pass_number: int, positions: np.ndarray) -> Draws:
        """See `PassSampler.draw_pass`."""
        places, rows = np.divmod(positions, self.unit)
        if self._shuffles:
            keys = derive_keys(NUM_ROUNDS, self._seed, Domain.BUCKET, pass_number)
            places = permute(places, self.num_places, keys)
        counts = self._counts
        if self._quotas:
            counts = self._quotas.counts(pass_number)
        ends = np.cumsum(counts)
        numbers = np.searchsorted(ends, places, side="right")
        inside = (places - (ends - counts)[numbers]) * self.unit + rows

        def draw(number: int, where: np.ndarray) -> Draws:
            bucket = self._buckets[number]
            if isinstance(bucket, Weighted):
                bucket = bucket.resized(counts[number] * self.unit)
            return bucket.draw_pass(pass_number, inside[where])

        return draw_parts(numbers, draw)._replace(buckets=numbers)


@dataclass
class Mixture(RunSampler):
    """Several samplers, each of which is walked through the run; their places are shuffled within each batch.

    Attributes:
        parts: samplers that places draw from.
        quotas: how many places of a batch each of them has.
        seed: the keys' seed.
        unit: draws in a place.
        are_buckets: whether the parts are buckets.
    """

    parts: Sequence[RunSampler]
    quotas: Quotas
    seed: int
    unit: int = 1
    are_buckets: bool = False

    def draw(self, positions: np.ndarray) -> Draws:
        """See `RunSampler.draw`."""
        places, rows = np.divmod(positions, self.unit)
        parts, numbers = self._parts_at(places)
        inside = numbers * self.unit + rows
        draws = draw_parts(
            parts, lambda number, where: self.parts[number].draw(inside[where])
        )
        if self.are_buckets:
            return draws._replace(buckets=parts)
        return draws

    def _parts_at(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The parts of int64 places (n,), counted through the run, and their numbers among the part's places."""
        size = self.quotas.batch_size
        batches, inside_batch = np.divmod(places, size)
        parts = np.empty(len(places), np.int64)
        numbers = np.empty(len(places), np.int64)
        for batch in np.unique(batches).tolist():
            inside = batches == batch
            keys = derive_keys(NUM_ROUNDS, self.seed, Domain.MIXTURE, batch)
            if size <= _MAX_SHUFFLED:
                seats = shuffled(size, keys[0])[inside_batch[inside]]
            else:
                seats = permute(inside_batch[inside], size, keys)
            counts = self.quotas.counts(batch)
            ends = np.cumsum(counts)
            of_place = np.searchsorted(ends, seats, side="right")
            parts[inside] = of_place
            before = self.quotas.before(batch) - (ends - counts)
            numbers[inside] = before[of_place] + seats
        return parts, numbers


def mix_buckets(
    sources: Sequence[Sequence[Permuted | Weighted]],
    shares: Mapping[int, Sequence[int]],
    batch_size: int,
    unit: int,
    seed: int,
) -> Mixture:
    """A mixture of several stores in buckets: a mixture of buckets, each of which is a mixture of the stores.

    Each bucket has its share of a global batch's places, and each store has its share of a place's draws in
    this bucket; each store's samples of a bucket are walked through the run.

    Args:
        sources: the buckets of each store.
        shares: from batch → share of each store.
        batch_size: places in a global batch.
        unit: draws in a place.
        seed: the keys' seed.
    """
    totals = [sum(bucket.weight for bucket in buckets) for buckets in sources]
    by_bucket = list(zip(*sources, strict=True))
    # From batch → of each bucket → share of each store in all draws.
    tables: dict[int, list[list[Fraction]]] = {}
    for batch, of_stores in shares.items():
        tables[batch] = [
            [
                Fraction(share * store.weight, total)
                for share, store, total in zip(of_stores, stores, totals, strict=True)
            ]
            for stores in by_bucket
        ]
    quotas = Quotas(
        {
            batch: as_shares([sum(row) for row in table])
            for batch, table in tables.items()
        },
        batch_size,
        seed,
    )
    before = {batch: quotas.before(batch) for batch in shares}
    parts = list[RunSampler]()
    for bucket, stores in enumerate(by_bucket):
        inner = {}  # from a place of the bucket on, by its number in the run
        for batch, table in tables.items():
            # A bucket of no share has no places from here on.
            inner[before[batch][bucket]] = as_shares(
                table[bucket] if any(table[bucket]) else [1] * len(stores)
            )
        key = int(derive_keys(1, seed, Domain.BUCKET_MIXTURE, bucket)[0])
        parts.append(Mixture(stores, Quotas(inner, unit, key), key))
    return Mixture(parts, quotas, seed, unit, are_buckets=True)
