"""What must hold on every release of Ray that raypipe runs with, on the one that is installed.

    uv run --with ray==2.56.0 python tests/compat/check.py

A stream for two ranks, whose pool has to grow and loses an actor, has the digests that this process makes without
Ray. A training of two workers that loses a transform actor, and one that is stopped in mid-epoch and resumed, end
with the same weights. The last line is JSON. `releases.py` asks many releases.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rp-")

import cv2
import numpy as np
import psutil
import ray
import torch

from raypipe.config import (
    PlanConfig,
    PoolConfig,
    RunConfig,
    StoreConfig,
    TrainConfig,
    TransformConfig,
)
from raypipe.launch.run import launch
from raypipe.metrics.records import read_records
from raypipe.rayext.cluster import connect
from raypipe.stores.destination import write_atomically
from raypipe.streaming.digest import digested, iterate_digests
from raypipe.streaming.hashes import combine
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.stop_file import request_stop
from raypipe.streaming.supervisor import start_supervisor

SIDE = 24


class Holder:
    """Holds CPUs."""

    def ready(self) -> None:
        """Returns once it does."""


def slow_crop(image: np.ndarray) -> np.ndarray:
    """A transform for which ranks have to wait."""
    time.sleep(0.01)
    return np.ascontiguousarray(image[:SIDE, :SIDE])


def make_store(folder: Path) -> str:
    """240 images of noise on grey, in as many shades as classes."""
    rng = np.random.default_rng(0)
    samples = []
    for number in range(240):
        pixels = (rng.integers(0, 80, (32, 36, 3)) + 50 * (number % 4)).astype(np.uint8)
        samples.append(
            {"image": cv2.imencode(".png", pixels)[1].tobytes(), "label": number % 4}
        )
    path = str(folder / "store.lmdb")
    write_atomically(path, samples, ("a", "b", "c", "d"))
    return path


def kill_an_actor(moment: Callable[[], bool], killed: list[int]) -> threading.Thread:
    """Kill a transform actor of this process's cluster, once its moment has come."""

    def run() -> None:
        while not killed:
            time.sleep(0.05)
            actors = [
                each
                for each in psutil.Process().children(recursive=True)
                if _is_actor(each)
            ]
            if actors and moment():
                killed.append(actors[0].pid)
                os.kill(actors[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _is_actor(process: psutil.Process) -> bool:
    try:
        return "".join(process.cmdline()).startswith("ray::MapWorker")
    except psutil.Error:
        return False


def check_stream(store: str) -> dict[str, Any]:
    """Digest, a killed actor, growth."""
    spec = open_stream(
        store,
        store,
        plan=PlanConfig(epochs=4, micro_batch_size=8, global_batch_size=16, seed=5),
        transform=TransformConfig(),
        train_transform=slow_crop,
        val_transform=slow_crop,
        pool=PoolConfig(min_actors=1, max_actors=2, grow_after_s=1, cpus_per_actor=0.5),
    )
    start = spec.plan.start()
    expected = [each.digest for each in digested(inline_batches(spec, start, 0, 1))]
    supervisor, found, killed = start_supervisor(), list[bytes](), list[int]()
    thread = kill_an_actor(lambda: len(found) > 40, killed)
    held = ray.remote(num_cpus=1.5)(
        Holder
    ).remote()  # a pool begins with as many actors as there is room for
    ray.get(held.ready.remote())
    iterators = splits(spec, start, max_actors=2, world_size=2, supervisor=supervisor)
    for each in iterate_digests(spec.plan, start, iterators):
        found.append(each.digest)
        if len(found) == 1:
            ray.kill(held)
    thread.join(10)
    events = [text for _, text in ray.get(supervisor.events.remote(0))]
    assert found == expected, "the stream has other digests than this process"
    assert killed, "no transform actor was killed"
    grown = [text for text in events if "1 → 2 transform actors" in text]
    assert grown, f"the pool did not grow: {events}"
    return {"digest": combine(found), "growth": grown[0]}


def run_of(
    store: str, runs: Path, name: str, plan: PlanConfig, **train: Any
) -> RunConfig:
    """A run of the small model on two workers."""
    return RunConfig(
        store=StoreConfig(store, store),
        plan=plan,
        transform=TransformConfig(train="small", val="resize", size=SIDE),
        pool=PoolConfig(max_actors=1),
        train=TrainConfig(model="small", num_workers=2, cpus_per_worker=0.5, **train),
        storage_path=str(runs),
        name=name,
    )


def steps_of(folder: Path) -> int:
    """Training steps that a run has logged."""
    records = read_records(folder.as_uri())
    return max(
        (record["step"] for record in records if record["kind"] == "train"), default=0
    )


def weights_of(folder: Path) -> str:
    """16 hex digits over the weights of the last checkpoint."""
    newest = max(folder.glob("checkpoint_*/checkpoint.json")).parent
    state = torch.load(newest / "state.pt", map_location="cpu", weights_only=True)[
        "model"
    ]
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(state):
        digest.update(state[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_training(store: str, runs: Path) -> dict[str, Any]:
    """Two workers; a killed actor; a stop in mid-epoch, and the resume."""
    run = run_of(
        store,
        runs,
        "killed",
        PlanConfig(epochs=3, micro_batch_size=6, global_batch_size=24, seed=1),
        log_interval=1,
    )
    killed: list[int] = []
    thread = kill_an_actor(lambda: steps_of(runs / "killed") >= 3, killed)
    first = launch(run)
    thread.join(10)

    def stop() -> None:
        while steps_of(runs / "stopped") < 5:
            time.sleep(0.02)
        request_stop((runs / "stopped").as_uri())

    threading.Thread(target=stop, daemon=True).start()
    stopped = launch(dataclasses.replace(run, name="stopped"))
    resumed = launch(
        dataclasses.replace(run, name="stopped", resume=str(runs / "stopped"))
    )
    assert (
        stopped["stopped"] and stopped["steps"] < first["steps"] == resumed["steps"]
    ), (stopped, first, resumed)
    weights = weights_of(runs / "killed")
    assert weights == weights_of(runs / "stopped"), "the resumed run has other weights"
    return {
        "weights": weights,
        "killed": len(killed),
        "stopped_at": stopped["steps"],
        "steps": first["steps"],
    }


def check_elastic(store: str, runs: Path) -> str:
    """Elastic training."""
    run = run_of(
        store,
        runs,
        "elastic",
        PlanConfig(epochs=1, micro_batch_size=6, global_batch_size=12, seed=1),
        min_workers=1,
    )
    return f"{launch(run)['steps']} steps"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["stream", "training", "elastic"])
    only = parser.parse_args().only
    found: dict[str, Any] = {"ray": ray.__version__}
    with tempfile.TemporaryDirectory() as folder:
        store, runs = make_store(Path(folder)), Path(folder) / "runs"
        connect(num_cpus=2, object_store_bytes=200 << 20)
        if only in (None, "stream"):
            found |= check_stream(store)
        if only in (None, "training"):
            found |= check_training(store, runs)
        if only in (None, "elastic"):
            found["elastic"] = check_elastic(store, runs)
        ray.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
