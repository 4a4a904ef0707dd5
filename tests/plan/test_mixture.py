from __future__ import annotations

import math
import tracemalloc
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.plan.draws import Once, Passes, Walk
from raypipe.plan.mixture import ONE, Mixture, Seats, Turns, as_shares, floor_sum
from raypipe.plan.order import GlobalOrder, StoredOrder

weight_lists = st.lists(st.integers(0, 20) | st.floats(0.001, 5), min_size=1, max_size=6).filter(any)


@given(st.integers(0, 60), st.integers(1, 50), st.integers(-200, 200), st.integers(-300, 300))
def test_floor_sums_are_those_of_the_terms(num: int, modulus: int, factor: int, addend: int) -> None:
    expected = sum((factor * n + addend) // modulus for n in range(num))
    assert floor_sum(num, modulus, factor, addend) == expected


@given(weight_lists)
def test_shares_add_up_to_one_in_proportion(weights: list[float]) -> None:
    shares = as_shares(weights)
    assert sum(shares) == ONE
    total = sum(map(Fraction, weights))
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - Fraction(weight) / total * ONE) < 1


@given(weight_lists, st.integers(1, 70), st.integers(0, ONE - 1), st.integers(0, 10**12))
@settings(max_examples=60, deadline=None)
def test_each_batch_rounds_each_share_down_or_up_and_totals_are_their_sums(
    weights: list[float], batch_size: int, start: int, first: int
) -> None:
    shares = as_shares(weights)
    seats = Seats(shares, batch_size, start)
    found = [seats.of(batch) for batch in range(first, first + 20)]
    for counts in found:
        assert sum(counts) == batch_size
        for count, share in zip(counts, shares, strict=True):
            assert math.floor(Fraction(batch_size * share, ONE)) <= count
            assert count <= math.ceil(Fraction(batch_size * share, ONE))
    totals = np.array([seats.before(batch) for batch in range(first, first + 21)], object)
    assert (totals[1:] - totals[:-1]).tolist() == found
    assert seats.before(0) == [0] * len(weights)
    # The golden ratio keeps what a store has had near its share of all.
    for total, share in zip(totals[-1], shares, strict=True):
        assert abs(total - Fraction((first + 20) * batch_size * share, ONE)) < 30


def of_orders(
    orders: list[GlobalOrder | StoredOrder], shares: dict[int, list[float]], steps: int, batch_size: int, seed: int
) -> tuple[Walk, Mixture]:
    offsets = np.append(0, np.cumsum([order.size for order in orders])).tolist()
    parts = [Passes(Once(order), offset) for order, offset in zip(orders, offsets, strict=False)]
    by_epoch = {epoch: as_shares(of_epoch) for epoch, of_epoch in shares.items()}
    mixed = Mixture(parts, Turns(by_epoch, steps, batch_size, seed))
    return Walk(mixed, steps * batch_size), mixed


def mixture(steps: int = 5, shares: dict[int, list[float]] | None = None) -> tuple[Walk, Mixture]:
    orders: list[GlobalOrder | StoredOrder] = [
        GlobalOrder(size, number) for number, size in enumerate([50, 7, 20])
    ]
    return of_orders(orders, shares or {0: [5, 2, 1], 2: [0, 1, 1]}, steps, 8, 3)


def test_golden_mixture() -> None:
    indices, repeats = mixture()[0].draws(1, np.arange(16))
    assert repeats is not None
    assert indices.tolist() == [43, 14, 38, 55, 37, 44, 50, 72, 56, 71, 53, 39, 8, 42, 21, 17]
    assert repeats.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]


def test_each_batch_has_what_its_weights_say_and_each_store_is_walked_through_the_run() -> None:
    (mixed, of), walked = mixture(), [list[int](), list[int](), list[int]()]
    for epoch in range(4):
        indices, repeats = mixed.draws(epoch, np.arange(40))
        assert repeats is not None
        assert len(set(zip(indices.tolist(), repeats.tolist(), strict=True))) == 40
        sources = np.searchsorted([50, 57], indices, side="right")
        for batch in range(5):
            counts = np.bincount(sources[8 * batch :][:8], minlength=3).tolist()
            assert counts == of.turns.counts(5 * epoch + batch) == ([5, 2, 1] if epoch < 2 else [0, 4, 4])
        assert np.bincount(sources, minlength=3).tolist() == of.of_leaves(5 * epoch, 5 * epoch + 5)
        for source in range(3):
            walked[source] += (indices[sources == source] - [0, 50, 57][source]).tolist()
    # 50 of the first store in two epochs, once each; the second in passes of 7.
    assert sorted(walked[0]) == list(range(50))
    assert max(np.bincount(walked[1])) - min(np.bincount(walked[1])) <= 1
    assert [len(each) for each in walked] == [50, 20 + 40, 10 + 40]


def test_a_mixture_is_the_same_one_at_a_time_and_mixes_within_a_batch() -> None:
    mixed, _ = mixture(shares={0: [1, 1, 1]})
    together, _ = mixed.draws(2, np.arange(40))
    assert [int(mixed.draws(2, np.array([position]))[0][0]) for position in range(40)] == together.tolist()
    sources = np.searchsorted([50, 57], together, side="right")
    assert any(sources[8 * batch :][:8].tolist() != sorted(sources[8 * batch :][:8]) for batch in range(5))


@pytest.mark.parametrize("steps", [1, 3])
def test_weights_change_where_the_schedule_says(steps: int) -> None:
    _, mixed = mixture(steps=steps, shares={0: [1, 0, 0], 1: [0, 3, 1], 3: [1, 1, 2]})
    expected = [[8, 0, 0], [0, 6, 2], [0, 6, 2], [2, 2, 4], [2, 2, 4]]
    found = [mixed.of_leaves(epoch * steps, (epoch + 1) * steps) for epoch in range(5)]
    assert found == [[n * steps for n in each] for each in expected]
    assert list(accumulate(each[1] for each in found)) == [n * steps for n in (0, 6, 12, 14, 16)]


def test_a_place_in_a_mixture_of_a_billion_samples_is_found_without_memory_of_their_number() -> None:
    orders = [StoredOrder(10**9), GlobalOrder(10**8, 1), GlobalOrder(10**7, 1)]
    mixed, _ = of_orders(orders, {0: [0.7, 0.2, 0.1], 9: [1, 1, 1]}, 10**6, 1024, seed=1)
    mixed.draws(0, np.arange(128))  # numpy imports what it needs at first use
    tracemalloc.start()
    indices, _ = mixed.draws(31, np.arange(10**9, 10**9 + 128))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(indices)) == 128 and peak < 1_000_000
