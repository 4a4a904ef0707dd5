"""The whole stream on CUDA: actors, ring, augmentation; alone and over two ranks of one device."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
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


def test_two_ranks_of_one_device_have_by_gloo_what_one_rank_has(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    """NCCL refuses two ranks on one device: see benchmarks/results/gpu.md."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    spec = spec_of(stores)
    for module in (sys.modules[__name__], without_ray):
        ray.cloudpickle.register_pickle_by_value(module)  # trainers cannot import it

    def train_fn(config: dict[str, Any]) -> None:
        import torch.distributed as dist

        found = hashes(spec, augment=STRONG, max_actors=1)
        summed = torch.ones(3, device="cuda")
        dist.all_reduce(summed)
        assert summed.tolist() == [2.0] * 3
        Path(config["folder"], str(dist.get_rank())).write_text(json.dumps(found))

    TorchTrainer(
        train_fn,
        train_loop_config={"folder": str(tmp_path)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5}
        ),
        run_config=RunConfig(storage_path=str(tmp_path / "ray")),
    ).fit()
    ranks: list[dict[str, str]] = [
        json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)
    ]
    assert not ranks[0].keys() & ranks[1].keys()
    assert ranks[0] | ranks[1] == hashes(spec, device="cuda", augment=STRONG)
