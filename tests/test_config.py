from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from raypipe import config
from raypipe.config import (
    AugmentConfig,
    PlanConfig,
    PoolConfig,
    RunConfig,
    StoreConfig,
    TrainConfig,
    TransformConfig,
)
from raypipe.errors import ConfigError
from raypipe.transform.decode.limits import MAX_PIXELS

SECTIONS = (
    StoreConfig,
    PlanConfig,
    TransformConfig,
    PoolConfig,
    AugmentConfig,
    TrainConfig,
    RunConfig,
)

BAD: list[tuple[type, str, Any]] = [
    (PlanConfig, "epochs", 0),
    (PlanConfig, "micro_batch_size", 0),
    (PlanConfig, "global_batch_size", 100),
    (PlanConfig, "seed", -1),
    (PlanConfig, "shuffle", 0),
    (PlanConfig, "val_interval", -1),
    (PlanConfig, "epoch_samples", -1),
    (PlanConfig, "weights", -1.0),
    (PlanConfig, "aug_repeats", 3),
    (TransformConfig, "size", 0),
    (TransformConfig, "max_bad_fraction", 1.1),
    (TransformConfig, "max_bad_fraction", -0.1),
    (TransformConfig, "max_bad_fraction", float("nan")),
    (PoolConfig, "min_actors", 0),
    (PoolConfig, "max_actors", -1),
    (PoolConfig, "cpus_per_actor", 0.0),
    (PoolConfig, "max_in_flight", -1),
    (AugmentConfig, "std", (0.2, 0.0, 0.2)),
    (TrainConfig, "lr", -0.1),
    (TrainConfig, "lr", float("nan")),
    (TrainConfig, "num_workers", -1),
    (TrainConfig, "num_workers", (4, 2)),
    (TrainConfig, "log_interval", 0),
    (TrainConfig, "checkpoint_interval", -1),
    (TrainConfig, "checkpoint_interval", "10 minutes"),
    (TrainConfig, "checkpoint_interval", "-1min"),
    (TrainConfig, "model", {"name": "small", "num_classes": -1}),
    (TrainConfig, "cpus_per_worker", -1.0),
    (TrainConfig, "max_failures", -2),
    # the command line checks choices by their types, a script that builds the dataclasses here
    (PlanConfig, "shuffle", "globl"),
    (PlanConfig, "epoch_samples", "long"),
    (TransformConfig, "decode", "gpu"),
    (PoolConfig, "reader", "reader"),
    (TrainConfig, "optimizer", "adam"),
    (TrainConfig, "use_gpu", "maybe"),
    (TrainConfig, "amp", "bf8"),
]


def label(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize("section", SECTIONS, ids=label)
def test_defaults_are_valid_and_frozen(section: type) -> None:
    made = section()
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, getattr(made, field.name))


@pytest.mark.parametrize(("section", "name", "value"), BAD, ids=label)
def test_a_bad_value_names_its_field_and_itself(
    section: type, name: str, value: Any
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"\.{name}\b.*{value if not isinstance(value, tuple | dict) else ''}",
    ):
        section(**{name: value})


def test_a_pool_may_not_be_smaller_than_its_minimum() -> None:
    PoolConfig(min_actors=4, max_actors=4)
    with pytest.raises(
        ConfigError, match=r"pool\.max_actors .* pool\.min_actors \(4\), got 3"
    ):
        PoolConfig(min_actors=4, max_actors=3)


@pytest.mark.parametrize(
    "weights", [{"a": -1}, {"a": 0}, {0: {"a": float("nan")}}, {1: {"a": 1}}, {0: {}}]
)
def test_a_mixture_has_weights_from_the_first_epoch_on(weights: Any) -> None:
    PlanConfig(mixture={0: {"a": 1}, 5: {"a": 0, "b": 2}})
    with pytest.raises(
        ConfigError,
        match=r"plan\.mixture(\[0\])?(\['a'\])? must be (weights|a finite number)",
    ):
        PlanConfig(mixture=weights)


# All of these were taken, or ended in a TypeError, ValueError, OverflowError or MemoryError, there or later on.
UNFIT: list[tuple[type, str, Any, str]] = [
    (
        PlanConfig,
        "seed",
        1.5,
        "plan.seed must be a whole number of at least 0, got 1.5",
    ),
    (
        PlanConfig,
        "seed",
        True,
        "plan.seed must be a whole number of at least 0, got True",
    ),
    (
        PlanConfig,
        "seed",
        10**9000,
        "from 0 to 18446744073709551615, got an integer of 29898 bits",
    ),
    (
        PlanConfig,
        "micro_batch_size",
        "8",
        "plan.micro_batch_size must be a whole number .*, got '8'",
    ),
    (
        PlanConfig,
        "mixture",
        {"a": "x"},
        r"plan.mixture\['a'\] must be a finite number .*, got 'x'",
    ),
    (
        PlanConfig,
        "weights",
        float("inf"),
        "plan.weights must be a string or a number from 0 to 8, got inf",
    ),
    (
        TransformConfig,
        "size",
        "224",
        "transform.size must be a whole number .* or {.*}, got '224'",
    ),
    (
        TransformConfig,
        "size",
        1.5,
        "transform.size must be a whole number .*, got 1.5",
    ),
    (
        TransformConfig,
        "size",
        {0: 10**6},
        r"transform.size\[0\] must be .* from 1 to 14956, got 1000000",
    ),
    (
        AugmentConfig,
        "mean",
        (float("nan"), 0, 0),
        r"augment.mean\[0\] must be a finite number, got nan",
    ),
    (
        StoreConfig,
        "columns",
        {"a": {"length": 10**12}},
        "columns.a.length must be .* from 0 to 16777216",
    ),
    (
        StoreConfig,
        "columns",
        "caption",
        r"store.columns must be \[string, …\] or .*, got 'caption'",
    ),
    (
        TrainConfig,
        "use_gpu",
        1,
        "train.use_gpu must be true, false or 'auto', got 1",
    ),
    (
        RunConfig,
        "plan",
        {"epochs": 3},
        "plan must be a PlanConfig, got {'epochs': 3}",
    ),
]


@pytest.mark.parametrize(
    ("section", "name", "value", "message"), UNFIT, ids=[unfit[1] for unfit in UNFIT]
)
def test_a_value_of_the_wrong_type_is_refused_by_name(
    section: type, name: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        section(**{name: value})


def test_numbers_and_arrays_of_numpy_become_plain_ones() -> None:
    plan = PlanConfig(seed=np.int64(3), weights=np.float32(0.5))  # type: ignore
    store = StoreConfig(in_memory=np.bool_(False))  # type: ignore
    assert plan == PlanConfig(seed=3, weights=0.5)
    assert [type(each) for each in (plan.seed, plan.weights, store.in_memory)] == [
        int,
        float,
        bool,
    ]
    assert AugmentConfig(mean=np.zeros(3)).mean == (0.0, 0.0, 0.0)  # type: ignore[arg-type]


def test_images_have_as_many_pixels_as_the_decoder_makes() -> None:
    assert config._MAX_PIXELS == MAX_PIXELS


def test_every_field_is_described() -> None:
    for section in SECTIONS:
        for field in dataclasses.fields(section):
            assert field.name in (section.__doc__ or ""), (
                f"{section.__name__}.{field.name}"
            )


@pytest.mark.parametrize(
    ("interval", "steps", "seconds"),
    [
        (0, 0, math.inf),
        (500, 500, math.inf),
        ("90s", 0, 90.0),
        ("10min", 0, 600.0),
        ("1.5 h", 0, 5400.0),
    ],
)
def test_checkpoints_come_by_steps_or_by_the_clock(
    interval: int | str, steps: int, seconds: float
) -> None:
    config = TrainConfig(checkpoint_interval=interval)
    assert (config.checkpoint_steps, config.checkpoint_s) == (steps, seconds)
    assert TrainConfig().checkpoint_s == 600


@pytest.mark.parametrize(
    "optimizer, batch, expected",
    [("sgd", 256, 0.1), ("sgd", 32, 0.0125), ("adamw", 512, 5e-4)],
)
def test_the_default_learning_rate_follows_the_global_batch(
    optimizer: str, batch: int, expected: float
) -> None:
    train = TrainConfig(optimizer=optimizer)
    for per_step in (1, 4):
        plan = PlanConfig(micro_batch_size=batch // per_step, global_batch_size=batch)
        assert RunConfig(plan=plan, train=train).peak_lr == pytest.approx(expected)
    assert RunConfig(train=TrainConfig(lr=0.3)).peak_lr == 0.3
