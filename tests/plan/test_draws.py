from __future__ import annotations

import numpy as np
import pytest

from raypipe.plan.draws import Draws, Once, Passes, Repeated, Walk
from raypipe.plan.order import GlobalOrder, StoredOrder


def drawn(draws: Draws, epoch: int, num: int) -> list[tuple[int, int]]:
    indices, repeats = draws.draws(epoch, np.arange(num))
    assert indices.dtype == np.int64 and (repeats is None or repeats.dtype == np.int64)
    return list(zip(indices.tolist(), ([0] * num if repeats is None else repeats.tolist()), strict=True))


def test_a_walk_goes_on_where_the_epoch_before_ended_and_repeats_count_an_epochs_passes() -> None:
    walk = Walk(Passes(Once(StoredOrder(5))), 3)
    assert [drawn(walk, epoch, 3) for epoch in range(3)] == [
        [(0, 0), (1, 0), (2, 0)],
        [(3, 0), (4, 0), (0, 1)],
        [(1, 0), (2, 0), (3, 0)],
    ]
    assert drawn(Walk(Passes(Once(StoredOrder(2))), 5), 0, 5) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]


def test_a_walk_of_whole_passes_is_the_plain_order() -> None:
    order = GlobalOrder(7, 3)
    for epoch in range(3):
        expected = [(index, 0) for index in order.indices(epoch, np.arange(7)).tolist()]
        assert drawn(Walk(Passes(Once(order)), 7), epoch, 7) == expected


def test_over_a_run_a_walk_draws_all_samples_equally_often() -> None:
    walk = Walk(Passes(Once(GlobalOrder(7, 3))), 4)
    run = [index for epoch in range(7) for index, _ in drawn(walk, epoch, 4)]
    assert np.bincount(run).tolist() == [4] * 7


def test_copies_stand_side_by_side_or_in_neighbouring_micro_batches() -> None:
    inner = Walk(Passes(Once(StoredOrder(3))), 4)  # 0 1 2 0, the last one in a second pass
    assert drawn(Repeated(inner, 2, 1), 0, 8) == [
        *((0, 0), (0, 1), (1, 0), (1, 1)),
        *((2, 0), (2, 1), (0, 2), (0, 3)),
    ]
    assert drawn(Repeated(inner, 2, 2), 0, 8) == [
        *((0, 0), (1, 0), (0, 1), (1, 1)),
        *((2, 0), (0, 2), (2, 1), (0, 3)),
    ]


@pytest.mark.parametrize("stride", [1, 3])
def test_what_is_repeated_is_the_same_one_at_a_time(stride: int) -> None:
    draws = Repeated(Walk(Passes(Once(GlobalOrder(5, 1))), 6), 3, stride)
    together = drawn(draws, 4, 18)
    for position in range(18):
        index, repeat = draws.draws(4, np.array([position]))
        assert repeat is not None and (int(index[0]), int(repeat[0])) == together[position]
    assert len(set(together)) == 18
