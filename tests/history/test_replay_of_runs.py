"""Runs on a cluster in which actors and trainers are killed, looked at by their folders."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from signalled import kill_a_worker_at, own_processes
from small_runs import small_run

import raypipe
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.history.compared import same_batch
from raypipe.launch.run import launch
from raypipe.metrics.records import SAMPLES, read_records
from raypipe.storage.filesystem import as_uri

pytestmark = [
    pytest.mark.system,
    pytest.mark.cluster,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.timeout(300),
]


@pytest.mark.soak
def test_batches_of_a_stream_with_a_killed_actor_are_made_again(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    spec = raypipe.open_stream(
        {"big": stores["train"], "small": stores["val"]},
        stores["val"],
        plan=PlanConfig(
            epochs=6,
            micro_batch_size=4,
            global_batch_size=16,
            mixture={"big": 3, "small": 1},
            weights=0.5,
            aug_repeats=2,
        ),
        transform=TransformConfig(train="small", val="resize", size=16),
        pool=PoolConfig(max_actors=2, cpus_per_actor=0.5, head_start=0),
    )
    augment = AugmentConfig(preset="standard", mixup_alpha=0.3, cutmix_alpha=1.0)
    batches: list[Any] = []
    killed: list[int] = []
    with raypipe.loader(spec, run_dir=tmp_path / "run", augment=augment) as loader:
        for epoch in loader.epochs():
            batches += list(epoch.train)
            if not killed:
                for pid in own_processes("MapWorker(MapBatches(Transform"):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    break
            batches += list(epoch.val)
    replay = raypipe.replay(tmp_path / "run")
    assert killed and replay.differences == [] and len(batches) >= 200
    for batch in batches:
        assert same_batch(replay.batch(batch.position), batch), batch.position
        rows = replay.samples_of(batch.position)
        assert [row["index"] for row in rows] == batch.index.tolist()


@pytest.mark.soak
def test_steps_of_a_run_of_two_trainers_of_which_one_died_are_told(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    plain = small_run(
        tmp_path,
        stores["train"],
        stores["val"],
        4,
        4,
        log_samples=True,
        checkpoint_interval=3,
    )
    two = replace(plain.train, num_workers=2)
    run = replace(plain, train=two, name="two", augment=AugmentConfig(mixup_alpha=1.0))
    killed: list[int] = []
    killer = threading.Thread(
        target=kill_a_worker_at, args=(tmp_path / "two", 5, killed)
    )
    killer.start()
    folder = launch(run)["run_dir"]
    killer.join()
    replay = raypipe.replay(folder)
    assert killed and len(replay.run.starts) >= 2
    records = [
        record
        for record in read_records(as_uri(folder), SAMPLES)
        if "indices" in record
    ]
    drawn = random.Random(2)
    for record in drawn.choices(records, k=300):
        micro = int(record["micro_batch"][-3:])
        rows = replay.samples(record["step"], rank=micro % 2, micro=micro)
        assert [row["index"] for row in rows] == record["indices"]
    assert {row["rank"] for row in replay.samples(len(replay))} == {0, 1}
