from __future__ import annotations

import itertools
from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError, CursorError
from raypipe.plan.places import Cursor, MicroBatchId
from raypipe.plan.samplers import Permuted
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.planning import make_plan


@cache
def store(size: int, group_size: int | None = None, salt: int = 0) -> MemoryStore:
    return MemoryStore(
        [bytes([i % 256, salt]) for i in range(size)], [0] * size, group_size=group_size
    )


def plan_of(
    size: int = 7,
    val: int = 0,
    group_size: int | None = None,
    exclude: Collection[int] = (),
    val_exclude: Collection[int] = (),
    **config: Any,
) -> Plan:
    return make_plan(
        PlanConfig(**{"epochs": 2, "micro_batch_size": 2, **config}),
        store(size, group_size),
        store(val) if val else None,
        selections=[Selection(list(exclude), size)],
        val_selection=Selection(list(val_exclude), val),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    micro_batch, per_step = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    num_kept = draw(st.integers(micro_batch * per_step, micro_batch * per_step + 60))
    num_left_out, num_val = draw(st.integers(0, 20)), draw(st.integers(0, 40))
    size = num_kept + num_left_out
    return plan_of(
        size,
        num_val,
        draw(st.sampled_from([None, 1, 4, 1000])),
        exclude=draw(
            st.sets(
                st.integers(0, size - 1), min_size=num_left_out, max_size=num_left_out
            )
        ),
        val_exclude=draw(st.sets(st.integers(0, num_val - 1), max_size=num_val - 1))
        if num_val
        else (),
        epochs=draw(st.integers(1, 4)),
        micro_batch_size=micro_batch,
        global_batch_size=micro_batch * per_step,
        seed=draw(st.integers(0, 2**63)),
        shuffle=draw(st.sampled_from(["auto", "global", "off", 1, 2, 3])),
        val_interval=draw(st.integers(0, 3)),
    )


def whole(plan: Plan) -> list[MicroBatchId]:
    return list(plan.micro_batches(plan.start()))


def kind_of(plan: Plan) -> str:
    assert plan.training and isinstance(plan.training.sampler, Permuted)
    return plan.training.sampler.shuffle.kind


def cursors(plan: Plan) -> list[Cursor]:
    """Every cursor that a run can checkpoint."""
    found = [
        Cursor(epoch, step, plan.fingerprint)
        for epoch in range(plan.config.epochs)
        for step in range(plan.steps_per_epoch + 1)
    ]
    return [*found, Cursor(plan.config.epochs, 0, plan.fingerprint)]


# The schedule


@given(plans())
def test_segments_micro_batches_and_their_number_agree(plan: Plan) -> None:
    for cursor in cursors(plan):
        left = list(plan.micro_batches(cursor))
        spelled = [
            MicroBatchId(segment.split, segment.epoch, step, micro)
            for segment in plan.segments(cursor)
            for step in range(segment.first_step, segment.num_steps)
            for micro in range(plan.config.per_step)
        ]
        assert left == spelled
        assert plan.num_micro_batches(cursor) == len(left)


def test_a_million_epochs_are_counted_at_once() -> None:
    plan = plan_of(epochs=1 << 30, val_interval=0)
    assert plan.num_micro_batches(plan.start()) == plan.steps_per_epoch << 30
    middle = plan.cursor(1 << 29, 1)
    assert plan.num_micro_batches(middle) == (plan.steps_per_epoch << 29) - 1


def test_the_schedule_validates_at_intervals_and_at_the_end() -> None:
    def passes(**config: Any) -> list[str]:
        plan = plan_of(val=3, epochs=5, **config)
        return [
            f"{segment.split} {segment.epoch}"
            for segment in plan.segments(plan.start())
        ]

    train = [f"train {epoch}" for epoch in range(5)]
    assert passes(val_interval=1) == [
        f"{split} {epoch}" for epoch in range(5) for split in ("train", "val")
    ]
    assert passes(val_interval=2) == [
        *train[:2],
        "val 1",
        *train[2:4],
        "val 3",
        train[4],
        "val 4",
    ]
    assert passes(val_interval=9) == [*train, "val 4"]
    assert passes(val_interval=0) == train


@given(plans())
def test_plans_cut_off_at_steps_tile_the_schedule(plan: Plan) -> None:
    stream, num_steps = whole(plan), plan.config.epochs * plan.steps_per_epoch
    bounds = sorted(
        {0, num_steps // 3, plan.steps_per_epoch, num_steps - 1, num_steps} - {-1}
    )
    tiles = [
        list(plan.until(end).micro_batches(plan.cursor_at(start)))
        for start, end in itertools.pairwise(bounds)
    ]
    assert [at for tile in tiles for at in tile] == stream
    for (start, end), tile in zip(itertools.pairwise(bounds), tiles, strict=True):
        cut = plan.until(end)
        assert cut.num_micro_batches(plan.cursor_at(start)) == len(tile)
        train = [at for at in tile if at.split == "train"]
        assert len(train) == (end - start) * plan.config.per_step
        assert all(np.array_equal(cut.indices(at), plan.indices(at)) for at in tile)
        assert cut.fingerprint == plan.fingerprint


# Resume


def test_the_cursor_of_another_plan_names_both_fingerprints() -> None:
    plan, other = plan_of(seed=0), plan_of(seed=1)
    with pytest.raises(
        CursorError,
        match=f"under plan {other.fingerprint}, this run has plan {plan.fingerprint}",
    ):
        plan.check(other.start())
    with pytest.raises(CursorError):
        next(plan.segments(other.start()))


@pytest.mark.parametrize(("epoch", "step"), [(-1, 0), (3, 0), (0, -1), (0, 4)])
def test_a_cursor_out_of_range_names_its_place_and_the_plans_size(
    epoch: int, step: int
) -> None:
    plan = plan_of(7)
    with pytest.raises(
        CursorError,
        match=f"epoch {epoch}, step {step}; this run has 2 epochs of 3 steps",
    ):
        plan.check(Cursor(epoch, step, plan.fingerprint))


# What a plan cannot be made of


@pytest.mark.parametrize(
    ("size", "exclude", "message"),
    [
        (5, [], r"has 5 samples, fewer than a global batch of 6: lower plan\.glob"),
        (7, [0, 6], "has 5 samples beside the 2 that are left out, fewer than a glo"),
    ],
)
def test_a_store_smaller_than_a_step_names_the_numbers(
    size: int, exclude: list[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(size, global_batch_size=6, exclude=exclude)
    assert plan_of(size + 1, global_batch_size=6, exclude=exclude).steps_per_epoch == 1


def test_shuffle_needs_groups_for_windows_and_takes_them_by_itself() -> None:
    with pytest.raises(
        ConfigError, match=r"memory:\w+ is not read in groups: use plan\.shuffle=global"
    ):
        plan_of(shuffle="window")
    assert kind_of(plan_of()) == "global"
    assert kind_of(plan_of(group_size=3)) == "window"
    assert kind_of(plan_of(group_size=3, shuffle="global")) == "global"


def test_check_workers_lists_the_divisors() -> None:
    plan = plan_of(30, global_batch_size=24)
    for world_size in (1, 2, 3, 4, 6, 12):
        plan.check_workers(world_size)
    for world_size in (-1, 0, 5, 24):
        with pytest.raises(
            ConfigError,
            match=rf"{world_size} workers .* the 12 .* use 1, 2, 3, 4, 6, 12 workers",
        ):
            plan.check_workers(world_size)


# The fingerprint


def test_the_fingerprint_changes_with_contents_groups_and_windows() -> None:
    config = PlanConfig(micro_batch_size=2)
    assert (
        make_plan(config, store(7, salt=1)).fingerprint
        != make_plan(config, store(7)).fingerprint
    )
    windows = {
        plan_of(group_size=g, shuffle=k).fingerprint for g in (2, 3) for k in (1, 2)
    }
    assert len(windows) == 4


def test_lengthening_or_watching_a_run_keeps_the_fingerprint() -> None:
    assert plan_of(epochs=9, val=3, val_interval=2).fingerprint == plan_of().fingerprint
    assert plan_of(shuffle="global").fingerprint == plan_of(shuffle="auto").fingerprint
    # no groups, no windows
    assert plan_of(shuffle=5).fingerprint == plan_of().fingerprint


# Seeds


@given(plans())
def test_micro_batch_seeds_are_distinct_and_in_range(plan: Plan) -> None:
    stream = whole(plan)
    seeds = [plan.micro_batch_seed(at) for at in stream]
    assert len(set(seeds)) == len(stream)
    assert all(0 <= seed < 2**63 for seed in seeds)


# The clock of the run


@given(plans())
def test_the_clock_of_the_run_counts_training_steps_alone(plan: Plan) -> None:
    done, total = 0, plan.config.epochs * plan.steps_per_epoch
    for at in whole(plan):
        assert plan.global_step(at) == done, (
            "before the step of each micro-batch, of either split"
        )
        assert 0 <= plan.progress(plan.global_step(at)) <= 1
        done += at.split == "train" and at.micro + 1 == plan.config.per_step
    assert done == total and plan.progress(plan.global_step(plan.cursor_at(total))) == 1
