"""A dataset that lies on the GPU: the bits of a CPU, and a host that never waits within an epoch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from pictures import samples
from waiting import waiting_is_an_error

from raypipe.config import AugmentConfig, PlanConfig
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.resident import Resident, resident

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_or_pretended")]


def data(device: str) -> Resident:
    given = samples(40)
    store = MemoryStore(
        [sample["image"] for sample in given], [sample["label"] for sample in given]
    )  # type: ignore
    plan = PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=3)
    config = AugmentConfig(preset="light", mixup_alpha=0.4)
    return resident(store, device, plan=plan, border=3, flip=0.5, augment=config)


def test_the_pixels_are_those_of_a_cpu_to_rounding() -> None:
    on_gpu, on_cpu = data("cuda"), data("cpu")
    assert on_gpu.images.device.type == "cuda" and torch.equal(
        on_gpu.images.cpu(), on_cpu.images
    )
    for found, expected in zip(on_gpu.epoch(1), on_cpu.epoch(1), strict=True):
        assert found.position == expected.position and np.array_equal(
            found.index, expected.index
        )
        assert torch.equal(found.target.cpu(), expected.target)
        torch.testing.assert_close(
            found.image.cpu(), expected.image, rtol=1e-5, atol=1e-5
        )


def test_the_host_waits_for_nothing_within_an_epoch() -> None:
    batches: Iterator[object] = data("cuda").epoch(0)
    next(batches)
    with waiting_is_an_error():
        assert sum(1 for _ in batches) == 3
