from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import all_but_one_in_system

from raypipe.plan.order import (
    Domain,
    Shuffle,
    default_window_groups,
    derive_keys,
    key_words,
    shuffled,
)

UNEVEN = np.array([0, 3, 5, 5, 9, 12])  # the third group is empty
BILLION = 1_000_000_000


def everywhere(size: int, seed: int) -> Shuffle:
    return Shuffle("global", size, seed)


def windowed(groups: np.ndarray, seed: int, window_groups: int) -> Shuffle:
    return Shuffle("window", int(groups[-1]), seed, groups, window_groups)


def whole(shuffle: Shuffle, pass_number: int = 0) -> list[int]:
    return shuffle.numbers(pass_number, np.arange(shuffle.size)).tolist()


# The keyed bijection


def test_every_size_to_300_is_a_bijection() -> None:
    for size in range(1, 301):
        assert sorted(whole(everywhere(size, seed=5), size % 3)) == list(range(size)), (
            size
        )


@pytest.mark.parametrize("size", [2**20 - 1, 2**20, 2**20 + 1, BILLION, 2**40 + 7])
def test_samples_of_big_permutations_are_in_range_and_distinct(size: int) -> None:
    positions = np.unique(np.random.default_rng(0).integers(0, size, 20_000))
    found = everywhere(size, seed=1).numbers(0, positions)
    assert found.dtype == np.int64
    assert found.min() >= 0 and found.max() < size
    assert len(np.unique(found)) == len(positions)


def test_golden_global_order() -> None:
    order = everywhere(7, seed=3)
    assert whole(order, 0) == [4, 2, 5, 1, 0, 3, 6]
    assert whole(order, 1) == [1, 0, 3, 4, 5, 2, 6]


@pytest.mark.parametrize("size", all_but_one_in_system([3, 4]))
@pytest.mark.parametrize("sorts", [False, True])
def test_all_permutations_are_about_equally_frequent(size: int, sorts: bool) -> None:
    epochs = 1200
    if sorts:
        keys = [derive_keys(1, 11, Domain.ORDER, epoch)[0] for epoch in range(epochs)]
        counts = Counter(tuple(shuffled(size, key).tolist()) for key in keys)
    else:
        counts = Counter(
            tuple(whole(everywhere(size, seed=11), epoch)) for epoch in range(epochs)
        )
    possible = list(permutations(range(size)))
    expected = epochs / len(possible)
    chi_square = sum((counts[p] - expected) ** 2 / expected for p in possible)
    # The 99.9 % quantiles of chi-square with 5 and 23 degrees of freedom.
    assert chi_square < {3: 20.5, 4: 49.7}[size]


@pytest.mark.parametrize(
    "order", [everywhere(97, 4), windowed(UNEVEN, 4, 2), Shuffle("off", 12, 0)]
)
def test_vectorised_equals_one_at_a_time_in_any_order(order: Shuffle) -> None:
    together = whole(order, 3)
    for position in reversed(range(order.size)):
        assert order.numbers(3, np.array([position])).tolist() == [together[position]]


def test_seed_and_epoch_are_hashed_not_added() -> None:
    orders = {
        (s, e): tuple(whole(everywhere(50, s), e)) for s in range(6) for e in range(6)
    }
    assert len(set(orders.values())) == 36


# Windows


def test_golden_window_order() -> None:
    order = windowed(UNEVEN, 3, 2)
    assert whole(order, 0) == [10, 9, 11, 5, 6, 8, 7, 3, 4, 1, 0, 2]
    assert whole(order, 1) == [4, 1, 0, 2, 3, 5, 6, 9, 8, 7, 11, 10]


@pytest.mark.parametrize("window_groups", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    "groups",
    [
        UNEVEN,
        np.arange(0, 101, 10),
        np.array([0, 4]),
        np.array([0, 0, 0, 5, 5]),
        np.array([0, 1, 50, 51, 51]),
    ],
)
def test_window_order_reads_every_row_once(
    groups: np.ndarray, window_groups: int
) -> None:
    order = windowed(groups, 7, window_groups)
    for epoch in range(4):
        assert sorted(whole(order, epoch)) == list(range(groups[-1]))


def test_each_group_is_read_within_one_window_and_rows_mix_within_it() -> None:
    # 30 groups of 8: windows of 32 rows, the last one of 16
    groups, k = (
        np.arange(0, 241, 8),
        4,
    )
    order = windowed(groups, 7, k)
    for epoch in range(3):
        rows = np.array(whole(order, epoch))
        seen: list[int] = []
        for start in range(0, 240, 32):
            window = rows[start : start + 32]
            inside = np.unique(window // 8)
            assert len(inside) == len(window) // 8  # whole groups only
            # a group's worth of rows holds rows of several
            assert len(np.unique(window[:8] // 8)) > 1
            seen += inside.tolist()
        assert sorted(seen) == list(range(30))


def test_default_window_holds_ten_groups_and_4096_rows() -> None:
    assert default_window_groups(np.arange(0, 100_001, 1000)) == 10
    assert default_window_groups(np.arange(0, 10_001, 100)) == 41
    assert default_window_groups(np.array([0, 0])) == 4096


# Keys

numbers = st.integers(0, 3) | st.sampled_from(
    [2**32 - 1, 2**32, 2**32 + 7, 2**33, 2**63, 2**64 - 1]
)
derived = st.sampled_from([domain for domain in Domain if domain.num_parts is not None])
inputs = derived.flatmap(
    lambda domain: st.tuples(
        numbers, st.just(domain), *[numbers] * (domain.num_parts or 0)
    )
)


@given(inputs, inputs)
@settings(max_examples=300)
def test_distinct_seeds_uses_and_parts_never_share_the_input_of_a_key(
    one: tuple[int, ...], other: tuple[int, ...]
) -> None:
    words = [key_words(*of) for of in (one, other)]  # type: ignore[arg-type]
    assert all(0 <= word < 2**32 for of in words for word in of)
    most = max(map(len, words))  # SeedSequence fills up with zeros
    padded = [[*of, *[0] * (most - len(of))] for of in words]
    assert (padded[0] == padded[1]) == (one == other)
