from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raypipe.plan.mixture import ONE, Mixture, Quotas, as_shares
from raypipe.plan.order import Shuffle
from raypipe.plan.samplers import Permuted
from raypipe.plan.selection import Selection

weight_lists = st.lists(
    st.integers(0, 20) | st.floats(0.001, 5), min_size=1, max_size=6
).filter(any)


@given(
    weight_lists, st.integers(1, 70), st.integers(0, 2**64 - 1), st.integers(0, 10**12)
)
def test_each_batch_rounds_shares_and_totals_are_their_sums(
    weights: list[float], batch_size: int, seed: int, first: int
) -> None:
    shares = as_shares(weights)
    quotas = Quotas({0: shares}, batch_size, seed)
    found = [quotas.counts(batch) for batch in range(first, first + 20)]
    for counts in found:
        assert sum(counts) == batch_size
        for count, share in zip(counts, shares, strict=True):
            assert math.floor(Fraction(batch_size * share, ONE)) <= count
            assert count <= math.ceil(Fraction(batch_size * share, ONE))
    totals = np.array(
        [quotas.before(batch) for batch in range(first, first + 21)], object
    )
    assert (totals[1:] - totals[:-1]).tolist() == found
    assert quotas.before(0) == [0] * len(weights)
    # The golden ratio keeps what a store has had near its share of all.
    for total, share in zip(totals[-1], shares, strict=True):
        assert abs(total - Fraction((first + 20) * batch_size * share, ONE)) < 30


def test_a_place_among_a_billion_mixed_samples_costs_no_memory() -> None:
    parts = [
        Permuted(Shuffle("global", size, 0), Selection([], size), offset)
        for size, offset in ((10**9, 0), (10**8, 10**9), (10**7, 11 * 10**8))
    ]
    shares = {0: as_shares([0.7, 0.2, 0.1]), 9 * 10**6: as_shares([1, 1, 1])}
    mixed = Mixture(parts, Quotas(shares, 1024, seed=1), seed=1)
    mixed.draw(np.arange(128))  # numpy imports what it needs at first use
    tracemalloc.start()
    draws = mixed.draw(np.arange(128) + 32 * 10**9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(draws.indices)) == 128 and peak < 1_000_000
