"""Whether a start depends on the size of the store: 10^4 and 10^9 samples, in turns, each in a process of its own.

    python benchmarks/largest.py [--repeats 3]

The store is a simulated one, of one image again and again. Prints the seconds to lay out the plan (open, plan, and
the first step's samples), those from ray.init to the first micro-batch, and the peak of the driver's memory; the
last line is JSON: the medians, and the larger store's as a multiple of the smaller one's.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from raypipe.stores.base import Columns

SIZES = (10**4, 10**9)


class SimulatedStore:
    """Any number of samples, all of them the same image.

    Args:
        num: of samples.
        image: encoded.
    """

    classes = ("a",)
    schema = pa.schema({"image": pa.binary(), "label": pa.int64()})
    groups = None
    address = "simulated"

    def __init__(self, num: int, image: bytes) -> None:
        self._num = num
        self._image = image
        self.fingerprint = f"simulated{num}"

    def __len__(self) -> int:
        return self._num

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        labels = np.zeros(len(indices), np.int64)
        return Columns([self._image] * len(indices), pa.table({"label": labels}))

    def close(self) -> None:
        """Nothing is open."""


def start(num: int) -> dict[str, float]:
    """Start a stream of 90 epochs over a store, to its first micro-batch."""
    import cv2
    import ray

    from raypipe.config import PlanConfig, PoolConfig, TransformConfig
    from raypipe.plan.places import MicroBatchId
    from raypipe.rayext.cluster import connect
    from raypipe.streaming.opening import open_stream
    from raypipe.streaming.pipeline import splits
    from raypipe.streaming.row import host_batches

    image = cv2.imencode(".jpg", np.zeros((256, 256, 3), np.uint8))[1].tobytes()
    began = time.perf_counter()
    spec = open_stream(
        SimulatedStore(num, image),
        plan=PlanConfig(epochs=90, micro_batch_size=128, global_batch_size=1024),
        transform=TransformConfig(train="light"),
        pool=PoolConfig(max_actors=1),
    )
    for micro in range(8):
        assert len(spec.plan.indices(MicroBatchId("train", 0, 0, micro))) == 128
    plan_s = time.perf_counter() - began
    connecting = time.perf_counter()
    connect(object_store_bytes=1 << 30)
    (iterator,) = splits(spec, spec.plan.start(), max_actors=1)
    batches = host_batches(iterator)
    next(batches)
    first_batch_s = time.perf_counter() - connecting
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    batches.close()  # type: ignore[attr-defined]
    ray.shutdown()
    return {"plan_s": plan_s, "first_batch_s": first_batch_s, "memory_mib": memory_mib}


def measure(repeats: int) -> dict[int, list[dict[str, float]]]:
    """Size → the figures of each repeat."""
    found: dict[int, list[dict[str, float]]] = {num: [] for num in SIZES}
    for _ in range(repeats):
        for num in SIZES:
            command = [sys.executable, __file__, "--one", str(num)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found[num].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(start(options.one)))
        return
    found = measure(options.repeats)
    medians = {
        num: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for num, runs in found.items()
    }
    ratios = {
        key: medians[SIZES[1]][key] / medians[SIZES[0]][key]
        for key in medians[SIZES[0]]
    }
    table = Table()
    for column in ("samples", "plan, s", "first batch, s", "driver's memory, MiB"):
        table.add_column(column, justify="right")
    for num, row in medians.items():
        table.add_row(
            f"{num:,}",
            f"{row['plan_s']:.4f}",
            f"{row['first_batch_s']:.1f}",
            f"{row['memory_mib']:.0f}",
        )
    table.add_row(
        "ratio",
        *(f"{ratios[key]:.2f}" for key in ("plan_s", "first_batch_s", "memory_mib")),
    )
    Console().print(table)
    print(json.dumps({"medians": medians, "ratios": ratios}))


if __name__ == "__main__":
    main()
