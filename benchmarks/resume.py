"""What a resume costs at the start and at the end of an epoch of ImageNet's length.

    python benchmarks/resume.py STORE [--transform heavy --size 224 --actors 2 --micro-batch-size 256 --repeats 3]

It is the time to the first micro-batch, the pool's start and all. The order is O(1) in the position, so the two
should not differ. Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import raypipe  # isort: skip
import numpy as np
import ray

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.printing import print_table
from raypipe.stores.base import Columns, Store
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec

NUM_SAMPLES = 1_281_167  # ImageNet's


class RepeatedStore:
    """A store that is as long as one wants: another one's samples again and again, at random access."""

    def __init__(self, store: Store, size: int) -> None:
        self._store = store
        self._size = size
        self.address = f"{store.address} x {size / len(store):.0f}"
        self.columns = store.columns
        self.classes = store.classes
        self.groups = None
        self.fingerprint = f"{store.fingerprint} x {size}"

    def __len__(self) -> int:
        return self._size

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        return self._store.read(indices % len(self._store), columns)

    def close(self) -> None:
        self._store.close()


def measure(
    store: Store,
    *,
    transform: TransformConfig,
    actors: int,
    micro_batch: int,
    repeats: int,
) -> dict[str, Any]:
    """Resume the stream at the first and at the last step of an epoch, in turns, `repeats` times each.

    Returns:
        `resume_start_s` and `resume_end_s`, medians; `resume_ratio`, the one over the other.
    """
    spec = open_stream(
        RepeatedStore(store, NUM_SAMPLES),
        plan=PlanConfig(epochs=2, micro_batch_size=micro_batch),
        transform=transform,
        pool=PoolConfig(min_actors=actors, max_actors=actors),
    )
    raypipe.connect()
    first = spec.plan.steps_per_epoch
    last = 2 * spec.plan.steps_per_epoch - 1
    _resume(spec, first, actors)  # the first one of all also starts Ray's own helpers
    times: dict[int, list[float]] = {first: [], last: []}
    for number in range(repeats):
        for step in (first, last) if number % 2 == 0 else (last, first):
            times[step].append(_resume(spec, step, actors))
    start, end = (statistics.median(times[step]) for step in (first, last))
    return {"resume_start_s": start, "resume_end_s": end, "resume_ratio": end / start}


def _resume(spec: StreamSpec, step: int, actors: int) -> float:
    began = time.perf_counter()
    batches = host_batches(
        splits(spec, spec.plan.cursor_at(step), max_actors=actors)[0]
    )
    next(batches)
    seconds = time.perf_counter() - began
    batches.close()  # type: ignore[attr-defined]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store")
    parser.add_argument("--transform", default="heavy")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--actors", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--micro-batch-size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    found = measure(
        raypipe.open_store(args.store),
        transform=TransformConfig(train=args.transform, size=args.size),
        actors=args.actors,
        micro_batch=args.micro_batch_size,
        repeats=args.repeats,
    )
    ray.shutdown()
    print_table(
        f"{args.store}: a resume in an epoch of {NUM_SAMPLES:,} samples, {args.repeats} repeats",
        {
            "first batch, at the epoch's start": f"{found['resume_start_s']:.2f} s",
            "first batch, at its last step": f"{found['resume_end_s']:.2f} s",
            "end / start": f"{found['resume_ratio']:.3f}",
        },
    )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
