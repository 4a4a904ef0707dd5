"""Streams that remember: a validation in one, and equal streams, whose actors are killed meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Generator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import without_ray

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.iteration import begun
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.memory.rank_memory import RankMemory
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import end_actors, start_supervisor, stream_name
from raypipe.transform.fields import MicroBatch

Stores = dict[str, Path]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.system,
    pytest.mark.usefixtures("ray_cluster"),
]

SHARES_S = 60.0


def spec_of(
    stores: Stores,
    epochs: int,
    remember: Any,
    step: int = 8,
    size: int = 24,
) -> StreamSpec:
    return open_stream(
        str(stores["train"]),
        str(stores["val"]),
        plan=PlanConfig(
            epochs=epochs, micro_batch_size=8, global_batch_size=step, seed=5
        ),
        transform=TransformConfig(train="light", val="center", size=size),
        pool=PoolConfig(
            cpus_per_actor=0.5,
            max_in_flight=(0, 1),
            remember=str(remember),
        ),
    )


class Stream:
    """A stream on the cluster, which its consumer reads as fast as it wants."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.supervisor = start_supervisor("run")
        self.memory = RankMemory(spec, stream_name(self.supervisor))
        self.memory.are_others()
        self.iterators = splits(
            spec,
            spec.plan.start(),
            max_actors=1,
            supervisor=self.supervisor,
        )
        iterator = begun(self.iterators[0])
        self.batches: Generator[MicroBatch, None, None] = host_batches(iterator)
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
        self.memory.close()


@pytest.mark.parametrize("remember", ["", "memory"])
def test_a_validation_is_made_once(
    stores: Stores, tmp_path: Path, remember: str
) -> None:
    stream = Stream(spec_of(stores, 6, remember or tmp_path))
    stream.take()
    stream.end()
    assert stream.digests == without_ray.digests(stream.spec)
    # three micro-batches in each of six validations
    assert stream.remembered.count("val") >= 15


@pytest.mark.parametrize(
    "dies",
    [
        "nobody",
        pytest.param("the folder", marks=pytest.mark.soak),
        pytest.param("MapWorker", marks=pytest.mark.soak),
        pytest.param("a trial", marks=pytest.mark.soak),
    ],
)
def test_equal_streams_share_and_are_equal_whoever_dies(
    stores: Stores, tmp_path: Path, dies: str
) -> None:
    """Their steps differ, as those of trials of a batch size do."""
    specs = [spec_of(stores, 40, tmp_path, step, size=112) for step in (8, 16)]
    streams = [Stream(spec) for spec in specs]
    end = time.monotonic() + SHARES_S
    while not any("train" in stream.remembered for stream in streams):
        assert time.monotonic() < end
        for stream in streams:
            stream.take(4)
    if dies == "a trial":
        streams.pop().end()
    elif dies == "the folder":
        shutil.rmtree(tmp_path / "remembered", ignore_errors=True)
    elif dies == "MapWorker":
        kill(dies)
    for stream in streams:
        stream.take(80)
        expected = without_ray.host_batches(stream.spec)
        digests = map(batch_hash, islice(expected, len(stream.digests)))
        assert stream.digests == list(digests)
        stream.end()


def kill(title: str) -> None:
    """Kill the processes of this cluster with a title, which are below this one."""
    killed = 0
    for process in psutil.Process().children(recursive=True):
        if " ".join(process.cmdline()).startswith(f"ray::{title}"):
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
    assert killed
