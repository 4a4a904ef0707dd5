"""One digest of decoded and augmented images, whichever actors make them, and whatever is killed.

Plans of all kinds; blocks of 1, 3 and as many micro-batches as pay; 1 to 3 actors of one or two threads for 1 to 4
ranks, from any step; with and without a head start; actors that are killed. The soak has all combinations.
tests/transform/test_at_once.py has the same of one micro-batch with and without the extension, tests/plan random
plans.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import cloudpickle
from same_stream import Way, assert_same_stream

import raypipe
from raypipe.config import PlanConfig, TransformConfig
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

from bucketed import pictures  # isort: skip

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("idle_cluster"),
    pytest.mark.timeout(900),
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PLAN = PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=5)
SMALL = TransformConfig(train="light", val="center", size=24)
Stores = dict[str, Path]


def spec_of(stores: Stores, train: str = "train", **changes: Any) -> StreamSpec:
    options = {"plan": PLAN, "transform": SMALL, **changes}
    return open_stream(str(stores[train]), str(stores["val"]), **options)


class Folds(raypipe.Sampler):
    """A sampler of a user's own: three of four parts."""

    def __init__(self, population: raypipe.Population, fold: int) -> None:
        self.population = population
        self.numbers = np.flatnonzero(population.indices % 4 != fold)

    def __len__(self) -> int:
        return len(self.numbers)

    def draw(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return self.numbers[self.population.shuffled(epoch, positions, len(self))]


def corner(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(image[:9, :9])


def plain(stores: Stores) -> StreamSpec:
    return spec_of(stores)


def folds(stores: Stores) -> StreamSpec:
    return spec_of(stores, plan=replace(PLAN, sampler={"name": Folds, "fold": 1}))


def row_groups(stores: Stores) -> StreamSpec:
    return spec_of(stores, "parquet", plan=replace(PLAN, epochs=1, shuffle=3))


def growing_blocks(stores: Stores) -> StreamSpec:
    plan = PlanConfig(epochs=3, micro_batch_size=2, global_batch_size=4, seed=5)
    return spec_of(stores, plan=plan, train_transform=corner, val_transform=corner)


MIXED: dict[str, Any] = {
    "epochs": 3,
    "micro_batch_size": 4,
    "global_batch_size": 32,
    "aug_repeats": 2,
    "seed": 7,
    "mixture": {0: {"a": 3, "b": 1}, 2: {"a": 1, "b": 1}},
}


def slowly(columns: dict[str, Any]) -> dict[str, Any]:
    """A stream of columns that lives long enough to be hurt."""
    time.sleep(0.004)
    return {"twice": np.int64(2 * int(columns["width"]))}


def mixture_of(plan: dict[str, Any], filtered: str) -> StreamSpec:
    return open_stream(
        {"a": pictures(60, bad=(2,)), "b": pictures(40)},
        pictures(9),
        plan=PlanConfig(**MIXED, **plan),
        transform=TransformConfig(
            train="light", val="center", size={0: 8, 1: 12}, max_bad_fraction=0.5
        ),
        columns=["width"],
        make_columns=slowly,
        filter={filtered: "label != 3"},
    )


def mixture(stores: Stores) -> StreamSpec:
    return mixture_of({"weights": 0.5}, "a")


def mixture_in_buckets(stores: Stores) -> StreamSpec:
    sizes = ["8x12", "10x10", "12x8"]
    buckets = {"train": sizes, "val": sizes}
    return mixture_of({"weights": "width", "buckets": buckets}, "b")


def all_ways(
    workers: Sequence[int], actors: Sequence[int], steps: Sequence[int], kills: int
) -> Iterator[Way]:
    for block, w, a, step in itertools.product((1, 2, 3, 0), workers, actors, steps):
        yield Way(block=block, workers=w, actors=a, from_step=step, kills=kills)


soak = pytest.mark.soak
MANY = list(all_ways((1, 2), (1, 3), (0, 7), 0))
HURT = list(all_ways((1, 2, 4), (1, 2, 3), (0,), 1))
SOME = [Way(block=3, workers=2, actors=2, from_step=7), Way(actors=2, cpus=2)]


@pytest.mark.parametrize(
    ("opened", "ways"),
    [
        (plain, SOME),
        (folds, [Way(workers=2, actors=2, from_step=5)]),
        (row_groups, [Way()]),  # by a reader for all, and alone by the one that decodes
        (mixture, [Way(actors=3, workers=2, kills=3)]),
        pytest.param(growing_blocks, [Way(apart=True)], marks=pytest.mark.system),
        pytest.param(plain, MANY, marks=soak),
        pytest.param(mixture, HURT, marks=soak),
        pytest.param(mixture_in_buckets, HURT, marks=soak),
    ],
)
def test_a_plan_of_any_kind_has_one_digest(
    opened: Callable[[Stores], StreamSpec], ways: list[Way], stores: Stores
) -> None:
    spec = opened(stores)
    alone = assert_same_stream(spec, *ways)
    assert len(alone) == spec.plan.num_micro_batches(spec.plan.start())
    trained = [
        at for at in spec.plan.micro_batches(spec.plan.start()) if at.split == "train"
    ]
    assert len(set(alone)) >= len(trained)  # validations may be equal


@pytest.mark.system
@pytest.mark.parametrize(
    ("train", "way"),
    [
        ("train", Way(head_start=1)),
        ("parquet", Way(head_start=5, actors=3, from_step=4)),
        ("train", Way(head_start=10_000)),
        ("parquet", Way(head_start=-1)),
    ],
)
def test_any_head_start_has_one_digest_and_leaves_nothing(
    train: str,
    way: Way,
    stores: Stores,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    assert_same_stream(spec_of(stores, train), way)
    assert not list((tmp_path / "head-starts").glob("*"))
    names = {thread.name for thread in threading.enumerate()}
    of_head_starts = {"head-start", "pool-start"}
    assert not names & {f"raypipe-{name}" for name in of_head_starts}


# What actors lose

"""Threads of an actor, which are its CPUs, and actors, that the cluster of the tests has room for."""
