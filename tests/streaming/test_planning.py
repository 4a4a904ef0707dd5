from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_streams import NUM, CountingStore, labels, spec_of

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.planning import balanced, check_weights, make_plan, nearest

WEIGHTS = np.arange(20) % 4 + 0.5


def weighted(by: str) -> Plan:
    images = [bytes([number]) for number in range(20)]
    store = MemoryStore(images, [0] * 20, columns={"weight": WEIGHTS})
    return make_plan(PlanConfig(micro_batch_size=2, weights=by), store)


# Which bucket a sample is in


def slowly(width: int, height: int, buckets: list[tuple[int, int]]) -> int:
    def apart(one: Fraction, other: Fraction) -> Fraction:
        return max(one, other) / min(one, other)

    def distance(bucket: tuple[int, int]) -> tuple[Fraction, Fraction]:
        ratio = apart(Fraction(width, height), Fraction(bucket[1], bucket[0]))
        return ratio, apart(Fraction(width * height), Fraction(bucket[0] * bucket[1]))

    return min(range(len(buckets)), key=lambda number: distance(buckets[number]))


sides = st.tuples(st.integers(1, 99_999), st.integers(1, 99_999))
few = st.tuples(st.integers(1, 12), st.integers(1, 12))  # so that there are ties


@given(
    st.lists(sides | few, min_size=1, max_size=6),
    st.lists(sides | few, min_size=1, max_size=20),
)
@settings(max_examples=100, deadline=None)
def test_a_samples_bucket_has_the_nearest_ratio_then_area(
    buckets: list[tuple[int, int]], images: list[tuple[int, int]]
) -> None:
    heights, widths = np.array(images).T
    found = nearest(widths, heights, buckets).tolist()
    assert found == [slowly(width, height, buckets) for height, width in images]


# Weights


def test_weights_from_a_file_are_those_of_a_column(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", WEIGHTS)
    by_file = weighted(str(tmp_path / "w.npy"))
    assert by_file.fingerprint == weighted("weight").fingerprint
    (tmp_path / "bad.npy").write_bytes(b"no array")
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }"
    (tmp_path / "huge.npy").write_bytes(
        b"\x93NUMPY\x01\0" + bytes([len(header), 0]) + header
    )
    for name in ("bad.npy", "none.npy", "huge.npy"):
        with pytest.raises(
            ConfigError, match=rf"plan\.weights: .*{name} cannot be read"
        ):
            weighted(str(tmp_path / name))


def test_balanced_classes_have_equal_shares_by_the_exponent() -> None:
    labels = np.array([0] * 8 + [5] * 2 + [9])
    for exponent, shares in {
        0.0: [8, 2, 1],
        0.5: [8**0.5, 2**0.5, 1],
        1.0: [1, 1, 1],
    }.items():
        weights = balanced(labels, exponent)
        assert [weights[labels == label].sum() for label in (0, 5, 9)] == pytest.approx(
            shares
        )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            np.ones(3),
            r"plan\.weights has float64 of \(3,\): it must have one number for each of the store's 4",
        ),
        (np.array(["a"] * 4), r"plan\.weights has <U1 of \(4,\)"),
        (
            np.array([1, 1, 1, -1]),
            "is -1.0 for sample 3: weights are finite numbers of at least 0",
        ),
        (
            np.array([1, 1, np.nan, 1]),
            "is nan for sample 2: weights are finite numbers of at least 0",
        ),
    ],
)
def test_weights_that_do_not_fit_the_store_name_the_setting(
    weights: np.ndarray, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_weights(weights, Selection([0], 4), "plan.weights")


def test_a_sample_that_is_left_out_needs_no_weight() -> None:
    weights = np.array([np.nan, 2, -1, 3])
    assert check_weights(weights, Selection([0, 2], 4), "plan.weights").tolist() == [
        2,
        3,
    ]


# Shares of stores


def kept(stores: Any, val: Any = None, **options: Any) -> tuple[set[int], set[int]]:
    """The indices that a stream trains on, and those that it validates on."""
    kept = spec_of(
        stores, val, train_transform=None, val_transform=None, **options
    ).plan.kept
    train, val = (set(of.indices(np.arange(of.size)).tolist()) for of in kept.values())
    return train, val


@pytest.mark.parametrize("is_named", [False, True])
def test_one_store_for_both_is_cut_without_overlap(is_named: bool) -> None:
    store = CountingStore()
    val = CountingStore() if is_named else None
    train, held_out = kept(store, val, take={"val": "25%"})
    assert train == set(range(NUM)) - held_out and len(held_out) == NUM // 4
    less, same = kept(store, val, take={"train": "50%", "val": "25%"})
    assert same == held_out and less < train and len(less) == NUM // 2
    half, others = kept(store, val, take="50%")
    assert half == less and others == (set(range(NUM)) - half if is_named else set())


def test_a_mixture_holds_out_a_part_of_each_store() -> None:
    stores = {"one": CountingStore(), "two": CountingStore()}
    train, val = kept(stores, take={"two": "first 24", "val": "last 12"})
    assert val == {*range(NUM - 12, NUM), *range(2 * NUM - 12, 2 * NUM)}
    assert train == {*range(NUM - 12), *range(NUM, NUM + 24)}


def test_lists_and_filters_do_not_move_the_cut() -> None:
    train, val = kept(CountingStore(), take={"val": "25%"})
    threes = {index for index, label in enumerate(labels()) if label == 3}
    filtered = kept(CountingStore(), take={"val": "25%"}, filter="label != 3")
    assert filtered == (train - threes, val - threes)


def test_a_plan_is_of_its_shares() -> None:
    takes = ["", "50%", "50% seed 1", "first 24", {"val": "25%"}, {"val": "50%"}]
    takes += [{"train": "50%", "val": "25%"}, {"train": "50%", "val": "40%"}]
    plans = [spec_of(CountingStore(), take=take).plan for take in takes]
    assert len({plan.fingerprint for plan in plans}) == len(takes)


@pytest.mark.parametrize(
    ("take", "message"),
    [
        (
            {"train": "80%", "val": "30%"},
            r"'80%' for training and '30%' for validation overlap",
        ),
        (
            {"train": "first 40", "val": "first 9"},
            r"'first 9' for validation overlap in",
        ),
        ({"val": "100%"}, r"store\.take, .* leave nothing of memory"),
        ({"big": "10%"}, r"store\.take must be .* by train, val, got"),
        ("some", r"store\.take must be words such as"),
        ({"val": "1%"}, r"store\.take '1%' has 0 samples, and the store 48"),
    ],
)
def test_shares_that_cannot_be_name_the_setting(take: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(CountingStore(), take=take)
