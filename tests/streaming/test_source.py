from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import without_ray
from ray import cloudpickle

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ResourceError, StoreError
from raypipe.stores.base import Columns
from raypipe.stores.memory import MemoryStore
from raypipe.stores.parquet import ParquetStore
from raypipe.streaming.handover import loader
from raypipe.streaming.opening import open_stream
from raypipe.streaming.source import MicroBatchSource

# The plan as a source, without Ray


class LosesOne(MemoryStore):
    """It lets nobody read sample 57."""

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        if 57 in indices:
            raise StoreError("sample is lost")
        return super().read(indices, columns)


def test_an_error_of_the_store_comes_after_the_rows_before_it() -> None:
    train = LosesOne([b""] * 100, np.arange(100))
    plan = PlanConfig(epochs=1, micro_batch_size=1, shuffle="off")
    spec = open_stream(train, plan=plan)
    source = MicroBatchSource(spec, spec.plan.start(), {"train": train})
    *_, last = source.get_read_tasks(1)  # from sample 48 on
    rows = iter(last())
    assert [row["label"].to_pylist() for row in itertools.islice(rows, 9)] == [
        [[label]] for label in range(48, 57)
    ]
    with pytest.raises(StoreError, match="sample is lost"):
        next(rows)


class KillsItsReader(ParquetStore):
    """A file of whose row groups one kills who reads it, be it by its size or by a defect of a reader in C."""

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        if (indices // 10 == 3).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(indices, columns)


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_row_group_that_kills_its_reader_ends_the_run_by_its_name(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr("raypipe.streaming.supervisor.MAX_ATTEMPTS", 2)
    spec = open_stream(
        KillsItsReader(stores["parquet"]),
        plan=PlanConfig(epochs=1, micro_batch_size=5, shuffle="off"),
        transform=TransformConfig(train="small", size=16),
        pool=PoolConfig(head_start=0),
    )
    stream = loader(spec, max_actors=1)
    group = rf"samples 30 to 39 of .*{stores['parquet']}, row group 3, row 0 on, for train-e0000-s000006-m000"
    message = rf"a reader has died 2 times while it read {group}: "
    with pytest.raises(ResourceError, match=message):
        for batch in without_ray.every_batch(stream):
            assert len(batch.index) == 5
