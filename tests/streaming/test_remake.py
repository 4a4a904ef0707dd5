"""State that decides pixels and is not under the sample's key ends a stream at its first samples."""

from __future__ import annotations

import functools
import time
from typing import Any

import numpy as np
import pytest
import torch
from pictures import picture

from raypipe.config import PlanConfig, PoolConfig
from raypipe.errors import ConfigError
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.maker import MicroBatchMaker, try_samples
from raypipe.streaming.opening import open_stream
from raypipe.transform.user_code import copied

STORE = MemoryStore(
    [picture(number) for number in range(8)],
    np.zeros(8, np.int64),
    columns={"n": list(range(8))},
)
COUNTED = [0]


def of(image: np.ndarray, number: float) -> np.ndarray:
    return (image[:8, :8] + np.uint8(number % 251)).astype(np.uint8)


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, image: np.ndarray) -> np.ndarray:
        self.calls += 1
        return of(image, self.calls)


class InPlace(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.mean += image.float().mean()
        return (image[:, :8, :8].int() + int(self.mean * 7)).to(torch.uint8)


def by_module(image: np.ndarray) -> np.ndarray:
    COUNTED[0] += 1
    return of(image, COUNTED[0])


def by_clock(image: np.ndarray) -> np.ndarray:
    return of(image, time.perf_counter_ns() // 1000)


def by_new_generator(image: np.ndarray) -> np.ndarray:
    return of(image, np.random.default_rng().integers(1 << 40))


IMPURE: dict[str, Any] = {
    "counter": Counter(),
    "method": Counter().__call__,
    "partial": functools.partial(
        lambda image, counter: counter(image), counter=Counter()
    ),
    "buffer of a module": InPlace(),
    "global counter": by_module,
    "clock": by_clock,
    "generator of each call": by_new_generator,
}


class Cached:
    """Remembers what it has made, by what it made it of."""

    def __init__(self) -> None:
        self.made: dict[bytes, np.ndarray] = {}
        self.scratch = np.zeros((8, 8, 3), np.uint8)

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        key = image.tobytes()
        if key not in self.made:
            self.made[key] = of(image, image.sum())
        self.scratch[:] = self.made[key]
        self.scratch += rng.integers(0, 9, 3, dtype=np.uint8)
        return self.scratch


class Counting:
    """Counts its calls, which no pixel shows."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, image: np.ndarray) -> np.ndarray:
        self.calls += 1
        return of(image, np.random.randint(9))


def with_generator(rng: np.random.Generator) -> Any:
    return lambda image: of(image, rng.integers(9))


PURE: dict[str, Any] = {
    "generator in a closure": with_generator(np.random.default_rng()),
    "cache": Cached(),
    "counting": Counting(),
    "lambda": lambda image: image[:8, :8],
}


def spec_of(transform: Any, threads: int = 0, **options: Any) -> Any:
    return open_stream(
        STORE,
        plan=PlanConfig(epochs=1, micro_batch_size=4),
        train_transform=transform,
        pool=PoolConfig(engine="inline", max_actors=threads),
        **options,
    )


@pytest.mark.parametrize("name", IMPURE)
def test_state_beside_the_key_is_an_error_that_names_the_transform(name: str) -> None:
    spec = spec_of(IMPURE[name])
    with pytest.raises(
        ConfigError, match=r"transform\.train is a \w+, which does not make the same"
    ):
        list(inline_batches(spec, spec.plan.start()))


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("name", PURE)
def test_caches_buffers_and_counts_that_no_pixel_shows_are_fine(
    name: str, threads: int
) -> None:
    spec = spec_of(PURE[name], threads)
    found = [batch["image"].copy() for batch in inline_batches(spec, spec.plan.start())]
    maker = MicroBatchMaker(spec_of(copied(PURE[name])))
    again = [
        maker.batch(at)["image"].copy()
        for at in reversed(list(spec.plan.micro_batches(spec.plan.start())))
    ]
    assert all(
        np.array_equal(one, other)
        for one, other in zip(found, again[::-1], strict=True)
    )


def test_columns_that_are_made_are_checked_as_well() -> None:
    def columns(values: Any) -> dict[str, Any]:
        COUNTED[0] += 1
        return {"n": COUNTED[0]}

    spec = spec_of("none", columns=["n"], make_columns=columns)
    with pytest.raises(
        ConfigError, match=r"make_columns does not make the same of the same sample"
    ):
        list(inline_batches(spec, spec.plan.start()))


def test_the_driver_finds_such_state_before_a_run_begins() -> None:
    with pytest.raises(ConfigError, match="does not make the same of the same sample"):
        try_samples(spec_of(Counter()), num_classes=1)
