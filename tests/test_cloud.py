"""A training run whose store, lists and run folder are in object storage, through faults, is the run on a disk."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import torch
import without_ray
from s3_server import FaultyProxy, environment, first
from small_runs import small_run

from raypipe.config import RunConfig
from raypipe.metrics.records import parse_records
from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import open_filesystem
from raypipe.stores import open_store, open_writer
from raypipe.stores.bad_list import write_bad_list
from raypipe.stores.destination import new_remote, put_shard
from raypipe.streaming.stop_file import request_stop

from pictures import CLASSES, samples  # isort: skip

pytestmark = [pytest.mark.cluster, pytest.mark.system]

# A run in a bucket looks for a stop every three seconds, and acts at the end of an epoch.
EPOCHS = 8

# What is done with the bucket stands in another process: Ray's processes have the environment of who started them.
# The run is stopped under a stream of actors; it goes on with its trainer reading the bucket.
RUNS = """
import dataclasses, json, pickle, sys
import raypipe
from raypipe.rayext.cluster import connect
from raypipe.config import PoolConfig
from raypipe.launch.run import launch

with open(sys.argv[1], "rb") as file:
    run = pickle.load(file)
folder = f"{run.storage_path}/{run.name}"

connect(num_cpus=4, object_store_bytes=300 << 20)
stopped = launch(run)
resumed = launch(dataclasses.replace(run, name="", resume=folder, pool=PoolConfig(engine="inline")))
with open(sys.argv[2], "w") as file:
    json.dump([stopped, resumed], file)
"""


def run_of(folder: str) -> RunConfig:
    run = small_run(
        f"{folder}/runs", f"{folder}/train.lmdb", f"{folder}/val.parquet", EPOCHS, 2
    )
    store = dataclasses.replace(run.store, exclude={"val": f"{folder}/bad.json"})
    train = dataclasses.replace(run.train, log=["samples"], checkpoint_interval=5)
    return dataclasses.replace(run, name="mine", store=store, train=train)


@pytest.fixture
def places(bucket: str, tmp_path: Path) -> tuple[str, str]:
    """A folder and a bucket with the same stores: training samples in three LMDB shards, one of them damaged."""
    rows = samples(100)
    rows[17]["image"] = b"no picture"
    (tmp_path / "train.lmdb").mkdir()
    with new_remote(f"{bucket}/train.lmdb", overwrite=False) as uploaded:
        for number, (start, end) in enumerate([(0, 40), (40, 70), (70, 100)]):
            file = tmp_path / "train.lmdb" / f"{number:05d}.lmdb"
            with open_writer(file, classes=CLASSES) as writer:
                for row in rows[start:end]:
                    writer.append(row)
            uploaded.append(put_shard(file, f"{bucket}/train.lmdb", number))
    with open_writer(
        tmp_path / "val.parquet", classes=CLASSES, row_group_size=8
    ) as writer:
        for row in samples(22, first=1000):
            writer.append(row)
    pyarrow.fs.copy_files(
        str(tmp_path / "val.parquet"),
        f"{bucket[5:]}/val.parquet",
        source_filesystem=pyarrow.fs.LocalFileSystem(),
        destination_filesystem=open_filesystem(bucket)[0],
    )
    for address in (str(tmp_path), bucket):
        write_bad_list(
            f"{address}/bad.json",
            open_store(f"{address}/val.parquet"),
            [{"index": 3, "error": "x"}],
        )
    return str(tmp_path), bucket


def files(folder: str) -> dict[str, bytes]:
    """What is in a folder, by path below it."""
    filesystem, root = open_filesystem(folder)
    found = filesystem.get_file_info(pyarrow.fs.FileSelector(root, recursive=True))
    paths = [info.path for info in found if info.type == pyarrow.fs.FileType.File]
    return {
        path.removeprefix(f"{root}/"): filesystem.open_input_stream(path).read()
        for path in paths
    }


def stop_at_once(run: str) -> None:
    """Ask a run to stop as soon as it has a folder, past the faults of its own requests, and before its trainer
    begins.
    """
    while read_whole(f"{run}/config.yaml") is None:
        time.sleep(0.1)
    request_stop(run)


def final_state(run: dict[str, bytes]) -> dict[str, Any]:
    last = max(name for name in run if name.endswith("/state.pt"))
    return torch.load(io.BytesIO(run[last]), weights_only=True)


def test_a_run_in_a_bucket_through_an_outage_ends_as_one_on_a_disk(
    places: tuple[str, str], s3_endpoint: str, tmp_path: Path
) -> None:
    local, remote = places
    alone = without_ray.train(run_of(local))
    (tmp_path / "run").write_bytes(pickle.dumps(run_of(remote)))
    # Only answers with a body can be cut or slow: one in five.
    rates = {"throttle": 0.03, "drop": 0.03, "cut": 0.08, "slow": 0.1}
    with FaultyProxy(s3_endpoint, seed=1, rates=rates, spared="/stop") as proxy:
        run_address = f"{remote}/runs/mine"
        threading.Thread(target=stop_at_once, args=(run_address,), daemon=True).start()
        # of all requests, for some seconds, in the midst of it
        proxy.outage = first(40, after=100)
        process_environment = {
            **os.environ,
            **environment(proxy.endpoint),
            "RAYPIPE_CACHE": str(tmp_path / "cache"),
        }
        process_environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                RUNS,
                str(tmp_path / "run"),
                str(tmp_path / "results.json"),
            ],
            capture_output=True,
            text=True,
            env=process_environment,
            check=False,
        )
        faults, requests = dict(proxy.faults), sum(proxy.requests.values())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    stopped, resumed = json.loads((tmp_path / "results.json").read_text())
    assert faults.pop("SlowDown") == 40
    # which of them come is a matter of chance
    assert faults.keys() <= rates.keys() and len(faults) > 1, (faults, requests)
    assert requests > 150, (faults, requests)
    print(f"{requests} requests, faults: {faults}")

    assert (
        stopped["stopped"]
        and 0 < stopped["steps"] < alone["steps"] == resumed["steps"] == 8 * EPOCHS
    )
    assert resumed["run_dir"] == f"{remote}/runs/mine"
    assert resumed["val_accuracy"] == alone["val_accuracy"]
    here, there = files(f"{local}/runs/mine"), files(f"{remote}/runs/mine")
    seen, expected_samples = (
        parse_records(found["samples.jsonl"]) for found in (there, here)
    )
    assert [r for r in seen if "indices" in r] == expected_samples and len(
        expected_samples
    ) == 16 * EPOCHS
    expected, found = final_state(here)["model"], final_state(there)["model"]
    assert expected.keys() == found.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
    of_bad = {name for name in here if name.startswith("quarantine/")}
    assert of_bad and of_bad <= there.keys()
    kinds = [record["kind"] for record in parse_records(there["metrics.jsonl"])]
    assert (
        kinds.count("train") == 8 * EPOCHS
        and kinds.count("val") == EPOCHS
        and kinds.count("start") == 2
    )
    assert "stop" not in there
    cached = list((tmp_path / "cache" / "shards").glob("[!.]*"))
    assert len(cached) == 3  # the training shards; Parquet is read where it is
