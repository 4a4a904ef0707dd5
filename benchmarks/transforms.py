"""Decode and transform on one core, for each CPU transform.

    OMP_NUM_THREADS=1 python benchmarks/transforms.py STORE [TRANSFORM …] [--samples 500] [--repeats 3]

Every micro-batch goes through all transforms in turn, so that what else the machine does falls on all of them
alike; the times are CPU seconds of the thread, which is why torch must have no other. The last line is JSON:
images/s of one core, medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping

import cv2
import numpy as np

from raypipe import TransformConfig, open_store
from raypipe.kernel import why_no_kernel
from raypipe.stores.base import Columns
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.samples import read_samples

NAMES = [
    "light",
    "heavy",
    "tv-light",
    "autoaugment",
    "randaugment",
    "trivialaugment",
    "augmix",
]


MICRO_BATCH = 50


def samples_of(address: str, num: int) -> list[Columns]:
    """The first samples of a store, in micro-batches."""
    store = open_store(address)
    num = min(len(store), num)
    return [
        read_samples(store, np.arange(first, min(num, first + MICRO_BATCH)))
        for first in range(0, num, MICRO_BATCH)
    ]


def measure(
    samples: list[Columns], modes: Mapping[str, SampleMaker], epoch: int
) -> dict[str, float]:
    """Images/s by mode; which mode comes first changes from micro-batch to micro-batch."""
    spent_ns = dict.fromkeys(modes, 0)
    names = list(modes)
    for number, part in enumerate(samples):
        indices = np.arange(len(part.labels)) + number * MICRO_BATCH
        keys = np.stack([np.full(len(indices), epoch), indices], axis=1)
        keys = keys.astype(np.uint64)
        turn = (number + epoch) % len(names)
        for name in names[turn:] + names[:turn]:
            started_ns = time.thread_time_ns()
            modes[name].make(part, keys)
            spent_ns[name] += time.thread_time_ns() - started_ns
    total = sum(len(part.labels) for part in samples)
    return {name: total / ns * 1e9 for name, ns in spent_ns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("store")
    parser.add_argument(
        "transforms",
        nargs="*",
        default=NAMES,
        help="presets, module:function, or files of steps",
    )
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error(
            "set OMP_NUM_THREADS=1: work of torch's other threads is not counted"
        )
    cv2.setNumThreads(1)  # as in an actor
    samples = samples_of(options.store, options.samples)
    config = TransformConfig(size=options.size)
    modes = {name: SampleMaker(name, config) for name in options.transforms}
    measure(samples[:1], modes, 0)
    repeats = [
        measure(samples, modes, epoch) for epoch in range(1, options.repeats + 1)
    ]
    print(
        f"{sum(map(len, samples))} images to {options.size} px; extension: {why_no_kernel() or 'used'}"
    )
    for name in modes:
        ratio = statistics.median(
            repeat[name] / repeat[options.transforms[0]] for repeat in repeats
        )
        all_of_it = ", ".join(f"{repeat[name]:.1f}" for repeat in repeats)
        median = statistics.median(repeat[name] for repeat in repeats)
        print(f"{name:16} {median:8.1f} images/s  x {ratio:.2f}  ({all_of_it})")
    print(
        json.dumps(
            {
                name: round(statistics.median(r[name] for r in repeats), 1)
                for name in modes
            }
        )
    )


if __name__ == "__main__":
    main()
