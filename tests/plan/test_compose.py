"""Plans one by one; test_compositions.py has random ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.stores.base import Store
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.planning import make_plan


def store(size: int, group_size: int | None = None, salt: int = 0) -> MemoryStore:
    weights = np.arange(size) % 4 + salt + 0.5
    labels = (np.arange(size) ** 2 % 5).tolist()
    images = [bytes([i % 256, i // 256, salt]) for i in range(size)]
    sides = {"width": np.arange(size) % 7 + 3, "height": np.arange(size) % 5 + 3}
    return MemoryStore(
        images, labels, columns={"weight": weights, **sides}, group_size=group_size
    )


def plan_of(train: Store, exclude: Sequence[list[int]] = (), **config: Any) -> Plan:
    """`exclude` has a list for each part."""
    settings = {
        "epochs": 3,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "seed": 3,
        **config,
    }
    parts = list(train.parts.values()) if isinstance(train, JoinedStore) else [train]
    selections = [
        Selection(excluded, len(part))
        for excluded, part in zip(exclude, parts, strict=False)
    ]
    selections += [Selection([], len(part)) for part in parts[len(selections) :]]
    return make_plan(
        PlanConfig(**settings), train, store(5, salt=9), selections=selections
    )


def epochs(plan: Plan) -> list[list[int]]:
    """The samples of each training epoch."""
    found: list[list[int]] = [[] for _ in range(plan.config.epochs)]
    for at in plan.micro_batches(plan.start()):
        if at.split == "train":
            found[at.epoch] += plan.draw(at).indices.tolist()
    return found


def mixed(**config: Any) -> Plan:
    return plan_of(
        JoinedStore(
            {"a": store(64), "b": store(16, salt=1), "c": store(200, 10, salt=2)}
        ),
        **config,
    )


def test_every_setting_of_what_is_drawn_is_part_of_the_fingerprint() -> None:
    single: list[dict[str, Any]] = [
        {},
        {"seed": 4},
        {"micro_batch_size": 4},
        {"global_batch_size": 4},
        {"shuffle": "off"},
        {"aug_repeats": 2},
        {"epoch_samples": 16},
        {"epoch_samples": 24},
        {"weights": "weight"},
        {"weights": "label"},
        {"weights": 0.5},
        {"weights": 1.0},
        {"drop_last": False},
        {"drop_last": False, "weights": 1.0},
        {"drop_last": False, "epoch_samples": 23},
    ]
    several: list[dict[str, Any]] = [
        *single[:-3],
        {"mixture": {"a": 2, "b": 1, "c": 1}},
        {"mixture": {0: {"a": 2, "b": 1, "c": 1}, 1: {"a": 1, "b": 1, "c": 1}}},
        {"mixture": {0: {"a": 2, "b": 1, "c": 1}, 2: {"a": 1, "b": 1, "c": 1}}},
        {"epoch_samples": "longest", "mixture": {"a": 2, "b": 1, "c": 1}},
        {"exclude": [[5]]},
        {"exclude": [[], [0]]},
    ]
    bucketed: list[dict[str, Any]] = [
        {"buckets": ["4x8", "8x4"]},
        {"buckets": ["8x4", "4x8"]},
        {"buckets": ["4x8"]},
        {"buckets": ["4x8", "8x4"], "weights": 1.0},
    ]
    found = [
        plan_of(store(40), **config).fingerprint for config in [*single, *bucketed]
    ]
    found += [mixed(**config).fingerprint for config in several]
    assert len(set(found)) == len(found)
    assert (
        mixed(mixture={"a": 2, "b": 1, "c": 1}).fingerprint
        == mixed(mixture={"c": 2, "a": 4, "b": 2}).fingerprint
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"mixture": {"a": 1}},
            r"plan\.mixture has weights of a, and store\.train is a single store",
        ),
        (
            {"weights": "weigth"},
            r"'weigth' for plan\.weights; did you mean weight or ",
        ),
        (
            {"weights": "image"},
            r"plan\.weights must name a column of numbers, got 'image'",
        ),
        (
            {"epoch_samples": 7},
            "has 7 draws in an epoch, fewer than a global batch of 8",
        ),
        (
            {"drop_last": False, "aug_repeats": 2},
            r"plan\.drop_last must be true with plan\.buckets or plan\.aug",
        ),
    ],
)
def test_settings_that_do_not_go_with_a_store_are_named(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(store(20), **config)


def test_a_mixture_has_whole_steps() -> None:
    with pytest.raises(ConfigError, match="3 stores, whose shares of a step need"):
        mixed(drop_last=False)


def test_a_mixture_names_the_stores_that_have_no_weight() -> None:
    with pytest.raises(
        ConfigError, match=r"weights of a, d; the stores of store\.train are a, b, c"
    ):
        mixed(mixture={"a": 1, "d": 1})


@pytest.mark.parametrize("config", [{}, {"epoch_samples": 23}, {"weights": 1.0}])
@pytest.mark.parametrize("size", [3, 20, 24])
def test_without_drop_last_an_epoch_has_all_of_its_draws(
    size: int, config: dict[str, Any]
) -> None:
    plan = plan_of(store(size), drop_last=False, **config)
    num = config.get("epoch_samples", size)
    assert plan.steps_per_epoch == -(-num // 8)
    for epoch in epochs(plan):
        counted = [index for index in epoch if index >= 0]
        assert num <= len(counted) < num + plan.config.per_step
        if not config:
            assert set(counted) == set(range(size))
