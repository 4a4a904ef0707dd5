"""Trainers that end while they make their first micro-batches themselves, in clusters of their own."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import without_ray
from ray import cloudpickle

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.cluster import connect
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.system, pytest.mark.cluster, pytest.mark.timeout(300)]


class Deadly:
    """A transform that ends its process at one image."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if int(image.sum()) == self.total:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.ascontiguousarray(image[:9, :9])


def stream(stores: dict[str, Path], transform: Any) -> StreamSpec:
    return open_stream(
        stores["train"],
        plan=PlanConfig(epochs=1, micro_batch_size=6, global_batch_size=24),
        transform=TransformConfig(crop_decode="off"),
        pool=PoolConfig(max_actors=1),
        train_transform=transform,
    )


def train_fn(config: dict[str, Any]) -> None:
    one = loader(config["spec"])
    path = Path(config["folder"], f"rank{one.rank}")
    attempt = len(list(Path(config["folder"]).glob(f"begun{one.rank}-*")))
    Path(config["folder"], f"begun{one.rank}-{attempt}").touch()
    got = list[Any]()
    for batch in next(one.epochs()).train:
        got.append(
            [str(batch.position), batch.index.tolist(), batch.image.sum().item()]
        )
        if config["kills"] and one.rank == 1 and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    path.write_text(json.dumps([got, one.metrics.num_bad]))


def fit(spec: StreamSpec, folder: Path, kills: bool) -> list[Any]:
    """What both ranks got."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    connect(num_cpus=3, object_store_bytes=200 << 20)
    try:
        TorchTrainer(
            train_fn,
            train_loop_config={"spec": spec, "folder": str(folder), "kills": kills},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(
                storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()
    finally:
        ray.shutdown()
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(2)]


def test_a_trainer_killed_in_its_head_start_restarts_with_the_same_stream(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    spec = stream(stores, Deadly(-1))
    ranks = fit(spec, tmp_path, kills=True)
    assert len(list(tmp_path.glob("begun1-*"))) == 2
    expected = list(without_ray.host_batches(spec))
    for rank, (got, _) in enumerate(ranks):
        assert got == [
            [str(b.position), b.index.tolist(), int(b["image"].sum())]
            for b in expected[rank::2]
        ]


def test_a_sample_that_ends_its_process_ends_one_trainer_and_is_replaced(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    plain = stream(stores, None)
    second = list(without_ray.host_batches(plain))[1]
    total = int(second["image"][0].astype(np.int64).sum())
    ranks = fit(stream(stores, Deadly(total)), tmp_path, kills=False)
    assert len(list(tmp_path.glob("begun1-*"))) in (1, 2)
    deadly = int(second.index[0])
    assert sum(num_bad for _, num_bad in ranks) == 1
    assert all(deadly not in indices for got, _ in ranks for _, indices, _ in got)
    positions = [position for got, _ in ranks for position, *_ in got]
    assert (
        len(positions)
        == len(set(positions))
        == plain.plan.num_micro_batches(plain.plan.start())
    )
