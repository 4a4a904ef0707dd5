"""Steps that a run leaves out: the rest of the schedule, its cursors, and changes at a resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError, CursorError
from raypipe.plan.compose import StoreArrays
from raypipe.plan.places import Cursor, MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.plan.skipped import Skipped

STEPS = 6  # of each of three epochs, with two micro-batches of 4


def plan_of(*skip: int | str, val: int = 5, **settings: int) -> Plan:
    defaults = {"epochs": 3, "micro_batch_size": 4, "global_batch_size": 8, "seed": 1}
    config = PlanConfig(**defaults | settings, skip=list(skip))  # type: ignore[arg-type]
    train = StoreArrays("train", "f" * 32, Selection([], 50))
    return Plan.of(config, train, StoreArrays("val", "f" * 32, Selection([], val)))


def places(plan: Plan, cursor: Cursor | None = None) -> list[MicroBatchId]:
    return list(plan.micro_batches(cursor or plan.start()))


def number(at: MicroBatchId) -> int:
    """A training step's number, from 1."""
    return at.epoch * STEPS + at.step + 1


# The setting


@pytest.mark.parametrize("steps", ["0", "a", "3..2", "1...4", "-1", "1..", 0, "2,3"])
def test_other_things_than_steps_are_rejected(steps: int | str) -> None:
    with pytest.raises(ConfigError, match=r"plan\.skip must be"):
        PlanConfig(skip=[steps])


def test_steps_that_the_run_does_not_have_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"has the steps 1 to 18, .* skips step 19"):
        plan_of("17..19")
    with pytest.raises(ConfigError, match="skips all of them"):
        plan_of("1..18")


def test_steps_that_are_left_out_are_none_of_those_ahead() -> None:
    plan = plan_of("2..3", 5)
    stream = places(plan)
    for number, position in enumerate(stream):
        for num in (0, 1, 4):
            expected = stream[number + num : number + num + 1] or [None]
            ahead = plan.micro_batches(position, position.micro + num)
            assert [next(ahead, None)] == expected
    [training, *_] = plan.segments(plan.start())
    only = plan.only(training)
    assert list(only.micro_batches(places(only)[2])) == places(only)[2:]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=5),
    st.integers(0, 20),
)
def test_steps_are_counted_without_those_that_are_left_out(
    ranges: list[tuple[int, int]], first: int
) -> None:
    skipped = Skipped.of((start, start + size) for start, size in ranges)
    left = [
        step
        for step in range(first, 100)
        if not any(start <= step < start + size for start, size in ranges)
    ]
    assert [skipped.step_after(first, n) for n in range(40)] == left[:40]
    assert 100 - first - skipped.within(first, 100).count == len(left)
    assert all(skipped.has(step) != (step in left) for step in range(first, 100))


# The schedule


@pytest.mark.parametrize("val", [0, 5])
@pytest.mark.parametrize("skip", ["3", "1..2", "5..8", "7..12", "6", "18", "13..18"])
def test_all_other_steps_keep_their_places_and_draws(skip: str, val: int) -> None:
    first, _, last = skip.partition("..")
    left_out = range(int(first), int(last or first) + 1)
    whole = plan_of(val=val)
    plan = plan_of(skip, val=val)
    expected = [
        at for at in places(whole) if at.split == "val" or number(at) not in left_out
    ]
    assert places(plan) == expected
    assert plan.num_micro_batches(plan.start()) == len(expected)
    for at in expected:
        assert plan.draw(at).indices.tolist() == whole.draw(at).indices.tolist()
        assert plan.micro_batch_seed(at) == whole.micro_batch_seed(at)
        assert plan.progress(plan.global_step(at)) == whole.progress(
            whole.global_step(at)
        )
    # from any step on
    for done in range(3 * STEPS):
        rest = [at for at in expected if at.epoch * STEPS + STEPS > done]
        rest = [at for at in rest if at.split == "val" or number(at) > done]
        assert places(plan, plan.cursor_at(done)) == rest


# The fingerprint


def test_a_plan_that_skips_nothing_keeps_its_fingerprint() -> None:
    assert plan_of().fingerprint == plan_of().order_fingerprint
    assert plan_of("3..4").fingerprint == plan_of("4", 3).fingerprint
    different = {plan_of(*skip).fingerprint for skip in ((), (3,), (4,), ("3..4",))}
    assert len(different) == 4


def test_a_resumed_run_may_skip_steps_that_lie_ahead() -> None:
    cursor = plan_of("2..3").cursor_at(4)
    for skip in (("2..3",), ("2..3", "5..8"), ("2..3", "10")):
        plan_of(*skip).check(cursor)
    # the stretch itself may grow, and a cursor in front of it knows nothing of it
    plan_of("2..6").check(plan_of("2..3").cursor_at(3))
    plan_of("2..3").check(plan_of().cursor_at(1))
    plan_of().check(plan_of("2..3").cursor_at(1))


@pytest.mark.parametrize("skip", [(), ("2",), ("1..3",), ("2..4",)])
def test_steps_behind_the_checkpoint_cannot_change(skip: tuple[str, ...]) -> None:
    cursor = plan_of("2..3").cursor_at(4)
    named = r"plan\.skip before the checkpoint's step 4"
    with pytest.raises(CursorError, match=named):
        plan_of(*skip).check(cursor)
