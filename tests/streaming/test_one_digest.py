"""One digest of decoded and augmented images, whichever nodes and actors make them, and whatever they lose.

Plans of all kinds; with the extension and without; 1 to 4 threads; blocks of 1, 3 and as many micro-batches as
pay; 1 to 3 actors for 1 to 4 ranks, from any step; with and without a head start; actors that are killed. The soak
has all combinations. tests/transform/test_at_once.py has the same of one micro-batch, tests/plan random plans.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import pytest
import ray
from ray import cloudpickle
from same_stream import Way, assert_same_stream

import raypipe
from raypipe import kernel
from raypipe.config import PlanConfig, TransformConfig
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

from pictures import picture  # isort: skip
from tiers import is_soak  # isort: skip

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


def sized(num: int, first: int) -> MemoryStore:
    sizes = [[(40, 60), (50, 50), (60, 40)][i % 3] for i in range(num)]
    heights, widths = zip(*sizes, strict=True)
    images = [picture(first + i, *size) for i, size in enumerate(sizes)]
    columns = {"width": widths, "height": heights}
    return MemoryStore(images, np.arange(num) % 5, columns=columns)


def mixture_of(plan: dict[str, Any], filtered: str) -> StreamSpec:
    return open_stream(
        {"a": sized(60, 0), "b": sized(40, 100)},
        sized(9, 500),
        plan=PlanConfig(**MIXED, **plan),
        transform=TransformConfig(train="light", val="center", size={0: 8, 1: 12}),
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
SOME = [Way(block=3, workers=2, actors=2, from_step=7), Way(actors=3)]


@pytest.mark.parametrize(
    ("opened", "ways"),
    [
        (plain, SOME),
        (folds, [Way(workers=2, actors=2, from_step=5)]),
        (row_groups, [Way()]),  # by a reader for all, and alone by the one that decodes
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

Without = Literal["no actor", "the first actor", "every actor"]
WITHOUT: tuple[Without, ...] = ("no actor", "the first actor", "every actor")
POOLS = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (4, 1)]
"""Threads of an actor, which are its CPUs, and actors, that the cluster of the tests has room for."""


def pictures(num: int, first: int) -> list[bytes | None]:
    """JPEGs of several sizes, a PNG, and a damaged one."""
    images: list[bytes | None] = [
        picture(first + i, *[(40, 60), (90, 70), (64, 64)][i % 3]) for i in range(num)
    ]
    images[1] = cv2.imencode(".png", np.full((50, 70, 3), 99, np.uint8))[1].tobytes()
    images[2] = picture(first + 2)[:-300]
    return images


class Losing(MemoryStore):
    """A store, of which some of the actors that it goes to lose the extension.

    Args:
        folder: where each actor leaves its process id and whether it has the extension; shared by the actors.
        without: who loses it.
        pause_s: that the read of a micro-batch takes, so that a stream is there long enough to be hurt.
    """

    def __init__(
        self, images: list[bytes | None], folder: Path, without: Without, pause_s: float
    ) -> None:
        super().__init__(images, np.arange(len(images)) % 5)
        self._folder, self._without, self._pause_s, self._driver = (
            folder,
            without,
            pause_s,
            os.getpid(),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A worker that is no actor serves other tests, too.
        if self._without == "no actor" or not ray.get_runtime_context().get_actor_id():
            return
        if self._without == "every actor" or self._is_first():
            sys.modules["_raypipe_kernel"] = None  # type: ignore[assignment]  # so that an import of it fails

    def _is_first(self) -> bool:
        path = self._folder / "first"
        try:
            with path.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            # a store of another split has come before
            return path.read_text() == str(os.getpid())
        return True

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Any:
        if os.getpid() != self._driver:
            (self._folder / f"{os.getpid()} {kernel.available()}").touch()
            # Not while a restarted actor reads one at a time: it would blame that sample for a second death.
            time.sleep(self._pause_s * (len(indices) > 1))
        return super().read(indices, columns)


def assert_same_though_lost(
    folder: Path, without: Without, way: Way, pause_s: float = 0.02
) -> None:
    """Actors that lose the extension make one stream, and have lost what they should."""
    folder.mkdir()
    parts = ((80, 0), (20, 500))
    stores = [Losing(pictures(*part), folder, without, pause_s) for part in parts]
    heavy = TransformConfig(train="heavy", val="light", size=32, max_bad_fraction=0.5)
    plan = PlanConfig(epochs=3, micro_batch_size=8, seed=7)
    alone = assert_same_stream(open_stream(*stores, plan=plan, transform=heavy), way)
    assert len(alone) == 3 * (10 + 3)
    assert len(set(alone)) == 3 * 10 + 3  # each validation is the same
    has_extension = {path.name.partition(" ")[2] for path in folder.glob("* *")}
    allowed = {"no actor": {"True"}, "every actor": {"False"}}
    assert has_extension and has_extension <= allowed.get(without, {"True", "False"})


@pytest.mark.skipif(not kernel.available(), reason=kernel.why_no_kernel())
def test_one_digest_with_or_without_kernel_for_any_threads_and_actors(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cases: list[tuple[Without, tuple[int, int], int]] = [
        ("no actor", (1, 3), 3),
        ("the first actor", (2, 2), 1),
        ("every actor", (4, 1), 0),
    ]
    if is_soak(request.config):
        cases = list(itertools.product(WITHOUT, POOLS, (1, 3, 0)))
    for number, (without, (threads, actors), block) in enumerate(cases):
        way = Way(cpus=threads, actors=actors, block=block)
        assert_same_though_lost(tmp_path / str(number), without, way)


@pytest.mark.skipif(not kernel.available(), reason=kernel.why_no_kernel())
@pytest.mark.parametrize(
    ("without", "block"),
    [
        ("the first actor", 1),
        *(
            pytest.param(without, block, marks=soak)
            for without in ("no actor", "every actor")
            for block in (1, 3, 0)
        ),
    ],
)
def test_kills_change_nothing(
    tmp_path: Path,
    without: Without,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    # more than there are actors; an actor that is restarted takes a second and a half of CPU
    kills = 10 if is_soak(request.config) else 4
    # all may hit one block
    monkeypatch.setattr("raypipe.streaming.supervisor.MAX_ATTEMPTS", kills + 1)
    way = Way(cpus=1, actors=3, block=block, kills=kills)
    assert_same_though_lost(tmp_path / "killed", without, way, pause_s=0.25)
