"""Epochs with and without a cache of decoded samples, on one core: docs/performance.md has a run.

    python benchmarks/sample_cache.py STORE [--transform light] [--size 224] [--samples 500] [--repeats 3]

Encoded images are in memory, so reading is not measured. The first epoch fills the caches; in the others the modes
take turns at each micro-batch, so that what else the machine does falls on all of them alike; the times are CPU
seconds of the thread. The pixels of "disk", the cache of a node, are compared with those of "off".
The last line is JSON: images/s of one core, medians over the later epochs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import cv2
import numpy as np

from raypipe import PoolConfig, TransformConfig, open_store
from raypipe.transform.batch import MicroBatchTransform
from raypipe.transform.contents import Images
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_cache import SampleCache, open_caches
from raypipe.transform.samples import EncodedSample, Samples

MODES = ("off", "disk")
MICRO_BATCH = 50


class Mode:
    """One way to make micro-batches of images that are in memory."""

    def __init__(self, images: list[EncodedSample], transform: Any, cache: SampleCache | None) -> None:
        self._images, self._cache = images, cache
        decoded = cache.decoded if cache else None
        self._transform = MicroBatchTransform(Images(transform, TransformConfig()), decoded=decoded)

    def __call__(self, indices: np.ndarray, epoch: int) -> tuple[np.ndarray, int]:
        """The pixels of a micro-batch, and the CPU time that it took, ns."""
        started_ns = time.thread_time_ns()
        kept = self._cache.find(indices) if self._cache else {}
        images = [kept.get(position, self._images[index]) for position, index in enumerate(indices.tolist())]
        keys = np.stack([np.full(len(indices), epoch), indices], axis=1).astype(np.uint64)
        rows, _ = self._transform.run(Samples.of(images), indices, keys)
        made: Any = rows.finish()["image"]
        return made, time.thread_time_ns() - started_ns


def epoch_of(modes: dict[str, Mode], num: int, epoch: int) -> dict[str, float]:
    """Images/s by mode; which mode comes first changes from micro-batch to micro-batch."""
    spent_ns, names = dict.fromkeys(modes, 0), list(modes)
    order = np.random.default_rng(epoch).permutation(num)
    for number, first in enumerate(range(0, num, MICRO_BATCH)):
        indices, made = order[first : first + MICRO_BATCH], {}
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            made[name], took_ns = modes[name](indices, epoch)
            spent_ns[name] += took_ns
        assert all(np.array_equal(made["off"], pixels) for pixels in made.values())
    return {name: num / ns * 1e9 for name, ns in spent_ns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--transform", default="light")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--png", action="store_true", help="encode the images as PNG first")
    options = parser.parse_args()
    cv2.setNumThreads(1)  # as in an actor
    store = open_store(options.store)
    num = min(len(store), options.samples)
    images = store.read(np.arange(num), ("image",))["image"]
    if options.png:
        from raypipe.transform.decode import decode

        images = [cv2.imencode(".png", decode(image)[:, :, ::-1])[1].tobytes() for image in images]
    samples = [EncodedSample(image) for image in images]
    config = TransformConfig(train=options.transform, size=options.size)
    transform = build_transform(options.transform, options.size)
    caches = {
        name: open_caches(PoolConfig(cache=name), {"train": store}, config).get("train")  # type: ignore[arg-type]
        for name in MODES
    }
    modes = {name: Mode(samples, transform, cache) for name, cache in caches.items()}
    Mode(samples, transform, None)(np.arange(5), 0)  # imports, and first allocations
    first, *later = (epoch_of(modes, num, epoch) for epoch in range(options.repeats + 1))
    print(
        f"{num} {'PNG' if options.png else 'images'}, {options.transform} at {options.size} px, images/s of a core"
    )
    for name in MODES:
        ratio = statistics.median(one[name] / one["off"] for one in later)
        each = ", ".join(f"{one[name]:.0f}" for one in later)
        print(f"{name:8} first epoch {first[name]:8.0f}, later {each}  x {ratio:.2f}")
    print(json.dumps({name: round(statistics.median(one[name] for one in later), 1) for name in MODES}))


if __name__ == "__main__":
    main()
