"""Decode and transform on one core, in each mode of crop-aware decode: docs/decode.md has a run.

    python benchmarks/crop_decode.py STORE [--transform light] [--samples 500] [--repeats 3]

Every image goes through all modes in turn, with the same key, so that what else the machine does falls on all of
them alike; the times are CPU seconds of the thread. The last line is JSON: images/s of one core, medians over the
repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np

from raypipe import TransformConfig, open_store
from raypipe.config import CropDecode
from raypipe.transform.contents import Images
from raypipe.transform.kernel import why_no_kernel
from raypipe.transform.presets import build_transform
from raypipe.transform.samples import EncodedSample


def measure(images: list[EncodedSample], modes: dict[str, Callable[..., Any]], epoch: int) -> dict[str, float]:
    """Images/s by mode; which mode comes first changes from image to image."""
    spent_ns = dict.fromkeys(modes, 0)
    names = list(modes)
    for index, image in enumerate(images):
        turn = (index + epoch) % len(names)
        for name in names[turn:] + names[:turn]:
            started_ns = time.thread_time_ns()
            modes[name](image, (epoch, index))
            spent_ns[name] += time.thread_time_ns() - started_ns
    return {name: len(images) / ns * 1e9 for name, ns in spent_ns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store")
    parser.add_argument("--transform", default="light")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cv2.setNumThreads(1)  # as in an actor
    store = open_store(options.store)
    encoded = store.read(np.arange(min(len(store), options.samples)), ("image",))["image"]
    images = [EncodedSample(image) for image in encoded]
    names: list[CropDecode] = ["off", "exact", "scaled"]
    transform = build_transform(options.transform, options.size)
    modes = {name: Images(transform, TransformConfig(crop_decode=name)).one for name in names}
    measure(images[:5], modes, 0)
    repeats = [measure(images, modes, epoch) for epoch in range(1, options.repeats + 1)]
    print(f"{len(images)} images, {options.transform}; extension: {why_no_kernel() or 'used'}")
    for name in names:
        ratio = statistics.median(repeat[name] / repeat["off"] for repeat in repeats)
        all_of_it = ", ".join(f"{repeat[name]:.1f}" for repeat in repeats)
        print(
            f"{name:8} {statistics.median(r[name] for r in repeats):8.1f} images/s  x {ratio:.2f}  ({all_of_it})"
        )
    print(json.dumps({name: round(statistics.median(r[name] for r in repeats), 1) for name in names}))


if __name__ == "__main__":
    main()
