from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from raypipe.plan.order import Shuffle
from raypipe.plan.samplers import (
    Permuted,
    Repeated,
    RunSampler,
    Weighted,
    WithRest,
    as_integers,
)
from raypipe.plan.selection import Selection


def in_order(size: int) -> Permuted:
    return Permuted(Shuffle("off", size, 3), Selection([], size))


def weighted(weights: list[float], size: int, kind: Any) -> Weighted:
    num = len(weights)
    return Weighted(
        as_integers(np.array(weights)), Shuffle(kind, num, 1), Selection([], num), size
    )


def drawn(sampler: RunSampler, first: int, num: int) -> list[tuple[int, int, int]]:
    """Index, pass and repeat."""
    draws = sampler.draw(np.arange(first, first + num))
    assert {column.dtype for column in draws} == {
        np.dtype(np.int64)
    } and not draws.buckets.any()
    return list(zip(*(column.tolist() for column in draws[:3]), strict=True))


# The rest of an epoch


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        (8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (7, [[0, 1], [2, 3], [4, 5], [6, 0]]),
        (6, [[0, 1], [2, 3], [4, -1], [5, -1]]),
        (5, [[0, 1], [2, 3], [4, -1], [0, -1]]),
        (1, [[0, -1], [0, -1]]),
    ],
)
def test_the_rest_comes_in_equal_numbers_for_each_micro_batch(
    size: int, rows: list[list[int]]
) -> None:
    sampler = WithRest(in_order(size), size, per_step=2, unit=2)
    expected = [index for row in rows for index in row]
    num = len(expected)
    for epoch in (0, 3):
        draws = drawn(sampler, epoch * num, num)
        assert [index for index, _, _ in draws] == expected
        assert {number for _, number, _ in draws} == {epoch}
        counted = [draw for draw in draws if draw[0] >= 0]
        assert len(set(counted)) == len(counted)


# Each sample once


def test_the_rest_of_a_billion_samples_costs_no_memory() -> None:
    billion = 10**9
    sampler = Permuted(
        Shuffle("global", billion - 2, 0), Selection([5, billion // 2], billion)
    )
    sampler.draw(np.arange(2))  # numpy imports what it needs at first use
    tracemalloc.start()
    sampler.draw(np.arange(7 * billion - 1000, 7 * billion))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# Copies


def test_copies_stand_side_by_side_or_in_neighbouring_micro_batches() -> None:
    inner = in_order(3)  # 0 1 2 0, the last one in a second pass
    assert drawn(Repeated(inner, 2, 1), 0, 8) == [
        *((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)),
        *((2, 0, 0), (2, 0, 1), (0, 1, 0), (0, 1, 1)),
    ]
    assert drawn(Repeated(inner, 2, 2), 0, 8) == [
        *((0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)),
        *((2, 0, 0), (0, 1, 0), (2, 0, 1), (0, 1, 1)),
    ]


# By weights


def test_passes_round_differently_so_that_all_is_in_proportion_over_a_run() -> None:
    draws = drawn(weighted([0.5, 1.5, 1, 0], 3, "global"), 0, 400 * 3)
    assert Counter(of_pass for _, of_pass, _ in draws) == dict.fromkeys(range(400), 3)
    counts = Counter(index for index, _, _ in draws)
    assert abs(counts[0] - 200) < 40 and abs(counts[1] - 600) < 40
    assert counts[2] == 400 and counts[3] == 0


def test_numbers_beyond_64_bits_are_exact() -> None:
    weights, size = [1.0, 2.0, 1e-3, 7.0], 3_000_000_000
    sampler = weighted(weights, size, "off")
    ends = sampler._first_draws(0, np.arange(5)).tolist()[1:]
    assert ends[-1] == size
    for sample, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        assert drawn(sampler, end - 1, 1) == [(sample, 0, end - begin - 1)]
