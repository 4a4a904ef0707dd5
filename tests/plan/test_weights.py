from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ConfigError
from raypipe.plan.selection import Kept
from raypipe.plan.weights import Weighted, as_integers, balanced, check_weights

ALL = Kept(np.array([], np.int64))
weight_lists = st.lists(st.integers(0, 9) | st.floats(0.01, 3), min_size=1, max_size=30).filter(any)


def draws_of(leaf: Weighted, number: int) -> list[tuple[int, int]]:
    indices, repeats = leaf.draws(number, np.arange(leaf.size))
    assert repeats is not None
    return list(zip(indices.tolist(), repeats.tolist(), strict=True))


@given(weight_lists, st.integers(1, 60), st.sampled_from(["global", "window", "off"]), st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_each_sample_is_drawn_as_often_as_its_weight_says_rounded_down_or_up(
    weights: list[float], size: int, shuffle: str, number: int
) -> None:
    groups = np.unique([0, len(weights) // 3, len(weights)])
    leaf = Weighted(np.array(weights), size, 7, ALL, shuffle, groups, 1)
    drawn = draws_of(leaf, number)
    counts, exact = Counter(index for index, _ in drawn), as_integers(np.array(weights)).tolist()
    for index, weight in enumerate(exact):
        least = weight * size // sum(exact)
        assert least <= counts[index] <= least + (weight * size % sum(exact) > 0)
        assert sorted(repeat for each, repeat in drawn if each == index) == list(range(counts[index]))
    assert max(counts.values()) <= leaf.copies
    assert leaf.counts(number).tolist() == [counts[index] for index in range(len(weights))]


def test_classes_in_turn_are_not_in_step_with_the_draws() -> None:
    labels = np.arange(200) ** 2 % 5  # 40 of 0, 80 of 1, 80 of 4, the same in every five
    leaf = Weighted(balanced(labels, 1), 200, 1, ALL, classes=labels)
    for number in range(3):
        assert sorted(np.bincount(labels, leaf.counts(number))[[0, 1, 4]]) == [66, 67, 67]


def test_golden_weighted_draws() -> None:
    leaf = Weighted(np.array([2, 4, 1, 1]), 6, 3, ALL)
    assert draws_of(leaf, 0) == [(1, 1), (0, 1), (1, 2), (0, 0), (3, 0), (1, 0)]
    assert draws_of(leaf, 1) == [(0, 0), (2, 0), (1, 0), (1, 1), (1, 2), (0, 1)]


def test_passes_round_differently_so_that_all_is_in_proportion_over_a_run() -> None:
    leaf = Weighted(np.array([0.5, 1.5, 1, 0]), 3, 1, ALL)
    counts = Counter(index for number in range(400) for index, _ in draws_of(leaf, number))
    assert abs(counts[0] - 200) < 40 and abs(counts[1] - 600) < 40 and counts[2] == 400 and counts[3] == 0


def test_samples_of_a_group_stay_in_its_window() -> None:
    leaf = Weighted(np.tile([1, 2, 3], 20), 120, 5, ALL, "window", np.arange(0, 61, 6), 2)
    for number in range(3):
        indices, _ = leaf.draws(number, np.arange(120))
        groups = [set((indices[start : start + 24] // 6).tolist()) for start in range(0, 120, 24)]
        assert [len(each) for each in groups] == [2] * 5 and len(set().union(*groups)) == 10


def test_what_is_left_out_is_never_drawn_and_indices_are_the_stores() -> None:
    leaf = Weighted(np.array([1, 1, 2]), 8, 5, Kept(np.array([0, 2])), "off")
    assert Counter(index for index, _ in draws_of(leaf, 0)) == {1: 2, 3: 2, 4: 4}


def test_a_pickled_leaf_draws_the_same_and_has_no_layout() -> None:
    leaf = Weighted(np.arange(1, 50), 49, 5, ALL, "window", np.arange(0, 50, 7), 2)
    cold = len(pickle.dumps(leaf))
    before = draws_of(leaf, 3)
    assert len(pickle.dumps(leaf)) == cold and draws_of(pickle.loads(pickle.dumps(leaf)), 3) == before


def test_numbers_beyond_64_bits_are_exact() -> None:
    size = 3_000_000_000
    leaf = Weighted(np.array([1.0, 2.0, 1e-3, 7.0]), size, 1, ALL, "off")
    ends = leaf.first_draws(0, np.arange(5))
    for sample, end in enumerate(ends[1:].tolist()):
        indices, repeats = leaf.draws(0, np.array([end - 1]))
        assert repeats is not None
        assert (int(indices[0]), int(repeats[0])) == (sample, end - 1 - int(ends[sample]))
    assert ends[-1] == size


def test_whole_weights_stay_and_others_keep_their_proportions() -> None:
    assert as_integers(np.array([3.0, 0, 5])).tolist() == [3, 0, 5]
    scaled = as_integers(np.array([0.1, 0.2, 0.4]))
    assert scaled[1] == 2 * scaled[0] and scaled[2] == 4 * scaled[0] and 2**59 < scaled.sum() < 2**61
    assert as_integers(np.full(1000, 2.0**70)).sum() <= 2**61


def test_weights_whose_sum_overflows_keep_their_proportions() -> None:
    large, small = as_integers(np.array([1.7e308, 1.7e308, 0.85e308])), as_integers(np.array([2.0, 2.0, 1.0]) / 3)
    assert large.tolist() == pytest.approx((small * (large[0] / small[0])).tolist(), rel=1e-12)
    assert as_integers(np.array([5e-324, 1.7e308, 1.7e308])).tolist()[0] == 0


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, np.nan], [1, np.inf], [[1]]])
def test_what_are_no_weights_is_refused(weights: Any) -> None:
    with pytest.raises(ValueError, match="weights are finite numbers of at least 0"):
        as_integers(np.array(weights))


def test_balanced_classes_have_equal_shares_by_the_exponent() -> None:
    labels = np.array([0] * 8 + [5] * 2 + [9])
    for exponent, shares in {0.0: [8, 2, 1], 0.5: [8**0.5, 2**0.5, 1], 1.0: [1, 1, 1]}.items():
        weights = balanced(labels, exponent)
        assert [weights[labels == label].sum() for label in (0, 5, 9)] == pytest.approx(shares)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(3), r"plan\.weights has float64 of \(3,\): expected is one number for each of the store's 4"),
        (np.array(["a"] * 4), r"plan\.weights has <U1 of \(4,\)"),
        (np.array([1, 1, 1, -1]), "negative or no finite number"),
        (np.array([1, 1, 1, np.nan]), "negative or no finite number"),
    ],
)
def test_weights_that_do_not_fit_the_store_name_the_setting(weights: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_weights(weights, 4, "plan.weights")
