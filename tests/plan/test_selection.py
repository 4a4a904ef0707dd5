from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raypipe.plan.selection import Selection


@given(st.lists(st.booleans(), min_size=1, max_size=60))
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


def test_a_selection_may_leave_out_a_sample_beyond_32_bits() -> None:
    kept = Selection([5, 1 << 33], 1 << 34)
    assert kept.indices(np.array([4, 5, (1 << 33) - 1])).tolist() == [
        4,
        6,
        (1 << 33) + 1,
    ]
    assert kept.numbers(np.array([(1 << 33) + 1])).tolist() == [(1 << 33) - 1]


def test_signatures_tell_selections_apart() -> None:
    nothing = Selection([], 9)
    parts = [Selection([1], 9), Selection([2], 9), Selection([1], 9, includes=True)]
    assert nothing.signature() == "" and len({part.signature() for part in parts}) == 3
