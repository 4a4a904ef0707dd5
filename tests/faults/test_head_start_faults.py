"""Processes that die while ranks make their first micro-batches themselves, in clusters of their own."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch.distributed
import without_ray
from ray import cloudpickle
from signalled import own_processes

from raypipe.config import PlanConfig, PoolConfig
from raypipe.rayext.cluster import connect
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

for module in (__name__, without_ray.__name__):
    cloudpickle.register_pickle_by_value(sys.modules[module])

pytestmark = [pytest.mark.system, pytest.mark.cluster]

_LIMIT_S = 400.0  # a busy machine starts processes slowly


def crop(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.ascontiguousarray(image[:9, :9])


class Patient:
    """A transform that in the head start of rank 0 waits, at its tenth image, until a file is there."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.num_images = 0

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if threading.current_thread().name == "raypipe-head-start":
            self.num_images += 1
            deadline = time.monotonic() + _LIMIT_S
            while self.num_images == 10 and not Path(self.path).exists():
                assert time.monotonic() < deadline, "nobody was killed"
                time.sleep(0.05)
        return crop(image, rng)


class Unusable:
    """A transform that no actor of the pool gets: to receive it takes for ever."""

    def __init__(self) -> None:
        self.is_given = True  # so that it has a state

    __call__ = staticmethod(crop)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "TransformWorker" in Path("/proc/self/cmdline").read_text():
            time.sleep(_LIMIT_S)


def stream(
    stores: dict[str, Path],
    transform: Any,
    actors: int = 1,
    head_start: int = -1,
    epochs: int = 2,
    global_batch_size: int = 24,
    stall_timeout_s: float = _LIMIT_S,
) -> StreamSpec:
    return open_stream(
        stores["train"],
        plan=PlanConfig(
            epochs=epochs, micro_batch_size=6, global_batch_size=global_batch_size
        ),
        pool=PoolConfig(
            min_actors=actors,
            max_actors=actors,
            cpus_per_actor=0.5,
            head_start=head_start,
            stall_timeout_s=stall_timeout_s,
        ),
        train_transform=transform,
    )


def line_of(batch: Any) -> list[Any]:
    return [str(batch.position), batch.index.tolist(), int(batch.image.sum())]


def expected_lines(spec: StreamSpec) -> list[list[Any]]:
    """Every micro-batch of the stream, made in one process."""
    return [
        [str(host.position), host.index.tolist(), int(host["image"].sum())]
        for host in without_ray.host_batches(spec)
    ]


def train_fn(config: dict[str, Any]) -> None:
    one = loader(config["spec"])
    got = [line_of(batch) for batch in without_ray.every_batch(one)]
    Path(config["folder"], f"rank{one.rank}").write_text(json.dumps(got))


def synchronous_fn(config: dict[str, Any]) -> None:
    """Wait for the other ranks after each micro-batch, as DDP does."""
    one = loader(config["spec"])
    for _ in without_ray.every_batch(one):
        torch.distributed.barrier()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    connect(num_cpus=4, object_store_bytes=200 << 20)
    yield
    ray.shutdown()


def fit(spec: StreamSpec, folder: Path, function: Any) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        function,
        train_loop_config={"spec": spec, "folder": str(folder)},
        scaling_config=ScalingConfig(
            num_workers=2, use_gpu=False, resources_per_worker={"CPU": 0.5}
        ),
        run_config=RunConfig(
            storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


def got_by(folder: Path, rank: int) -> list[Any]:
    """The micro-batches of a rank."""
    return json.loads((folder / f"rank{rank}").read_text())


def kill_one(named: str, killed: Path) -> threading.Thread:
    """Start a thread that kills the first process of this name, and says so."""

    def run() -> None:
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            for pid in own_processes(named):
                os.kill(pid, signal.SIGKILL)
                killed.touch()
                return
            time.sleep(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("named", "actors"),
    [
        ("TransformWorker", 3),
        pytest.param("Supervisor", 1, marks=pytest.mark.soak),
    ],
)
def test_the_stream_is_the_same_after_a_kill_in_the_head_start(
    stores: dict[str, Path], tmp_path: Path, cluster: None, named: str, actors: int
) -> None:
    killed = tmp_path / "killed"
    spec = stream(stores, Patient(str(killed)), actors, head_start=6)
    killing = kill_one(named, killed)
    fit(spec, tmp_path, train_fn)
    killing.join()
    assert killed.exists()
    expected = expected_lines(spec)
    assert [got_by(tmp_path, rank) for rank in range(2)] == [
        expected[0::2],
        expected[1::2],
    ]


def test_ranks_in_their_head_start_end_with_the_error_of_their_pool(
    stores: dict[str, Path], tmp_path: Path, cluster: None
) -> None:
    spec = stream(
        stores,
        Unusable(),
        epochs=100_000,
        global_batch_size=36,
        stall_timeout_s=10,
    )
    with pytest.raises(Exception, match="the stream has stalled"):
        fit(spec, tmp_path, synchronous_fn)
