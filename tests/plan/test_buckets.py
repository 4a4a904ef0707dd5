"""Buckets; test_compositions.py has random plans with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.planning import make_plan

THREE = ["192x256", "224x224", "256x192"]
BOTH = {"train": THREE, "val": THREE}


def store(widths: Any, heights: Any, **options: Any) -> MemoryStore:
    columns = {"width": np.asarray(widths), "height": np.asarray(heights)}
    images = [bytes([i % 256]) for i in range(len(widths))]
    return MemoryStore(images, None, columns=columns, **options)


def varied(num: int) -> MemoryStore:
    rng = np.random.default_rng(0)
    return store(rng.integers(50, 400, num), rng.integers(50, 400, num))


def plan_of(train: Any, exclude: Any = (), **config: Any) -> Plan:
    given = {
        "epochs": 2,
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "seed": 3,
        "buckets": THREE,
        **config,
    }
    selections = [Selection(exclude, len(train))] if exclude else None
    return make_plan(PlanConfig(**given), train, varied(5), selections=selections)


# One by one


def test_padding_of_validations_is_told_apart_from_their_samples() -> None:
    # 5 samples, in micro-batches of 4, 4 in a step
    plan = plan_of(varied(50), buckets=BOTH, global_batch_size=16)
    found = [
        (plan.bucket_of(at), plan.indices(at).tolist())
        for at in plan.micro_batches(plan.start())
        if at.split == "val"
    ]
    padding = (256, 192), [-1, -1, -1, -1]
    assert (
        found
        == [((192, 256), [0, 1, 2, 3]), ((256, 192), [4, -1, -1, -1]), padding, padding]
        * 2
    )
    assert (plan.num_val, plan.val_steps, plan.without_draws().val_steps) == (5, 1, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"micro_batch_size": 64, "global_batch_size": 64},
            "none of plan.buckets has the samples of a micro-batch, 64",
        ),
        ({"global_batch_size": 80}, "fewer than a global batch of 80"),
    ],
)
def test_settings_that_do_not_go_with_a_store_are_named(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(varied(50), **config)


def test_stores_without_sizes_or_with_parts_are_told_what_to_do() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no column 'width' for plan\.buckets; .*`raypipe convert` adds it",
    ):
        plan_of(MemoryStore([b"x"] * 20, [0] * 20))
    unknown = store([5] * 17 + [-1, 0, 3], [5] * 19 + [-1])
    with pytest.raises(
        ConfigError,
        match=r"none for 3 samples, the first of them 17: set store\.filter to width > 0",
    ):
        plan_of(unknown)
    assert plan_of(unknown, [17, 18, 19]).steps_per_epoch == 2
    with pytest.raises(ConfigError, match=r"none for 1 samples, the first of them 1"):
        plan_of(
            MemoryStore(
                [b"x"] * 3, None, columns={"width": [4, None, 5], "height": [4, 4, 5]}
            )
        )
    with pytest.raises(
        ConfigError, match=r"plan\.shuffle 'window' reads .*: set plan\.shuffle=global"
    ):
        plan_of(grouped := store([5] * 20, [5] * 20, group_size=5))
    assert plan_of(grouped, shuffle="global").steps_per_epoch == 2


def test_errors_of_validation_buckets_name_the_validation() -> None:
    config = PlanConfig(micro_batch_size=4, buckets=BOTH)
    with pytest.raises(
        ConfigError,
        match=r"none for 1 samples, .*: set store\.filter to \{val: width > 0\}",
    ):
        make_plan(config, varied(50), store([4, 0], [4, 4]))
    assert (
        make_plan(
            config, varied(50), store([4, 0], [4, 4]), val_selection=Selection([1], 2)
        ).num_val
        == 1
    )
    assert make_plan(config, varied(50)).val_steps == 0


@pytest.mark.parametrize(
    "buckets",
    [
        ["224"],
        ["0x5"],
        ["5x-1"],
        ["192x256", "0192x256"],
        ["4x4", "4x4"],
        [224],
        {"val": ["224"]},
        {"test": ["4x4"]},
    ],
)
def test_what_is_no_bucket_is_refused(buckets: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"plan\.buckets.* must be (different sizes HEIGHTxWIDTH|a string|sizes, or {train)",
    ):
        PlanConfig(buckets=buckets)
