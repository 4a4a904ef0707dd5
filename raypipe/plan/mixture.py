"""Mixtures: which store each draw of a global batch comes from: exact, and found in O(log) for any batch.

Of the G draws of a batch, store i of weight w_i (their sum is 1) has ⌊G·w_i⌋, and of the r draws that are left
over one or none. Who has them is drawn systematically: the fractions f_i of G·w_i lie end to end on a line, whose
length is r; the marks u, u + 1, … , u + r - 1 fall on those that have one more.

    fractions   |--- 0 ----|-- 1 --|--- 2 ----|------ 3 ------|     r = 2
    marks          ^                     ^                          u = 0.2

u goes round by the golden ratio from batch to batch, so that a store's total is always near b·G·w_i. What a store
had before batch b is a sum of floors, which an algorithm like Euclid's adds up. Shares are integers over 2^40.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np

from raypipe.plan.draws import Drawn, Part
from raypipe.plan.order import NUM_ROUNDS, Domain, derive_keys, permute, shuffled

ONE = 1 << 40
"""What the weights of a mixture add up to."""
_STEP = int(ONE * 0.6180339887498949) | 1  # odd, so that u takes all ONE values


def as_shares(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Weights as integers that add up to ONE, in the same proportions to 2^-40."""
    total = sum(Fraction(weight) for weight in weights)
    exact = [Fraction(weight) / total * ONE for weight in weights]
    shares = [int(share) for share in exact]
    # What rounding has left over goes to those that lost most.
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


class Seats:
    """How many draws of each batch each store has, for one set of weights.

    Args:
        shares: of each store, see `as_shares`.
        batch_size: G.
        start: where the marks of the first batch are, in [0, ONE).
    """

    def __init__(self, shares: Sequence[int], batch_size: int, start: int) -> None:
        parts = [divmod(batch_size * share, ONE) for share in shares]
        self._whole = [whole for whole, _ in parts]
        self._ends = list(accumulate((rest for _, rest in parts), initial=0))
        self._start = start

    def of(self, batch: int) -> list[int]:
        """Draws of each store in a batch."""
        mark = (_STEP * batch + self._start) % ONE
        marks = [-((mark - end) // ONE) for end in self._ends]  # below each end
        return [w + b - a for w, a, b in zip(self._whole, marks, marks[1:], strict=False)]

    def before(self, batch: int) -> list[int]:
        """Draws of each store in all batches before one."""
        round_trips = floor_sum(batch, ONE, _STEP, self._start)
        marks = [round_trips - floor_sum(batch, ONE, _STEP, self._start - end) for end in self._ends]
        return [batch * w + b - a for w, a, b in zip(self._whole, marks, marks[1:], strict=False)]


class Turns:
    """Whose turn it is: which part each place of a run is of, and the how-manieth place of that part it is.

    Args:
        shares: from epoch → share of each part, see `as_shares`; from epoch 0 on, ascending.
        steps: batches in an epoch.
        batch_size: G, places in a batch, in which the parts' places are shuffled.
        seed: of the keys.
        is_small: whether a batch has so few places that all are shuffled at once.
    """

    def __init__(
        self,
        shares: Mapping[int, Sequence[int]],
        steps: int,
        batch_size: int,
        seed: int,
        is_small: bool = False,
    ) -> None:
        self.steps, self.batch_size, self._seed, self._is_small = steps, batch_size, seed, is_small
        # From batch, places of each part before it, and how many it has from there on.
        self._pieces: list[tuple[int, list[int], Seats]] = []
        for epoch, of_epoch in shares.items():
            before = self.before(epoch * steps) if self._pieces else [0] * len(of_epoch)
            start = int(derive_keys(1, seed, Domain.MIXTURE, epoch)[0]) % ONE
            self._pieces.append((epoch * steps, before, Seats(of_epoch, batch_size, start)))

    def of(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The parts of int64 places (n,), counted through the run, and their numbers among those of the part."""
        batches, inside_batch = np.divmod(places, self.batch_size)
        parts, numbers = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
        for batch in np.unique(batches).tolist():
            inside = batches == batch
            keys = derive_keys(NUM_ROUNDS, self._seed, Domain.MIXTURE, *divmod(batch, self.steps))
            if self._is_small:
                units = shuffled(self.batch_size, keys[0])[inside_batch[inside]]
            else:
                units = permute(inside_batch[inside], self.batch_size, keys)
            bounds = np.append(0, np.cumsum(self.counts(batch)))
            found = np.searchsorted(bounds[1:-1], units, side="right")
            parts[inside] = found
            numbers[inside] = np.array(self.before(batch))[found] + units - bounds[found]
        return parts, numbers

    def counts(self, batch: int) -> list[int]:
        """Places of each part in a batch, counted through the run."""
        first, _, seats = self._piece(batch)
        return seats.of(batch - first)

    def before(self, batch: int) -> list[int]:
        """Places of each part in the run before a batch."""
        first, before, seats = self._piece(batch)
        return [one + other for one, other in zip(before, seats.before(batch - first), strict=True)]

    def between(self, first: int, last: int) -> list[int]:
        """Places of each part from a batch to before another."""
        return [end - begin for begin, end in zip(self.before(first), self.before(last), strict=True)]

    def _piece(self, batch: int) -> tuple[int, list[int], Seats]:
        return next(piece for piece in reversed(self._pieces) if piece[0] <= batch)


@dataclass(frozen=True)
class Mixture:
    """Several parts by weights, see `raypipe.plan.draws.Part`; each is walked through the run.

    Attributes:
        parts: what each place's draws are of.
        turns: which part that is.
        unit: draws in a place.
    """

    parts: Sequence[Part]
    turns: Turns
    unit: int = 1

    def drawn(self, begun: int, numbers: np.ndarray) -> Drawn:
        """See `Part.drawn`; epochs have whole batches."""
        places, rows = np.divmod(numbers, self.unit)
        parts, of_part = self.turns.of(places)
        before = self.turns.before(begun // self.unit // self.turns.batch_size)
        indices, repeats = np.empty(len(numbers), np.int64), np.zeros(len(numbers), np.int64)
        for part in np.unique(parts).tolist():
            inside = parts == part
            of_inside = of_part[inside] * self.unit + rows[inside]
            indices[inside], again = self.parts[part].drawn(before[part] * self.unit, of_inside)
            if again is not None:
                repeats[inside] = again
        return indices, repeats

    def buckets_of(self, numbers: np.ndarray) -> np.ndarray:
        """See `Part.buckets_of`: of parts that are buckets."""
        return self.turns.of(numbers // self.unit)[0]

    def of_leaves(self, first: int, last: int) -> list[int]:
        """Draws of each leaf from a batch to before another; parts that are mixtures have the same leaves."""
        counts, before = self.turns.between(first, last), self.turns.before(first)
        inner = [
            part.of_leaves(begin, begin + count)
            for part, begin, count in zip(self.parts, before, counts, strict=True)
            if isinstance(part, Mixture)
        ]
        return [sum(each) for each in zip(*inner, strict=True)] if inner else counts
