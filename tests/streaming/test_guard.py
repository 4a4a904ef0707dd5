"""Transforms, and reads of stores, that crash or hang, in real actors."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import without_ray
from ray import cloudpickle
from tiers import is_soak

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.device.prefetcher import Batch
from raypipe.errors import SampleError
from raypipe.storage.retries import report_progress
from raypipe.stores.base import Columns
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.run_log import events_of
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch

from pictures import CLASSES, picture  # isort: skip

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.system,
    pytest.mark.usefixtures("ray_cluster"),
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DEADLY, DEADLY_TO_READ = 13, 14


def store(kind: type[MemoryStore] = MemoryStore) -> MemoryStore:
    # A transform tells the two samples by their heights.
    heights = {DEADLY: 41, DEADLY_TO_READ: 42}
    images = [picture(i, height=heights.get(i, 40)) for i in range(64)]
    return kind(images, [i % 5 for i in range(64)], classes=CLASSES)


class KillsOnRead(MemoryStore):
    """A store whose reader, in C perhaps, dies of one sample."""

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        if DEADLY_TO_READ in indices:
            self.fail()
        return super().read(indices, columns)

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class HangsOnRead(KillsOnRead):
    """One whose reader never comes back."""

    def fail(self) -> None:
        while True:
            pass


class FetchedFirst(MemoryStore):
    """A store that is fetched for so long, as a remote shard is, before its first read in a process."""

    fetched = False

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        for _ in range(0 if self.fetched else 10):
            report_progress()
            time.sleep(0.6)
        self.fetched = True
        return super().read(indices, columns)


def crop(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(image[:16, :16])


def raises(image: np.ndarray) -> np.ndarray:
    if len(image) > 40:
        raise ValueError("no")
    return crop(image)


def crashes(image: np.ndarray) -> np.ndarray:
    if len(image) == 41:
        ctypes.string_at(0)
    return crop(image)


def hangs(image: np.ndarray) -> np.ndarray:
    while len(image) == 41:
        pass
    return crop(image)


def spec_of(
    transform: Callable[..., Any], train: type[MemoryStore] = MemoryStore, **config: Any
) -> StreamSpec:
    return open_stream(
        store(train),
        plan=PlanConfig(epochs=1, micro_batch_size=8),
        train_transform=transform,
        transform=TransformConfig(**config),
        # Three micro-batches to a block: two further blocks are at the actor that dies.
        # Actors make all: what kills a process must not kill this one
        pool=PoolConfig(max_in_flight=(0, 3), head_start=0),
    )


def row_of(batch: Batch | MicroBatch) -> tuple[Any, ...]:
    if isinstance(batch, MicroBatch):
        image, label = batch["image"], batch["label"]
    else:
        image, label = batch.image.permute(0, 2, 3, 1).numpy(), batch.target_host
    return (
        str(batch.position),
        batch.index.tolist(),
        label.tolist(),
        image.tobytes(),
        batch.num_bad,
    )


def rows(spec: StreamSpec) -> tuple[list[Any], list[str]]:
    """The stream's rows, and the faults that were mended."""
    stream = loader(spec, max_actors=1)
    events: list[tuple[str, str]] = []
    found, num = list[Any](), spec.plan.num_micro_batches(spec.plan.start())
    for batch in without_ray.every_batch(stream):
        found.append(row_of(batch))
        if len(found) == num:  # the stream's end is that of its supervisor
            events = events_of(stream._stream.supervisor, 0)
    return found, [text for kind, text in events if kind == "fault"]


def test_a_sample_that_crashes_or_hangs_its_process_is_replaced(
    request: pytest.FixtureRequest,
) -> None:
    expected = [row_of(batch) for batch in without_ray.host_batches(spec_of(raises))]
    assert sum(row[-1] for row in expected) == 2
    assert not any({DEADLY, DEADLY_TO_READ} & set(row[1]) for row in expected)
    cases = [(crashes, HangsOnRead, 6.0)]
    if is_soak(request.config):
        cases += [(hangs, KillsOnRead, 6.0)]
    for transform, train, limit in cases:
        found, faults = rows(spec_of(transform, train, time_limit_s=limit))
        assert found == expected
        # Of each sample two, and of each block the first.
        assert 5 <= len(faults) <= 8 and all(
            "a transform actor died" in fault for fault in faults
        )


def test_to_fetch_a_shard_may_take_longer_than_a_transform() -> None:
    images = [picture(i) for i in range(16)]
    spec = open_stream(
        FetchedFirst(images, [0] * 16, classes=CLASSES),
        plan=PlanConfig(epochs=1, micro_batch_size=8),
        train_transform=crop,
        transform=TransformConfig(time_limit_s=4.0),
        pool=PoolConfig(head_start=0),
    )
    stream = loader(spec, max_actors=1)
    kinds: list[str] = []
    for number, batch in enumerate(without_ray.every_batch(stream), 1):
        assert batch.num_bad == 0
        if number == 2:  # the last, as above
            kinds = [kind for kind, _ in events_of(stream._stream.supervisor, 0)]
    assert "fault" not in kinds


def test_under_raise_such_a_sample_is_the_one_clear_error() -> None:
    with pytest.raises(
        SampleError, match=rf"sample {DEADLY}: its process died twice .*time_limit_s"
    ):
        rows(spec_of(crashes, max_bad_fraction=0))
