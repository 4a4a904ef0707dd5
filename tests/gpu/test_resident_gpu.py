"""Images that CUDA holds: the pixels of the CPU, on any stream, again after a resume, and nothing waits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import without_ray
from waiting import waiting_is_an_error
from without_ray import every_batch

from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.stores.base import MemoryStore
from raypipe.streaming.handover import loader
from raypipe.streaming.spec import StreamSpec

from conftest import picture  # isort: skip

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_or_pretended")]

NUM, SIDE = 300, 32


def spec_of(train: str, **pool: Any) -> StreamSpec:
    store = MemoryStore([picture(i, SIDE, SIDE) for i in range(NUM)], [i % 5 for i in range(NUM)])
    return StreamSpec(
        store,
        store,
        plan=PlanConfig(epochs=2, micro_batch_size=16, global_batch_size=32, seed=3),
        transform=TransformConfig(train=train, val="center", size=SIDE),
        pool=PoolConfig(**{"cache": "device", **pool}),
    )


@pytest.mark.parametrize(("train", "most"), [("flip-crop", 0), ("none", 0), ("light", 1), ("small", 1)])
def test_cuda_makes_the_pixels_of_the_cpu_transform(train: str, most: int) -> None:
    spec = spec_of(train)
    expected = without_ray.host_batches(spec.replace(pool=PoolConfig(engine="inline")))
    for batch in every_batch(loader(spec, device="cuda")):
        host = next(expected)
        assert batch.image.is_cuda and batch.at == host.at and np.array_equal(batch.index, host.index)
        assert (
            batch.target.cpu().tolist() == host.label.tolist()
            and batch.weight.cpu().tolist() == host.weight.tolist()
        )
        pixels = batch.image.permute(0, 2, 3, 1).cpu().numpy()
        difference = np.abs(pixels.astype(int) - host.image)
        assert difference.max() <= (most if batch.at.split == "train" else 0)
    assert next(expected, None) is None


@pytest.mark.parametrize("train", ["flip-crop", "light", "small"])
def test_the_host_never_waits_for_the_device_in_steady_state(train: str) -> None:
    batches = every_batch(loader(spec_of(train), device="cuda", augment=AugmentConfig(preset="light")))
    for _ in range(6):  # the slots of the ring are made
        next(batches)
    with waiting_is_an_error():
        sums = [next(batches).image.sum() for _ in range(8)]
    assert torch.isfinite(torch.stack(sums)).all()


def test_batches_on_any_stream_are_the_same_each_time_and_after_a_resume() -> None:
    spec = spec_of("light")
    whole = [batch.image.clone() for batch in every_batch(loader(spec, device="cuda"))]
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            again = [batch.image.clone() for batch in every_batch(loader(spec, device="cuda"))]
        stream.synchronize()
        assert all(map(torch.equal, whole, again))
    rest = [batch.image for batch in every_batch(loader(spec, device="cuda", cursor=spec.plan.cursor_at(3)))]
    assert len(rest) == len(whole) - 6 and all(map(torch.equal, whole[6:], rest))


def test_what_does_not_fit_is_refused_before_anything_is_decoded() -> None:
    spec = spec_of("none")
    before = torch.cuda.memory_allocated()
    few = spec.replace(pool=dataclasses.replace(spec.pool, cache_bytes=2 * NUM * SIDE * SIDE * 3))
    with pytest.raises(ConfigError, match=r"pool\.cache_bytes=\d+ allows"):
        loader(few, device="cuda")
    assert torch.cuda.memory_allocated() == before
