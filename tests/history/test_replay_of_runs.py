"""Runs on a cluster in which actors and trainers are killed, looked at by their folders."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from signalled import kill_a_worker_at, own_processes
from small_runs import small_run

import raypipe
from raypipe.config import (
    AugmentConfig,
    PlanConfig,
    PoolConfig,
    RunConfig,
    TransformConfig,
)
from raypipe.launch.run import launch
from raypipe.metrics.records import SAMPLES, read_records
from raypipe.storage.filesystem import as_uri
from raypipe.streaming.hashes import batch_hash

from pictures import picture  # isort: skip

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
        assert batch_hash(replay.batch(batch.position)) == batch_hash(batch)
        rows = replay.samples_of(batch.position)
        assert [row["index"] for row in rows] == batch.index.tolist()


# Settings of runs, by section.
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "filter": {"store": {"filter": "label != 3"}},
    "weights": {"plan": {"weights": 1.0, "aug_repeats": 2}},
    "mixture": {
        "plan": {"mixture": {0: {"big": 3, "small": 1}, 2: {"big": 1, "small": 1}}},
        "store": {"filter": {"big": "label != 3"}},
    },
    "windows": {"plan": {"shuffle": "window", "skip": ["3..4"]}},
    "buckets": {
        "plan": {
            "buckets": ["12x16", "16x12"],
            "aug_repeats": 2,
            "shuffle": "global",
        }
    },
}
NUM_QUERIES = 1000


@pytest.fixture(scope="module")
def of_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet of two shapes, two of whose images cannot be read."""
    rows = []
    for number in range(100):
        height, width = (24, 32) if number % 3 else (32, 24)
        image = b"no image" if number in (4, 9) else picture(number, height, width)
        row = {"image": image, "label": number % 5}
        rows.append(row | {"height": height, "width": width})
    path = tmp_path_factory.mktemp("shapes") / "shapes.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    return path


def run_of_kind(
    kind: str, stores: dict[str, Path], of_shapes: Path, runs: Path
) -> RunConfig:
    train: Any = stores["train"]
    if kind == "windows":
        train = stores["parquet"]
    elif kind == "buckets":
        train = of_shapes
    model = {"name": "small", "num_classes": 5}
    of_train = {"log": ["samples"], "checkpoint_interval": 3, "model": model}
    run = small_run(runs, train, stores["val"], 4, 4, **of_train)
    of_kind = KINDS[kind]
    of_store = dict(of_kind.get("store", {}))
    if kind == "mixture":
        of_store["train"] = {"big": str(train), "small": str(stores["val"])}
    return replace(
        run,
        store=replace(run.store, **of_store),
        plan=replace(run.plan, **of_kind.get("plan", {})),
        transform=replace(run.transform, max_bad_fraction=0.5),
        augment=AugmentConfig(mixup_alpha=1.0),
    )


@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_queries_agree_with_the_samples_of_a_run_with_kills(
    kind: str,
    workers: int,
    stores: dict[str, Path],
    of_shapes: Path,
    tmp_path: Path,
) -> None:
    plain = run_of_kind(kind, stores, of_shapes, tmp_path)
    train = replace(plain.train, num_workers=workers)
    run = replace(plain, train=train, name="run")
    killed: list[int] = []
    killer = threading.Thread(
        target=kill_a_worker_at, args=(tmp_path / "run", 5, killed)
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
    seen: dict[int, set[tuple[int, int, int]]] = defaultdict(set)
    for record in records:
        micro = int(record["micro_batch"][-3:])
        for row, index in enumerate(record["indices"]):
            seen[index].add((record["step"], micro, row))
    drawn = random.Random(2)
    num = NUM_QUERIES // len(KINDS) // 2 + 1
    for record in drawn.choices(records, k=num):
        micro = int(record["micro_batch"][-3:])
        rows = replay.samples(record["step"], rank=micro % workers, micro=micro)
        assert [row["index"] for row in rows] == record["indices"]
    for index in drawn.choices(range(len(replay.run.spec.stores["train"])), k=num):
        draws = replay.when(index).draws
        places = [(d.step, d.micro, d.row) for d in draws if not d.was_bad]
        assert len(places) == len(seen[index])
        assert set(places) == seen[index]
    ranks = {row["rank"] for row in replay.samples(len(replay))}
    assert ranks == set(range(workers))
