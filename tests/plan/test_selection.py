from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.plan.selection import JoinedSelection, Selection


@given(st.sets(st.integers(0, 40)), st.integers(1, 60))
@settings(max_examples=80, deadline=None)
def test_kept_samples_are_numbered_in_their_order(
    left_out: set[int], size: int
) -> None:
    kept = Selection(sorted(left_out, reverse=True), 61)
    indices = np.array(
        [index for index in range(size) if index not in left_out], np.int64
    )
    numbers = np.arange(len(indices))
    assert kept.indices(numbers).tolist() == indices.tolist()
    assert kept.numbers(indices).tolist() == numbers.tolist()


@given(st.lists(st.booleans(), min_size=1, max_size=60))
@settings(max_examples=80, deadline=None)
def test_what_is_selected_is_numbered_in_its_order_however_it_is_held(
    keep: list[bool],
) -> None:
    indices, found = np.flatnonzero(keep), Selection.where(np.array(keep))
    assert found.num_left_out == len(keep) - len(indices)
    assert found.includes == (len(indices) < found.num_left_out)
    included = Selection(indices, len(keep), includes=True)
    for selection in (
        found,
        included,
        Selection(np.flatnonzero(~np.array(keep)), len(keep)),
    ):
        assert (selection.size, selection.num_samples) == (len(indices), len(keep))
        assert selection.indices(np.arange(len(indices))).tolist() == indices.tolist()
        before = [sum(keep[:index]) for index in range(len(keep) + 1)]
        assert selection.numbers(np.arange(len(keep) + 1)).tolist() == before


def test_a_selection_takes_the_smallest_integers_and_the_shorter_list() -> None:
    keep = np.ones(70_000, bool)
    keep[[3, 254]] = False
    few = Selection.where(keep)
    assert not few.includes and few.listed.dtype == np.uint8
    assert few.indices(np.array([252, 253, 69_997])).tolist() == [253, 255, 69_999]
    assert few.numbers(np.array([254, 255, 256, 69_999])).tolist() == [
        253,
        253,
        254,
        69_997,
    ]
    most = Selection.where(~keep)
    assert (
        most.includes and most.listed.dtype == np.uint8 and most.num_left_out == 69_998
    )
    assert Selection.where(np.arange(70_000) % 3 == 0).indices(
        np.array([0, 23_333])
    ).tolist() == [0, 69_999]


def test_a_selection_may_leave_out_a_sample_beyond_32_bits() -> None:
    kept = Selection([5, 1 << 33], 1 << 34)
    assert kept.indices(np.array([4, 5, (1 << 33) - 1])).tolist() == [
        4,
        6,
        (1 << 33) + 1,
    ]
    assert kept.numbers(np.array([(1 << 33) + 1])).tolist() == [(1 << 33) - 1]


def test_to_look_up_samples_copies_no_list() -> None:
    kept = Selection(np.arange(0, 2_000_000, 2), 2_000_000)
    tracemalloc.start()
    kept.indices(kept.numbers(np.arange(1, 1001, 2)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_selections_of_several_stores_are_numbered_through() -> None:
    parts = [Selection([1], 3), Selection([], 2), Selection([4], 5, includes=True)]
    joined = JoinedSelection(parts, np.array([0, 3, 5, 10]))
    assert (joined.size, joined.num_left_out, joined.num_samples) == (5, 5, 10)
    assert joined.indices(np.arange(5)).tolist() == [0, 2, 3, 4, 9]
    assert joined.indices(np.array([4, 0])).tolist() == [9, 0]


def test_signatures_tell_selections_apart() -> None:
    nothing = Selection([], 9)
    parts = [Selection([1], 9), Selection([2], 9), Selection([1], 9, includes=True)]
    assert nothing.signature() == "" and len({part.signature() for part in parts}) == 3
