"""What plan.order="relaxed" gains where some micro-batches are slow: both orders in one run, in turns.

    python benchmarks/stragglers.py [--slow 0.05 --factor 10]

The transform is a sleep, so that the figure is one of the order and not of the machine: a micro-batch takes
40 ms, and one in `1 / slow` takes `factor` times as long, the same ones in both orders. Prints micro-batches/s and
their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import raypipe  # noqa: F401  # isort: skip
import numpy as np
from rich.console import Console
from rich.table import Table

from raypipe.cluster import connect
from raypipe.config import PoolConfig, TransformConfig
from raypipe.pipeline import StreamSpec
from raypipe.plan import PlanConfig
from raypipe.rank_stream import host_batches
from raypipe.stores.memory import MemoryStore

MICRO_BATCH, ORDINARY_S = 4, 0.04


def measure(order: Any, window: int, actors: int, slow: float, factor: float) -> float:
    """Micro-batches/s in the steady state."""
    import cv2

    # The red of a sample's one colour is its number: the transform knows by it whether it is to be slow.
    num = 256
    images = [cv2.imencode(".png", np.full((4, 4, 3), i, np.uint8))[1].tobytes() for i in range(num)]
    late = set(np.random.default_rng(0).permutation(num)[: round(num * slow / MICRO_BATCH)].tolist())

    def transform(image: np.ndarray) -> np.ndarray:
        is_late = int(image[0, 0, 0]) in late
        time.sleep(ORDINARY_S / MICRO_BATCH + (ORDINARY_S * (factor - 1) if is_late else 0))
        return image

    spec = StreamSpec.of(
        MemoryStore(images, [0] * num),
        plan=PlanConfig(epochs=16, micro_batch=MICRO_BATCH, order=order, relaxed_window=window),
        transform=TransformConfig(),
        train_transform=transform,
        pool=PoolConfig(min_actors=actors, max_actors=actors, cpus_per_actor=0.1),
    )
    arrivals = []
    for _ in host_batches(spec.splits(spec.plan.start(), max_actors=actors)[0]):
        arrivals.append(time.perf_counter())
    first = len(arrivals) // 6
    return (len(arrivals) - first - 1) / (arrivals[-1] - arrivals[first])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=8)
    parser.add_argument("--slow", type=float, default=0.05, help="share of slow micro-batches")
    parser.add_argument("--factor", type=float, default=10.0, help="how much longer they take")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    connect()
    ideal = args.actors / (ORDINARY_S * (1 + args.slow * (args.factor - 1)))
    rates: dict[str, list[float]] = {"strict": [], "relaxed, window 16": [], "relaxed, window 64": []}
    for _ in range(args.repeats):
        for name, values in rates.items():
            order, _, window = name.partition(", window ")
            values.append(measure(order, int(window or 1), args.actors, args.slow, args.factor))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    table = Table(title=f"{args.actors} actors, {args.slow:.0%} of micro-batches {args.factor:g} times as slow")
    for column in ("order", "micro-batches/s", "of what the actors can do", "gain"):
        table.add_column(column, justify="left" if column == "order" else "right")
    for name, rate in medians.items():
        table.add_row(name, f"{rate:.1f}", f"{rate / ideal:.2f}", f"{rate / medians['strict']:.2f}")
    Console(width=110).print(table)
    print(json.dumps({"ideal": ideal, **medians}), flush=True)


if __name__ == "__main__":
    main()
