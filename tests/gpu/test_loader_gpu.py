"""The whole stream on CUDA: actors, ring, augmentation; alone and over two ranks of one device."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import without_ray

from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("cuda_or_pretended"),
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster"),
]
STRONG = AugmentConfig(preset="strong", mixup_alpha=0.4, cutmix_alpha=1.0)


def spec_of(stores: dict[str, Path], actors: int = 1, block: int = 0) -> StreamSpec:
    return open_stream(
        stores["train"],
        stores["val"],
        plan=PlanConfig(epochs=2, micro_batch_size=6, global_batch_size=24, seed=3),
        transform=TransformConfig(train="light", val="center", size=32),
        pool=PoolConfig(min_actors=actors, max_actors=actors, max_in_flight=(0, block)),
    )


def hashes(spec: StreamSpec, **options: Any) -> dict[str, str]:
    """Place → what its micro-batch holds, of all that this rank has."""
    found = {}
    for batch in without_ray.every_batch(loader(spec, **options)):
        parts = (batch.image, batch.target, batch.weight)
        content = b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts)
        found[str(batch.position)] = hashlib.blake2b(
            content + batch.index.tobytes()
        ).hexdigest()
        assert options.get("device", "cpu") == "cpu" or batch.image.is_cuda
    assert found
    return found


def test_the_ring_brings_the_bits_that_the_cpu_has(stores: dict[str, Path]) -> None:
    spec = spec_of(stores)
    assert hashes(spec, device="cuda") == hashes(spec, device="cpu")


def test_augmented_micro_batches_are_the_same_for_any_actors(
    stores: dict[str, Path],
) -> None:
    first = hashes(spec_of(stores), device="cuda", augment=STRONG)
    assert hashes(spec_of(stores, 2, block=3), device="cuda", augment=STRONG) == first
