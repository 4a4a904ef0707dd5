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

import raypipe
from raypipe.config import PlanConfig, PoolConfig
from raypipe.rayext.cluster import connect
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

for module in (__name__, without_ray.__name__):
    cloudpickle.register_pickle_by_value(sys.modules[module])

pytestmark = [pytest.mark.system, pytest.mark.cluster]

_LIMIT_S = 400.0  # a busy machine starts processes slowly


class Deadly:
    """A transform that ends its process at one image."""

    def __init__(self, total: int) -> None:
        self.total = total

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if int(image.sum()) == self.total:
            os.kill(os.getpid(), signal.SIGKILL)
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
        return np.ascontiguousarray(image[:9, :9])


class Unusable:
    """A transform that no actor of the pool gets: to receive it takes for ever, or fails."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.ascontiguousarray(image[:9, :9])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "TransformWorker" in Path("/proc/self/cmdline").read_text():
            if self.fails:
                raise ValueError("no actor can have it")
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
    folder = Path(config["folder"])
    attempt = len(list(folder.glob(f"begun{one.rank}-*")))
    (folder / f"begun{one.rank}-{attempt}").touch()
    got = list[Any]()
    for batch in without_ray.every_batch(one):
        got.append(line_of(batch))
        time.sleep(config["pause_s"])
        if config["kills"] and one.rank == one.world_size - 1 and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    path = folder / f"rank{one.rank}"
    path.write_text(json.dumps([got, one.metrics.num_bad]))


def synchronous_fn(config: dict[str, Any]) -> None:
    """Wait for the other ranks after each micro-batch, as DDP does."""
    one = loader(config["spec"])
    for _ in without_ray.every_batch(one):
        if one.world_size > 1:
            torch.distributed.barrier()


def resumed_fn(config: dict[str, Any]) -> None:
    """Make a checkpoint after the first step, and be killed after it, in the head start."""
    folder = Path(config["folder"])
    one = loader(config["spec"], run_dir=folder / "run")
    attempt = len(list(folder.glob(f"begun{one.rank}-*")))
    (folder / f"begun{one.rank}-{attempt}").touch()
    done = folder / f"done{one.rank}.jsonl"
    for batch in without_ray.every_batch(one):
        with done.open("a") as file:
            file.write(json.dumps([attempt, line_of(batch)]) + "\n")
        if attempt == 0 and batch.ends_step:
            one.checkpoint()
            while not list((folder / "run").glob("*/checkpoint.json")):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    connect(num_cpus=4, object_store_bytes=200 << 20)
    yield
    ray.shutdown()


def fit(
    spec: StreamSpec,
    folder: Path,
    workers: int = 2,
    kills: bool = False,
    function: Any = train_fn,
    pause_s: float = 0.0,
) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        function,
        train_loop_config={
            "spec": spec,
            "folder": str(folder),
            "kills": kills,
            "pause_s": pause_s,
        },
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=False, resources_per_worker={"CPU": 0.5}
        ),
        run_config=RunConfig(
            storage_path=str(folder), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


def got_by(folder: Path, rank: int) -> list[Any]:
    """Micro-batches, and bad samples, of a rank."""
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
    ("named", "workers", "actors"),
    [
        pytest.param("TransformWorker", 0, 1, marks=pytest.mark.soak),
        ("TransformWorker", 2, 3),
        pytest.param("Supervisor", 0, 3, marks=pytest.mark.soak),
        pytest.param("Supervisor", 2, 1, marks=pytest.mark.soak),
    ],
)
def test_the_stream_is_the_same_after_a_kill_in_the_head_start(
    stores: dict[str, Path],
    tmp_path: Path,
    cluster: None,
    named: str,
    workers: int,
    actors: int,
) -> None:
    killed = tmp_path / "killed"
    spec = stream(stores, Patient(str(killed)), actors, head_start=6)
    killing = kill_one(named, killed)
    if workers:
        fit(spec, tmp_path, workers=workers)
        ranks = [got_by(tmp_path, rank)[0] for rank in range(workers)]
    else:
        with raypipe.loader(spec) as alone:
            ranks = [[line_of(batch) for batch in without_ray.every_batch(alone)]]
    killing.join()
    assert killed.exists()
    expected = expected_lines(spec)
    assert ranks == [expected[rank :: len(ranks)] for rank in range(len(ranks))]


@pytest.mark.soak
def test_a_coordinator_killed_in_the_head_start_restarts_the_trainers(
    stores: dict[str, Path], tmp_path: Path, cluster: None
) -> None:
    # the ranks could make everything themselves, and would need a minute for it
    killed = tmp_path / "killed"
    spec = stream(stores, Patient(str(killed)), epochs=200)
    killing = kill_one("SplitCoordinator", killed)
    fit(spec, tmp_path, pause_s=0.03)
    killing.join()
    assert len(list(tmp_path.glob("begun0-*"))) == 2
    expected = expected_lines(spec)
    for rank in range(2):
        assert got_by(tmp_path, rank)[0] == expected[rank::2]


@pytest.mark.parametrize(
    ("workers", "fails"),
    [
        (2, False),
        *[
            pytest.param(workers, fails, marks=pytest.mark.soak)
            for workers, fails in (
                (1, False),
                (1, True),
                (2, True),
                (3, False),
                (3, True),
            )
        ],
    ],
)
def test_ranks_in_their_head_start_end_with_the_error_of_their_pool(
    stores: dict[str, Path], tmp_path: Path, cluster: None, workers: int, fails: bool
) -> None:
    spec = stream(
        stores,
        Unusable(fails),
        epochs=100_000,
        global_batch_size=36,
        stall_timeout_s=10,
    )
    error = "no actor can have it" if fails else "the stream has stalled"
    with pytest.raises(Exception, match=error):
        fit(spec, tmp_path, workers=workers, function=synchronous_fn)


@pytest.mark.soak
@pytest.mark.parametrize(("workers", "actors"), [(1, 3), (2, 1)])
def test_trainers_resume_from_a_place_that_their_head_start_made(
    stores: dict[str, Path], tmp_path: Path, cluster: None, workers: int, actors: int
) -> None:
    spec = stream(stores, Deadly(-1), actors, head_start=8)
    fit(spec, tmp_path, workers=workers, function=resumed_fn)
    expected = expected_lines(spec)
    for rank in range(workers):
        lines = (tmp_path / f"done{rank}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        ours = expected[rank::workers]
        num_first = sum(attempt == 0 for attempt, _ in rows)
        assert num_first == 4 // workers
        assert [row for _, row in rows] == ours


@pytest.mark.soak
def test_a_trainer_killed_in_its_head_start_restarts_with_the_same_stream(
    stores: dict[str, Path], tmp_path: Path, cluster: None
) -> None:
    spec = stream(stores, Deadly(-1))
    fit(spec, tmp_path, kills=True)
    assert len(list(tmp_path.glob("begun1-*"))) == 2
    expected = expected_lines(spec)
    for rank in range(2):
        assert got_by(tmp_path, rank)[0] == expected[rank::2]


def test_a_stream_stops_and_resumes_within_its_head_start(
    stores: dict[str, Path], cluster: None
) -> None:
    spec = stream(stores, Deadly(-1), actors=3, head_start=10)
    got = list[Any]()
    cursor = None
    for num_steps in (1, 2, 99):
        with raypipe.loader(spec, cursor=cursor) as alone:
            for batch in without_ray.every_batch(alone):
                got.append(line_of(batch))
                num_steps -= batch.ends_step
                if not num_steps:
                    break
            cursor = alone.cursor
    assert got == expected_lines(spec)


@pytest.mark.soak
def test_a_sample_that_ends_its_process_ends_one_trainer_and_is_replaced(
    stores: dict[str, Path], tmp_path: Path, cluster: None
) -> None:
    plain = stream(stores, None)
    second = list(without_ray.host_batches(plain))[1]
    total = int(second["image"][0].astype(np.int64).sum())
    fit(stream(stores, Deadly(total)), tmp_path)
    assert len(list(tmp_path.glob("begun1-*"))) in (1, 2)
    deadly = int(second.index[0])
    ranks = [got_by(tmp_path, rank) for rank in range(2)]
    num_places = plain.plan.num_micro_batches(plain.plan.start())
    assert sum(num_bad for _, num_bad in ranks) == 2  # in both epochs
    assert all(deadly not in indices for got, _ in ranks for _, indices, _ in got)
    positions = [position for got, _ in ranks for position, *_ in got]
    assert len(positions) == len(set(positions)) == num_places
