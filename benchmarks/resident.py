"""Decoded images that stay on the device, against the stream, on one core of a CPU: docs/cache.md has a run.

    python benchmarks/resident.py STORE [--transform flip-crop] [--size 32] [--micro-batch 512] [--actors 2]
    python benchmarks/resident.py                  # the digits

    off         the loader of an inline stream: read, decode, transform, as an actor does it
    disk        the same with the node's cache of decoded samples, after its first epoch
    device      the loader with pool.cache=device
    draws       of these, what the host does: order, keys, draws
    indexing    a tensor of all images, indexed by the plan: the ceiling of anything that knows no transform
    ray         with --actors: the loader of a stream that so many actors make; images/s alone

The modes take turns, some micro-batches each, so that what else the machine does falls on all of them alike. CPU
is that of the process, with one thread of torch. Labels and pixels of "device" are compared with those of "off".
The last line is JSON: medians over the turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from raypipe.streaming.resident import ResidentStream

import raypipe
from raypipe import PlanConfig, PoolConfig, StreamSpec, TransformConfig
from raypipe.stores import digits_stores

CPU = torch.device("cpu")


def batches(spec: StreamSpec, **options: Any) -> Iterator[Any]:
    for epoch in raypipe.loader(spec, **options).epochs():
        yield from epoch.train


def indexing(spec: StreamSpec, resident: ResidentStream) -> Iterator[Any]:
    """Whole images by the plan's indices, out of one tensor."""
    first = next(resident.whole_batches(spec.plan.start())).image
    images = torch.zeros((len(spec.stores["train"]), *first.shape[1:]), dtype=torch.uint8)
    for at in spec.plan.micro_batches(spec.plan.start()):
        yield images.index_select(0, torch.from_numpy(spec.plan.indices(at)))


def check(spec: StreamSpec, resident: Iterator[Any], num: int = 8) -> int:
    """Compare the first micro-batches with the stream's; the largest difference of two pixels."""
    most = 0
    for batch, other in itertools.islice(zip(batches(spec), resident, strict=False), num):
        assert np.array_equal(batch.label, other.label) and np.array_equal(batch.index, other.index)
        pixels = batch.image.permute(0, 2, 3, 1).numpy()
        most = max(most, int(np.abs(pixels.astype(int) - other.image).max()))
    return most


def turn(source: Iterator[Any], steps: int, micro_batch: int) -> tuple[float, float]:
    """Images/s and CPU microseconds of an image, of the next micro-batches."""
    started, began = time.perf_counter(), time.process_time()
    for _ in itertools.islice(source, steps):
        pass
    images = steps * micro_batch
    return images / (time.perf_counter() - started), (time.process_time() - began) / images * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", default="", help="empty = the digits, with `small` at 16 px")
    parser.add_argument("--transform", default="")
    parser.add_argument("--size", type=int, default=0)
    parser.add_argument("--micro-batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8, help="micro-batches of a turn")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--actors", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = options.store or digits_stores()[0]
    transform = options.transform or ("flip-crop" if options.store else "small")
    size, micro_batch = options.size or (32 if options.store else 16), options.micro_batch
    plan = PlanConfig(epochs=100_000, micro_batch_size=micro_batch)

    def spec(**pool: Any) -> StreamSpec:
        config = TransformConfig(train=transform, size=size)
        return StreamSpec(store, plan=plan, transform=config, pool=PoolConfig(**pool))

    off, disk, device = spec(engine="inline"), spec(engine="inline", cache="disk"), spec(cache="device")
    resident = ResidentStream(device, CPU)
    difference = check(off, resident.whole_batches(device.plan.start()))
    modes: dict[str, Iterator[Any]] = {
        "off": batches(off),
        "disk": batches(disk),
        "device": batches(device, device=CPU),
        "draws": resident.batches(device.plan.start()),
        "indexing": indexing(device, resident),
    }
    turn(modes["disk"], off.plan.steps_per_epoch, micro_batch)  # fills it
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
    names = list(modes)
    for number in range(options.repeats + 1):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            measured = turn(modes[name], options.steps, micro_batch)
            found[name] += [measured] if number else []  # the first turn imports and allocates
    figures = {
        f"{name}_{what}": round(statistics.median(each[place] for each in found[name]), 1)
        for name in names
        for place, what in enumerate(("images_per_s", "cpu_us_per_image"))
    }
    if options.actors:
        raypipe.connect()
        ray = spec(min_actors=options.actors, max_actors=options.actors)
        source = batches(ray, max_actors=options.actors)
        turn(source, 8 * options.actors + 8, micro_batch)  # what was made ahead while the pool started
        rates = [turn(source, 4 * options.steps, micro_batch)[0] for _ in range(options.repeats)]
        figures["ray_images_per_s"] = round(statistics.median(rates), 1)
    print(f"{store}, {transform} at {size} px, micro-batches of {micro_batch}; pixels differ by {difference}")
    for name in names:
        rate, cpu = figures[f"{name}_images_per_s"], figures[f"{name}_cpu_us_per_image"]
        print(f"{name:9} {rate:>12,.0f} images/s   {cpu:8.1f} us of CPU per image")
    if options.actors:
        print(f"{'ray':9} {figures['ray_images_per_s']:>12,.0f} images/s, by {options.actors} actors")
    print(json.dumps({**figures, "pixels_differ_by": difference}))


if __name__ == "__main__":
    main()
