"""Streams that remember: a validation in one, and equal streams, whose memory and actors are killed meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
import without_ray

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.iteration import begun
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.memory.cluster_memory import Collector
from raypipe.streaming.memory.remembered import NAMESPACE, keeper, memory
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import end_actors, start_supervisor, stream_name
from raypipe.transform.fields import MicroBatch

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.system,
    pytest.mark.usefixtures("ray_cluster"),
]

CONNECTS_S = 3.0
ALIKE_S = 8.0


def spec_of(
    stores: dict[str, Path],
    epochs: int,
    step: int = 8,
    seed: int = 5,
    size: int = 24,
    **pool: Any,
) -> StreamSpec:
    return open_stream(
        str(stores["train"]),
        str(stores["val"]),
        plan=PlanConfig(
            epochs=epochs, micro_batch_size=8, global_batch_size=step, seed=seed
        ),
        transform=TransformConfig(train="light", val="center", size=size),
        pool=PoolConfig(cpus_per_actor=0.5, micro_batches_per_block=1, **pool),
    )


class Stream:
    """A stream on the cluster, which its consumer reads as fast as it wants."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.supervisor = start_supervisor("run")
        self.iterators = splits(
            spec,
            spec.plan.start(),
            max_actors=1,
            supervisor=self.supervisor,
            hands_over=True,
        )
        collect = Collector(spec, stream_name(self.supervisor))
        iterator = begun(self.iterators[0])
        self.batches: Generator[MicroBatch, None, None] = host_batches(
            iterator, collect
        )
        self.digests: list[bytes] = []
        self.remembered: list[str] = []

    def take(self, num: int | None = None) -> None:
        for batch in islice(self.batches, num):
            self.digests.append(batch_hash(batch))
            if batch.num_remembered:
                self.remembered.append(batch.position.split)

    def end(self) -> None:
        # an execution goes on, and its actors with it, while somebody may take more of it
        self.batches.close()
        end_actors(self.supervisor, self.iterators, 0, 1)


def names() -> list[str]:
    """The actors of the memory that are there."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


def nothing_is_left(limit_s: float = 30) -> bool:
    end = time.monotonic() + limit_s
    while names() and time.monotonic() < end:
        time.sleep(0.1)
    return not names()


def kill(title: str) -> None:
    """Kill the processes of this cluster with a title, which are below this one."""
    killed = 0
    for process in psutil.Process().children(recursive=True):
        if " ".join(process.cmdline()).startswith(f"ray::{title}"):
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
    assert killed


# micro-batches of 14 KB are copied, those of 301 KB are handed over by their keys
@pytest.mark.parametrize("size", [24, 112])
def test_a_validation_is_made_once_and_nothing_is_left(
    stores: dict[str, Path], size: int
) -> None:
    ray.get([memory().used.remote(), keeper().__ray_ready__.remote()])
    # no other test's stream has its training
    stream = Stream(spec_of(stores, epochs=6, seed=6, size=size))
    stream.take(1)
    time.sleep(CONNECTS_S)
    stream.take()
    stream.end()
    assert stream.digests == without_ray.digests(stream.spec)
    # three micro-batches in each of six validations
    assert set(stream.remembered) == {"val"} and len(stream.remembered) >= 9
    assert nothing_is_left()


def test_a_validation_on_disk_serves_the_next_run(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for _ in range(2):
        run = spec_of(stores, epochs=1, remember="disk")
        monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
        from raypipe.streaming.maker import MicroBatchMaker
        from raypipe.streaming.memory.recall import recall_of

        maker = MicroBatchMaker(run)
        recall = recall_of(
            run, maker.block, maker.sample_makers.recipes, os.urandom(4).hex()
        )
        assert recall is not None
        runs.append(
            [
                (batch_hash(batch), batch.num_remembered)
                for position in run.plan.micro_batches(run.plan.start())
                if recall.wants([position])
                for batch in recall.block([position])[0]
            ]
        )
    first, second = runs
    assert [digest for digest, _ in first] == [digest for digest, _ in second]
    assert [num for _, num in first] == [0] * 3 and [num for _, num in second] == [
        1
    ] * 3


@pytest.mark.parametrize(
    "dies",
    [
        "nobody",
        pytest.param("ClusterLedger", marks=pytest.mark.soak),
        pytest.param("Keeper", marks=pytest.mark.soak),
        pytest.param("MapWorker", marks=pytest.mark.soak),
        pytest.param("a trial", marks=pytest.mark.soak),
    ],
)
def test_equal_streams_share_and_are_equal_whoever_dies(
    stores: dict[str, Path], dies: str
) -> None:
    """Their steps differ, as those of trials of a batch size do."""
    ray.get([memory().used.remote(), keeper().__ray_ready__.remote()])
    streams = [Stream(spec_of(stores, 12, step, size=112)) for step in (8, 16)]
    for stream in streams:
        stream.take(1)
    time.sleep(ALIKE_S)
    for _ in range(10):
        for stream in streams:
            stream.take(4)
    shared = sum(len(stream.remembered) for stream in streams)
    assert shared >= 10 and "train" in streams[0].remembered + streams[1].remembered
    if dies == "a trial":
        streams.pop().end()
    elif dies != "nobody":
        kill(dies)
    for _ in range(20):
        for stream in streams:
            stream.take(4)
    for stream in streams:
        stream.take()
        assert stream.digests == without_ray.digests(stream.spec)
    for stream in streams:
        stream.end()
    assert nothing_is_left(limit_s=30 if dies == "nobody" else 90)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_stream_that_was_killed_is_resumed_with_what_it_remembered(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.get([memory().used.remote(), keeper().__ray_ready__.remote()])
    killed = Stream(spec_of(stores, epochs=4))
    killed.take(1)
    time.sleep(CONNECTS_S)
    killed.take(30)  # 12 and 3 in an epoch
    with monkeypatch.context() as patch:
        # what a process that is killed does not say
        patch.setattr("raypipe.streaming.supervisor.leave_memory", lambda stream: None)
        killed.end()
    resumed = Stream(spec_of(stores, epochs=4))
    resumed.take(1)
    time.sleep(CONNECTS_S)
    resumed.take(14)
    assert "val" in resumed.remembered  # in its first epoch
    resumed.take()
    assert resumed.digests == without_ray.digests(resumed.spec)
    resumed.end()
    assert nothing_is_left(limit_s=150)


@pytest.mark.soak
def test_a_model_is_the_same_whatever_is_remembered(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    off = trained(stores, remember_bytes=0)
    in_memory = trained(stores)
    on_disk = trained(stores, remember="disk")
    assert off[0] == 0 < min(in_memory[0], on_disk[0])
    assert off[1:] == in_memory[1:] == on_disk[1:]


def trained(stores: dict[str, Path], **pool: Any) -> tuple[int, list[float], Any]:
    """Train a linear model; return how much was remembered, the accuracies of validations, and digests."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3 * 24 * 24, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = Stream(spec_of(stores, epochs=5, **pool))
    accuracies = list[float]()
    num_remembered = 0
    good = 0
    seen = 0
    for batch in stream.batches:
        stream.digests.append(batch_hash(batch))
        num_remembered += batch.num_remembered
        images = torch.from_numpy(batch["image"].copy()).flatten(1).float() / 255
        labels = torch.from_numpy(batch["label"].copy())
        scores = model(images)
        if batch.position.split == "train":
            if seen:
                accuracies.append(good / seen)
                good = 0
                seen = 0
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(scores, labels).backward()
            optimizer.step()
            if not batch.position.step:
                time.sleep(1)  # the memory connects
        else:
            counts = torch.from_numpy(batch.weight.copy()) > 0
            good += int((scores.argmax(1) == labels)[counts].sum())
            seen += int(counts.sum())
    accuracies.append(good / seen)
    stream.end()
    return num_remembered, accuracies, stream.digests
