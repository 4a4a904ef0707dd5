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
from fractions import Fraction
from itertools import accumulate

import numpy as np

from raypipe.plan.draws import Drawn, Leaf, walked
from raypipe.plan.order import NUM_ROUNDS, Domain, derive_keys, permute

ONE = 1 << 40
"""What the weights of a mixture add up to."""
_STEP = int(ONE * 0.6180339887498949) | 1  # odd, so that u takes all ONE values


def as_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as integers that add up to ONE, in the same proportions to 2^-40."""
    total = sum(map(Fraction, weights))
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


class Mixture:
    """Several leaves by weights, see `raypipe.plan.draws.Draws`. Each is walked through the run, pass after pass.

    Args:
        leaves: one for each store.
        offsets: int64 (stores + 1,), of the stores' samples in the joined store.
        shares: from epoch → share of each store, see `as_shares`; from epoch 0 on, ascending.
        steps: global batches in an epoch.
        batch_size: G, draws in a global batch.
        seed: the run's seed.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        offsets: np.ndarray,
        shares: Mapping[int, Sequence[int]],
        steps: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self._leaves, self._offsets, self._steps = list(leaves), offsets, steps
        self._batch_size, self._seed = batch_size, seed
        # From epoch, draws of each store before it, and how many it has from there on.
        self._pieces: list[tuple[int, list[int], Seats]] = []
        before = [0] * len(leaves)
        for epoch, of_epoch in shares.items():
            if self._pieces:
                before = self._before(epoch, 0)
            start = int(derive_keys(1, seed, Domain.MIXTURE, epoch)[0]) % ONE
            self._pieces.append((epoch, before, Seats(of_epoch, batch_size, start)))

    def draws(self, epoch: int, positions: np.ndarray) -> Drawn:
        """See `Draws.draws`."""
        batches, places = np.divmod(positions, self._batch_size)
        sources, numbers = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        for batch in np.unique(batches).tolist():
            inside = batches == batch
            keys = derive_keys(NUM_ROUNDS, self._seed, Domain.MIXTURE, epoch, batch)
            units = permute(places[inside], self._batch_size, keys)
            bounds = np.append(0, np.cumsum(self.counts(epoch, batch)))
            found = np.searchsorted(bounds[1:-1], units, side="right")
            sources[inside] = found
            numbers[inside] = np.array(self._before(epoch, batch))[found] + units - bounds[found]
        indices, repeats = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
        begun = self._before(epoch, 0)
        for source in np.unique(sources).tolist():
            inside = sources == source
            of_part, repeats[inside] = walked(self._leaves[source], begun[source], numbers[inside])
            indices[inside] = self._offsets[source] + of_part
        return indices, repeats

    def counts(self, epoch: int, batch: int) -> list[int]:
        """Draws of each store in a global batch of an epoch."""
        first, _, seats = self._piece(epoch)
        return seats.of((epoch - first) * self._steps + batch)

    def of_epoch(self, epoch: int) -> list[int]:
        """Draws of each store in an epoch."""
        ends = self._before(epoch, self._steps)
        return [end - begin for begin, end in zip(self._before(epoch, 0), ends, strict=True)]

    def _before(self, epoch: int, batch: int) -> list[int]:
        """Draws of each store in the run before a global batch of an epoch, or before the epoch's end."""
        first, before, seats = self._piece(epoch) if batch else self._piece(max(0, epoch - 1))
        since = seats.before((epoch - first) * self._steps + batch)
        return [one + other for one, other in zip(before, since, strict=True)]

    def _piece(self, epoch: int) -> tuple[int, list[int], Seats]:
        return next(piece for piece in reversed(self._pieces) if piece[0] <= epoch)
