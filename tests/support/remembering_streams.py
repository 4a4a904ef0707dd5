"""Streams on a small cluster that remember, in memory and on disk, for some seconds; prints their use, as JSON.

python remembering_streams.py TRAIN VAL SECONDS
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import without_ray
from ray._private.internal_api import node_stats

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.cluster import connect
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.memory.made_folder import open_folder
from raypipe.streaming.memory.rank_memory import RankMemory
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import end_actors, start_supervisor, stream_name

STORE_BYTES = 150 << 20
ROOM_BYTES = STORE_BYTES // 10
DISK_BYTES = 4 << 20
_LOOK_S = 0.25
_ON_DISK = {"remember": {"disk": DISK_BYTES}, "max_in_flight": 12}
# By stream: seed, transform of the training, size, and settings of the pool. The first two are alike; the
# validations of the last two do not fit on disk together.
STREAMS: dict[str, tuple[int, str, int, dict[str, Any]]] = {
    "alike 1": (1, "light", 112, {"max_in_flight": 12}),
    "alike 2": (1, "light", 112, {"max_in_flight": 12}),
    "any blocks": (2, "heavy", 112, {}),
    "disk 1": (3, "center", 112, _ON_DISK),
    "disk 2": (4, "center", 160, _ON_DISK),
}


class Stream(threading.Thread):
    """A stream, read again and again until the end; its first pass is compared with one without Ray."""

    def __init__(self, name: str, stores: list[str], until: float) -> None:
        super().__init__(name=name)
        self._stores = stores
        self._until = until
        self.num_batches = 0
        self.num_remembered = 0
        self.num_passes = 0
        self.is_equal = False
        self.error = ""

    def run(self) -> None:
        try:
            expected = without_ray.digests(self._spec())
            self.is_equal = True
            while time.monotonic() < self._until:
                self.is_equal &= self._pass() == expected
                self.num_passes += 1
        except Exception as error:
            self.error = repr(error)

    def _spec(self) -> StreamSpec:
        seed, train, size, pool = STREAMS[self.name]
        return open_stream(
            *self._stores,
            plan=PlanConfig(
                epochs=30, micro_batch_size=20, global_batch_size=20, seed=seed
            ),
            transform=TransformConfig(train=train, val="center", size=size),
            pool=PoolConfig(cpus_per_actor=0.5, **pool),
        )

    def _pass(self) -> list[bytes]:
        spec = self._spec()
        supervisor = start_supervisor(self.name)
        memory = RankMemory(spec, stream_name(supervisor))
        memory.are_others()
        iterators = splits(
            spec,
            spec.plan.start(),
            max_actors=1,
            supervisor=supervisor,
            ranks_folder=memory.folder,
        )
        digests = []
        for batch in host_batches(iterators[0], memory):
            digests.append(batch_hash(batch))
            self.num_batches += 1
            self.num_remembered += batch.num_remembered
        end_actors(supervisor, iterators, 0, 1)
        memory.close()
        return digests


def bytes_in(folder: Path) -> int:
    """Bytes of the micro-batches that a folder remembers."""
    num_bytes = 0
    for path in folder.glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError):
            num_bytes += path.stat().st_size
    return num_bytes


def main() -> None:
    """Run all streams, and look at the limits four times a second."""
    train, val, seconds = sys.argv[1:]
    connect(num_cpus=3, object_store_bytes=STORE_BYTES)
    node = ray.nodes()[0]
    until = time.monotonic() + float(seconds)
    streams = [Stream(name, [train, val], until) for name in STREAMS]
    on_disk_at = Path(os.environ["RAYPIPE_CACHE"]) / "remembered"
    folder = open_folder(PoolConfig())
    assert folder
    for stream in streams:
        stream.start()
    used = list[int]()
    remembered = list[int]()
    on_disk = list[int]()
    spilled = 0
    while any(stream.is_alive() for stream in streams):
        stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False)
        used.append(stats.store_stats.object_store_bytes_used)
        spilled = max(spilled, stats.store_stats.spilled_bytes_total)
        remembered.append(bytes_in(folder.path))
        on_disk.append(bytes_in(on_disk_at))
        time.sleep(_LOOK_S)
    found = {
        "looks": len(used),
        "store_bytes": STORE_BYTES,
        "most_used": max(used),
        "median_used": int(np.median(used)),
        "spilled": spilled,
        "room_bytes": ROOM_BYTES,
        "most_remembered": max(remembered, default=0),
        "disk_bytes": DISK_BYTES,
        "most_on_disk": max(on_disk, default=0),
        "memory_is_left": bytes_in(folder.path) > 0,
        "streams": {
            stream.name: {
                "passes": stream.num_passes,
                "batches": stream.num_batches,
                "remembered": stream.num_remembered,
                "is_equal": stream.is_equal,
                "error": stream.error,
            }
            for stream in streams
        },
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
