"""Memory of a stream whose trainer, transform or store is slow, and of one of ten times the object store.

    python benchmarks/flow.py [--cases 1]

Prints, per case, the largest use of the object store, what was spilled and the growth of this process. Beside
what is in flight (8 micro-batches before the pool, 8 in and behind it), the object store holds what was let go in
the last second: Ray frees objects once a second.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rp-")

import raypipe  # noqa: F401  # isort: skip
import cv2
import numpy as np
import psutil
import pyarrow as pa
import ray

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.cluster import connect
from raypipe.stores.base import Columns
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches

from memory import MemoryWatch  # isort: skip

STORE_BYTES = 80 << 20
MICRO_BATCH = 8
SIDE = 256
CROP = 160


class BitmapStore:
    """Any number of samples, all of the same large bytes, read in groups."""

    classes = ("a",)
    schema = pa.schema({"image": pa.binary(), "label": pa.int64()})
    groups = None
    address = "bitmaps"
    fingerprint = "bitmaps"

    def __init__(self, num: int, delay_s: float) -> None:
        self._num = num
        self._delay_s = delay_s
        self._image = cv2.imencode(".bmp", np.zeros((SIDE, SIDE, 3), np.uint8))[
            1
        ].tobytes()

    def __len__(self) -> int:
        return self._num

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        time.sleep(self._delay_s)
        labels = np.zeros(len(indices), np.int64)
        return Columns([self._image] * len(indices), pa.table({"label": labels}))

    def close(self) -> None:
        pass


ENCODED = MICRO_BATCH * len(BitmapStore(1, 0)._image)


def case(
    name: str,
    micro_batches: int,
    store_s: float = 0,
    transform_s: float = 0,
    trainer_s: float = 0,
    slow: int | None = None,
) -> dict[str, Any]:
    """What is seen of one stream; `slow`: so many micro-batches, from the first, take the trainer's time."""

    def transform(image: np.ndarray) -> np.ndarray:
        time.sleep(transform_s / MICRO_BATCH)
        return np.ascontiguousarray(image[:CROP, :CROP])

    spec = open_stream(
        BitmapStore(micro_batches * MICRO_BATCH, store_s),
        plan=PlanConfig(epochs=1, micro_batch_size=MICRO_BATCH),
        transform=TransformConfig(),
        train_transform=transform,
        pool=PoolConfig(reader="separate", max_in_flight=8),
    )
    before = psutil.Process().memory_info().rss
    count = grown = 0
    with MemoryWatch() as memory:
        for batch in host_batches(splits(spec, spec.plan.start(), max_actors=1)[0]):
            assert batch["image"].shape == (MICRO_BATCH, CROP, CROP, 3)
            if slow is None or count < slow:
                time.sleep(trainer_s)
            count += 1
            grown = max(grown, psutil.Process().memory_info().rss - before)
    return {
        "case": name,
        "micro_batches": count,
        "expected": micro_batches,
        "streamed_mib": count * ENCODED >> 20,
        "store_mib": STORE_BYTES >> 20,
        "peak_mib": memory.object_store >> 20,
        "spilled_mib": memory.spilled >> 20,
        "grown_mib": grown >> 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", type=int, default=4, help="how many of the four, from the first"
    )
    num_cases = parser.parse_args().cases
    connect(num_cpus=2, object_store_bytes=STORE_BYTES)
    whole = -(-10 * STORE_BYTES // ENCODED)
    cases: list[tuple[str, int, dict[str, Any]]] = [
        (
            "ten times the object store, whose trainer is slow at first",
            whole,
            {"trainer_s": 0.05, "slow": 60},
        ),
        ("slow trainer", 60, {"trainer_s": 0.05}),
        ("slow transform", 60, {"transform_s": 0.05}),
        ("slow store", 60, {"store_s": 0.05}),
    ]
    found = [case(name, num, **slow) for name, num, slow in cases[:num_cases]]
    for one in found:
        print(one)
    ray.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
