"""What a trace costs: CPU time per image of a stream with and without one, in turn.

    python benchmarks/trace_cost.py imagenet-500.tar [--transform light] [--seconds 15] [--repeats 3]
    python benchmarks/trace_cost.py cifar10-train.parquet --transform small --size 32 --batch 1024

CPU time is that of all processes of the stream, its local cluster's included, from the end of a warm-up on. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TMPDIR", tempfile.mkdtemp(prefix="rp-"))

import psutil

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.cluster import connect

_WARM_UP_S = 8.0  # actors start, and blocks grow


def cpu_by_process() -> dict[tuple[int, float], float]:
    """CPU seconds so far of this process and all below it."""
    here = psutil.Process()
    spent: dict[tuple[int, float], float] = {}
    for process in (here, *here.children(recursive=True)):
        try:
            times = process.cpu_times()
            spent[process.pid, process.create_time()] = times.user + times.system
        except psutil.Error:
            continue
    return spent


def measured(args: argparse.Namespace, traced: bool) -> dict[str, float]:
    """Take batches of a stream for a while: its images/s, and CPU microseconds per image."""
    spec = raypipe.open_stream(
        args.store,
        plan=PlanConfig(
            epochs=10_000, micro_batch_size=args.batch, global_batch_size=args.batch
        ),
        transform=TransformConfig(train=args.transform, size=args.size),
        pool=PoolConfig(min_actors=args.actors, max_actors=args.actors, head_start=0),
    )
    trace: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if traced:
            trace = {"trace": Path(folder) / "trace.json", "trace_s": 1e6}
        with raypipe.loader(spec, max_actors=args.actors, **trace) as loader:
            batches = (batch for epoch in loader.epochs() for batch in epoch.train)
            next(batches)
            images = 0
            begins = time.monotonic() + _WARM_UP_S
            ends = begins + args.seconds
            before: dict[tuple[int, float], float] = {}
            since = 0.0
            for batch in batches:
                now = time.monotonic()
                if now < begins:
                    continue
                if not before:
                    before = cpu_by_process()
                    since = now
                    continue
                images += len(batch.index)
                if now > ends:
                    break
            after = cpu_by_process()
            taken_s = time.monotonic() - since
        events = 0
        if traced:
            kept = json.loads(trace["trace"].read_text())["traceEvents"]
            events = len(kept)
    spent = sum(after[process] - before.get(process, 0.0) for process in after)
    return {
        "images_per_s": images / taken_s,
        "cpu_us_per_image": spent / images * 1e6,
        "events": events,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store")
    parser.add_argument("--transform", default="light")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    connect()
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for repeat in range(args.repeats):
        for traced in (bool(repeat % 2), not repeat % 2):
            figures = measured(args, traced)
            found[traced].append(figures)
            kind = "traced" if traced else "plain"
            print(
                f"{kind:7}{figures['cpu_us_per_image']:9.1f} us of CPU per image"
                f"{figures['images_per_s']:10,.0f} images/s{figures['events']:8} events",
                flush=True,
            )
    medians = {
        name: statistics.median(run["cpu_us_per_image"] for run in found[traced])
        for name, traced in (("plain_us", False), ("traced_us", True))
    }
    paired = [
        traced["cpu_us_per_image"] / plain["cpu_us_per_image"]
        for plain, traced in zip(found[False], found[True], strict=True)
    ]
    result = {
        "store": args.store,
        "transform": args.transform,
        **medians,
        "ratio": medians["traced_us"] / medians["plain_us"],
        "median_of_pairs": statistics.median(paired),
        "repeats": args.repeats,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
