"""Opens streams and leaves them, in one process with a cluster of its own of 2 CPUs; prints as JSON what there was
before and after.

python tests/support/left_streams.py STORE NUM     NUM streams, the ways of leaving in turn
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import sys
import threading
import time
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import ray
from ray._private.internal_api import memory_summary
from ray._private.state import actors as actors_of_ray

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.cluster import connect
from raypipe.rayext.execution import StreamAutoscaler
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec

_SETTLE_S = 100.0
_LOOP = """
with raypipe.loader(spec) as loader:
    for epoch in loader.epochs():
        for batch in epoch.train:
            break
        break
"""


def closed(spec: StreamSpec, kept: dict[str, Any]) -> None:
    """The loader is closed, and stays bound."""
    kept["loader"] = loader = raypipe.loader(spec)
    kept["epoch"] = epoch = next(loader.epochs())
    kept["batch"] = next(epoch.train)
    loader.close()


def dropped(spec: StreamSpec, kept: dict[str, Any]) -> None:
    """No name is left of it; what it made may be held."""
    epoch = next(raypipe.loader(spec).epochs())
    kept["place"] = next(epoch.train).position


def failed(spec: StreamSpec, kept: dict[str, Any]) -> None:
    """The loop raises, and what is raised is held with its frames, as an interpreter holds what it showed last."""
    loader = raypipe.loader(spec)

    def train() -> None:
        with loader:
            for epoch in loader.epochs():
                for _ in epoch.train:
                    raise ValueError("a fault in the loop")

    try:
        train()
    except ValueError as error:
        kept["last_value"] = error


def cell(spec: StreamSpec, kept: dict[str, Any]) -> None:
    """A notebook's cell ends by `break`; its names stay bound, until it is run again."""
    kept |= {"raypipe": raypipe, "spec": spec}
    exec(compile(_LOOP, "cell", "exec"), kept)


class Numbers:
    """A Dataset of images that are their number."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full((8, 8, 3), index % 256, np.uint8)


def prepare(number: int) -> None:
    """Prepare nothing in an actor; a stream that does has no head start."""


def of_a_dataset(spec: StreamSpec, kept: dict[str, Any]) -> None:
    """The loop over a DataLoader that has no name ends by `break`."""
    init = None if spec.pool.head_start else prepare
    for batch in raypipe.DataLoader(Numbers(), 10, num_workers=2, worker_init_fn=init):
        kept["batch"] = batch
        break


def collected(spec: StreamSpec, kept: dict[str, Any]) -> None:
    """Python collects the loader in the thread of its execution, as it may where it stands in a cycle."""
    held = [raypipe.loader(spec)]
    kept["place"] = next(next(held[0].epochs()).train).position
    turn = StreamAutoscaler.try_trigger_scaling

    def turn_and_drop(autoscaler: StreamAutoscaler) -> None:
        turn(autoscaler)
        held.clear()

    with patch.object(StreamAutoscaler, "try_trigger_scaling", turn_and_drop):
        while held:
            time.sleep(0.1)


WAYS = (closed, dropped, failed, cell, of_a_dataset, collected)


def found() -> dict[str, Any]:
    """What there is now: of the cluster processes that do something, actors, CPUs that are free and objects of the
    store; of this process threads, descriptors and memory in MiB.
    """
    own, busy = psutil.Process(), []
    for process in own.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            busy += [name for name in process.cmdline()[:1] if name != "ray::IDLE"]
    actors = [
        each["ActorClassName"]
        for each in actors_of_ray().values()
        if each["State"] != "DEAD"
    ]
    summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    (objects,) = re.findall(r"Plasma memory usage \d+ MiB, (\d+) objects", summary)
    return {
        "processes": sorted(busy),
        "actors": sorted(actors),
        "cpus": ray.available_resources().get("CPU", 0.0),
        "objects": int(objects),
        "python_threads": sorted(thread.name for thread in threading.enumerate()),
        "threads": own.num_threads(),
        "descriptors": own.num_fds(),
        "rss_mib": own.memory_info().rss >> 20,
    }


def settled(before: dict[str, Any] | None) -> dict[str, Any]:
    """What there is once it is no more than before; after a while what there is then. Nothing waits for `gc`."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        now = found()
        if time.monotonic() > deadline or (before and not more(before, now)):
            return now
        time.sleep(0.5)
        # a new one has no name yet
        named = {f"ray::{actor}" for actor in now["actors"]} <= set(now["processes"])
        if not before and named and now == found():
            return now


def more(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What there is more of. Ray's own threads, and connections to idle workers, come and go by a few."""
    allowed = {"threads": 4, "descriptors": 8, "rss_mib": 48}
    kinds = {}
    for name, value in now.items():
        if name == "cpus":
            is_more = value < before[name]
        elif isinstance(value, list):
            is_more = value != before[name]
        else:
            is_more = value > before[name] + allowed.get(name, 0)
        if is_more:
            kinds[name] = [before[name], value]
    return kinds


if __name__ == "__main__":
    store, num = sys.argv[1:]
    gc.disable()  # what is left must end by itself
    connect(num_cpus=2, object_store_bytes=150 << 20)
    # With a head start a stream is left before its pool has begun; without one, after that.
    specs = [
        open_stream(
            store,
            plan=PlanConfig(epochs=1000, micro_batch_size=10),
            transform=TransformConfig(train="small", size=8),
            pool=PoolConfig(head_start=head_start),
        )
        for head_start in (0, -1)
    ]
    kept: dict[str, Any] = {}
    closed(specs[0], kept)  # what the first one starts for good is not one of its own
    kept.clear()
    before = settled(None)
    for number in range(int(num)):
        begun = time.monotonic()
        turn, which = divmod(number, len(WAYS))
        way = WAYS[which]
        way(specs[turn % 2], kept)
        # A cell's stream, and one of which the error is held, have ended although their names are bound.
        stays = more(before, settled(before))
        line = {"number": number, "way": way.__name__, "more": stays}
        print(
            json.dumps(line | {"seconds": round(time.monotonic() - begun, 1)}),
            flush=True,
        )
    kept.clear()
    after = settled(before)
    print(json.dumps({"before": before, "after": after, "more": more(before, after)}))
