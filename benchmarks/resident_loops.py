"""Headspace against a resident dataset: one loop, whose data cost nothing either way, in turn.

    python benchmarks/resident_loops.py [--side 32] [--batch 64] [--steps 60] [--repeats 7]

A small model trains on batches of `raypipe.loader(…, headspace=True)`, and of `raypipe.resident`, on one device,
with the same augmentation. Both say how fast the loop is without an input; they should agree to 3 %, in time and
in CPU time of the process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch

import raypipe
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, TransformConfig
from raypipe.stores.memory import MemoryStore

_WARM_UP_STEPS = 6


def store_of(num: int, side: int) -> MemoryStore:
    """Samples that no other test set has: random JPEGs of one size."""
    rng = np.random.default_rng(0)
    images = [
        cv2.imencode(".jpg", rng.integers(0, 256, (side, side, 3), np.uint8))[
            1
        ].tobytes()
        for _ in range(num)
    ]
    return MemoryStore(images, np.arange(num) % 10)


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 32, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(32, 10),
    )


def rate(
    batches: Iterator[Any], steps: int, device: torch.device
) -> tuple[float, float]:
    """Images/s of a training on batches, after some steps, and its images by the second of CPU time."""
    model = model_of().to(device)
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    images = 0
    begun = 0.0
    cpu_begun = 0.0
    for number, batch in enumerate(itertools.islice(batches, steps + _WARM_UP_STEPS)):
        if number == _WARM_UP_STEPS:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begun = time.perf_counter()
            cpu_begun = time.process_time()
            images = 0
        loss = torch.nn.functional.cross_entropy(model(batch.image), batch.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        images += len(batch.index)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begun
    return images / seconds, images / (time.process_time() - cpu_begun)


def median_ratio(rates: dict[str, list[float]]) -> float:
    """The median of the ratios of the two loops, pair by pair."""
    pairs = zip(rates["headspace"], rates["resident"], strict=True)
    return statistics.median(headspace / resident for headspace, resident in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    store = store_of(8 * args.batch, args.side)
    plan = PlanConfig(
        epochs=1000, micro_batch_size=args.batch, global_batch_size=args.batch
    )
    augment = AugmentConfig(preset="light")
    spec = raypipe.open_stream(
        store,
        plan=plan,
        transform=TransformConfig(train="none", size=args.side),
        pool=PoolConfig(engine="inline"),
    )

    def of_headspace() -> Iterator[Any]:
        with raypipe.loader(
            spec, device=device, augment=augment, headspace=True
        ) as loader:
            for epoch in loader.epochs():
                yield from epoch.train

    def of_resident() -> Iterator[Any]:
        data = raypipe.resident(store, device, plan=plan, augment=augment)
        for number in range(plan.epochs):
            yield from data.epoch(number)

    kinds = {"headspace": of_headspace, "resident": of_resident}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    cpu_rates: dict[str, list[float]] = {name: [] for name in kinds}
    for repeat in range(args.repeats):
        order = list(kinds) if repeat % 2 else list(kinds)[::-1]
        for name in order:
            of_time, of_cpu_time = rate(kinds[name](), args.steps, device)
            rates[name].append(of_time)
            cpu_rates[name].append(of_cpu_time)
        print(
            {name: round(found[-1]) for name, found in rates.items()},
            flush=True,
        )
    result = {
        **{name: statistics.median(found) for name, found in rates.items()},
        "median_ratio": median_ratio(rates),
        "median_cpu_ratio": median_ratio(cpu_rates),
        "repeats": args.repeats,
        "device": str(device),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
