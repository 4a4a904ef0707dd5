from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import ConfigError
from raypipe.plan import Cursor, Plan, PlanConfig, rank_of
from raypipe.rank_group import EVERY_RANK, RankGroup, rank_groups
from raypipe.relaxed import RelaxedQueue
from raypipe.stores.memory import MemoryStore

M = 12


def plan_of(order: str = "strict", window: int = 16) -> Plan:
    """Two epochs of 5 steps of 12 micro-batches, with validations of 2 steps."""
    config = PlanConfig(epochs=2, micro_batch=1, per_step=M, order=order, relaxed_window=window)  # type: ignore[arg-type]
    return Plan.of(config, MemoryStore([b""] * 63, [0] * 63), MemoryStore([b""] * 13, [0] * 13))


def test_four_ranks_in_two_groups() -> None:
    first, second = rank_groups(4, 2)
    assert [first.in_stream(n) for n in range(6)] == [0, 1, 4, 5, 8, 9]
    assert [second.in_stream(n) for n in range(6)] == [2, 3, 6, 7, 10, 11]
    assert second.in_stream(np.arange(3)).tolist() == [2, 3, 6]


shapes = st.sampled_from([(w, g) for w in (1, 2, 3, 4, 6, 12) for g in range(1, w + 1) if w % g == 0])


@settings(deadline=None)
@given(shapes, st.integers(0, 10), st.sets(st.integers(0, 20)), st.data())
def test_the_groups_put_together_are_the_stream_from_any_cursor_on(
    shape: tuple[int, int], global_step: int, ahead: set[int], data: st.DataObject
) -> None:
    plan = plan_of("relaxed")
    cursor = plan.cursor_at(global_step)
    if 2 <= cursor.step < 5:
        # Whichever micro-batches were done before their turn.
        done = {*range((cursor.step - 1) * M), *(number + (cursor.step - 1) * M for number in sorted(ahead)[:M])}
        missing = (number for number in range(60) if number not in done)
        done |= {next(missing) for _ in range(cursor.step * M - len(done))}
        frontier = next(number for number in range(60) if number not in done)
        past = tuple(sorted(number for number in done if number > frontier))
        cursor = Cursor(cursor.epoch, cursor.step, cursor.fingerprint, past)
    world_size, executions = shape
    whole = list(plan.micro_batches(cursor))
    groups = rank_groups(world_size, executions)
    streams = [list(plan.micro_batches(cursor, 0, group)) for group in groups]
    for group, stream in zip(groups, streams, strict=True):
        assert len(stream) == plan.num_micro_batches(cursor, group)
        # In the order of the stream, and each to the rank that it has without groups.
        ranks = range(group.index * group.size, (group.index + 1) * group.size)
        assert stream == [at for number, at in enumerate(whole) if number % world_size in ranks]
        if not cursor.ahead:
            assert all(rank_of(at.micro, world_size) == ranks[n % group.size] for n, at in enumerate(stream))
        first = data.draw(st.integers(0, len(stream)))
        assert list(plan.micro_batches(cursor, first, group)) == stream[first:]
    assert sorted(map(str, whole)) == sorted(str(at) for stream in streams for at in stream)


@given(shapes, st.integers(0, 1000))
def test_the_shares_of_the_groups_are_even_and_add_up(shape: tuple[int, int], total: int) -> None:
    shares = [group.share(total) for group in rank_groups(*shape)]
    assert sum(shares) == total and max(shares) - min(shares) <= 1


def test_a_number_of_executions_that_does_not_divide_the_workers_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"pool\.executions=4 does not divide 6 workers.* use 1, 2, 3, 6$"):
        rank_groups(6, 4)


# The relaxed order, where each group relaxes its own stream


class Bundle:
    """As much of Ray Data's bundle as a queue looks at."""

    blocks = ()

    def __init__(self, key: int) -> None:
        self.key = key

    def num_rows(self) -> int:
        return 1

    def size_bytes(self) -> int:
        return 1

    def __len__(self) -> int:
        return 1


def relaxed_stream(plan: Plan, cursor: Cursor, group: RankGroup, ready_at: Iterable[float]) -> list[int]:
    """Numbers of epoch 0 in the order in which a group's queue lets them go, when each is ready at its time."""
    sizes = [group.count((s.num_steps - s.first_step) * M) for s in plan.segments(cursor)]
    queue = RelaxedQueue(plan.config.relaxed_window, list(accumulate(sizes)), cursor.left(M), group)
    numbers = [at.step * M + at.micro for at in plan.micro_batches(cursor, 0, group)][: sizes[0]]
    arriving = [(when, key) for key, when in zip(range(sizes[0]), ready_at, strict=False)]
    heapq.heapify(arriving)
    left = []
    while arriving:
        _, key = heapq.heappop(arriving)
        queue._add_inner(Bundle(key), key)
        queue.finalize(key)
        while queue.has_next():
            left.append(numbers[queue._get_next_inner().key])
    assert sorted(left) == numbers
    return left


@settings(deadline=None)
@given(st.lists(shapes, min_size=2, max_size=4), st.integers(1, 20), st.randoms())
def test_none_is_early_or_late_by_the_window_and_a_cursor_holds_whatever_groups_come_next(
    lives: list[tuple[int, int]], window: int, chance: object
) -> None:
    plan = plan_of("relaxed", window)
    rng = np.random.default_rng(chance.getrandbits(32))  # type: ignore[attr-defined]
    cursor, seen = plan.start(), set()
    for step, shape in enumerate(lives, 1):
        for group in rank_groups(*shape):
            # Some are very late.
            ready_at = rng.permutation(60) * 0.1 + np.arange(60) + 30 * (rng.random(60) < 0.2)
            came = relaxed_stream(plan, cursor, group, ready_at)
            for key, number in enumerate(came[: group.count(M)]):
                turn = cursor.step * M + group.in_stream(key)
                assert abs(number - turn) < window and number not in seen
                seen.add(number)
        recent = {number for number in seen if number >= step * M - window}
        cursor = plan.cursor_after(0, step, recent)
        plan.check(cursor)
        assert {at.step * M + at.micro for at in plan.until(5).micro_batches(cursor) if at.split == "train"} == (
            set(range(60)) - seen
        )


def test_the_group_of_one_execution_is_the_whole_stream() -> None:
    whole = RankGroup(0, 4, 4)
    assert [whole.in_stream(n) for n in range(9)] == [EVERY_RANK.in_stream(n) for n in range(9)] == list(range(9))
