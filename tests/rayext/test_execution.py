from __future__ import annotations

import dataclasses
import math
import sys
import time
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest
import ray
import ray.data
from memory import MemoryWatch
from ray import cloudpickle

from raypipe.config import PlanConfig, PoolConfig
from raypipe.rayext.execution import Settings, context_of
from raypipe.rayext.iteration import begun
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SETTINGS = Settings(PoolConfig(), 2, 0, reads=False, supervisor=None)


@pytest.mark.system
def test_a_store_of_two_object_stores_streams_without_spilling(
    idle_cluster: None,
) -> None:
    """A reader reads large images, and a trainer is slow at first."""
    bitmap = cv2.imencode(".bmp", np.zeros((256, 256, 3), np.uint8))[1].tobytes()
    room = ray.cluster_resources()["object_store_memory"]
    num = 8 * math.ceil(2 * room / (8 * len(bitmap)))
    spec = open_stream(
        MemoryStore([bitmap] * num, [0] * num),
        plan=PlanConfig(epochs=1, micro_batch_size=8),
        train_transform=corner,
        pool=PoolConfig(reader="separate", max_in_flight=8),
    )
    received = 0
    with MemoryWatch() as before:
        time.sleep(1.0)
    with MemoryWatch() as memory:
        (iterator,) = splits(spec, spec.plan.start(), max_actors=1)
        for batch in host_batches(iterator):
            if received < 60:
                time.sleep(0.05)
            received += len(batch.index)
    assert received == num
    assert memory.spilled == before.spilled
    assert memory.object_store <= room / 3


@pytest.mark.system
def test_a_rank_that_makes_its_own_micro_batches_stops_no_other(
    stores: dict[str, Path], two_cpus: None
) -> None:
    # It leaves the pool's out only once its loop is there, and its loop may wait for the other rank.
    spec = open_stream(
        str(stores["train"]),
        plan=PlanConfig(epochs=5, micro_batch_size=4, global_batch_size=8),
        train_transform=corner,
    )
    parts = splits(spec, spec.plan.start(), max_actors=1, world_size=2, num_first=60)
    of_rank, _ = map(begun, parts)
    assert len(list(host_batches(of_rank))) == 30


def corner(image: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(image[:160, :160])


def test_rays_guards_against_stalls_spare_a_stream_whose_trainer_pauses() -> None:
    context = context_of(SETTINGS, 1)
    # else half an hour, in Ray 2.60
    assert context.execution_no_progress_timeout_s == -1
    # else a block every ten seconds
    assert context.output_backpressure_guard_release_interval_s >= 1e9


def test_no_setting_of_a_users_context_decides_what_a_stream_delivers() -> None:
    own = object()
    names = set[str]()
    with (
        warnings.catch_warnings(),
        ray.data.DataContext.current(ray.data.DataContext()),
    ):
        warnings.simplefilter("ignore")
        expected = context_of(SETTINGS, 1)
        users = ray.data.DataContext.get_current()
        users.set_config("of the user", True)
        for field in dataclasses.fields(ray.data.DataContext):
            users.__dict__[field.name] = own
        found = context_of(SETTINGS, 1)
    for field in dataclasses.fields(ray.data.DataContext):
        value, default = getattr(found, field.name), getattr(expected, field.name)
        if value is own:
            names.add(field.name)
        else:
            assert value == default or type(value) is type(default), field.name
    assert names and all(
        "log" in name or "stats" in name or "metrics" in name for name in names
    )
    assert found.max_errored_blocks == 0 and found.get_config("of the user") is None
