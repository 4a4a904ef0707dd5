from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.rank_group import rank_groups
from raypipe.plan.schedule import Plan, rank_of
from raypipe.stores.memory import MemoryStore

M = 12


def plan_of() -> Plan:
    """Two epochs of 5 steps of 12 micro-batches, with validations of 2 steps."""
    config = PlanConfig(epochs=2, micro_batch=1, per_step=M)
    return Plan.of(config, MemoryStore([b""] * 63, [0] * 63), MemoryStore([b""] * 13, [0] * 13))


def test_four_ranks_in_two_groups() -> None:
    first, second = rank_groups(4, 2)
    assert [first.in_stream(n) for n in range(6)] == [0, 1, 4, 5, 8, 9]
    assert [second.in_stream(n) for n in range(6)] == [2, 3, 6, 7, 10, 11]
    assert second.in_stream(np.arange(3)).tolist() == [2, 3, 6]


shapes = st.sampled_from([(w, g) for w in (1, 2, 3, 4, 6, 12) for g in range(1, w + 1) if w % g == 0])


@settings(deadline=None)
@given(shapes, st.integers(0, 10), st.data())
def test_the_groups_put_together_are_the_stream_from_any_cursor_on(
    shape: tuple[int, int], global_step: int, data: st.DataObject
) -> None:
    plan = plan_of()
    cursor = plan.cursor_at(global_step)
    world_size, executions = shape
    whole = list(plan.micro_batches(cursor))
    groups = rank_groups(world_size, executions)
    streams = [list(plan.micro_batches(cursor, 0, group)) for group in groups]
    for group, stream in zip(groups, streams, strict=True):
        assert len(stream) == plan.num_micro_batches(cursor, group)
        # In the order of the stream, and each to the rank that it has without groups.
        ranks = range(group.index * group.size, (group.index + 1) * group.size)
        assert stream == [at for number, at in enumerate(whole) if number % world_size in ranks]
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
