"""What a trace costs: CPU time per image of a stream while it is traced, and after the trace has ended.

    python benchmarks/trace_cost.py imagenet-500.tar [--transform light] [--seconds 8] [--repeats 3]
    python benchmarks/trace_cost.py cifar10-train.parquet --transform small --size 32 --batch 1024

Two streams differ by more than a trace costs, so both figures are of one stream, some seconds after another.
Streams without a trace are measured in the same two spans of time, in turn with the others: their ratio is that of
the spans alone, and the cost is what the traced streams' ratio has more. CPU time is that of all processes of the
stream, its local cluster's included. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TMPDIR", tempfile.mkdtemp(prefix="rp-"))

import psutil

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.cluster import connect

_WARM_UP_S = 10.0  # actors start, and blocks grow
_WRITING_S = 4.0  # the trace is written


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
    """Take batches of a stream for a while: CPU microseconds per image in two spans, the first of them traced."""
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
        file = Path(folder) / "trace.json"
        if traced:
            trace = {"trace": file, "trace_s": _WARM_UP_S + args.seconds}
        with raypipe.loader(spec, max_actors=args.actors, **trace) as loader:
            batches = (batch for epoch in loader.epochs() for batch in epoch.train)
            next(batches)
            begun = time.monotonic()
            begin_s = _WARM_UP_S
            first = span(batches, begun + begin_s, begun + begin_s + args.seconds)
            begin_s += args.seconds + _WRITING_S
            second = span(batches, begun + begin_s, begun + begin_s + args.seconds)
        events = 0
        if traced:
            events = len(json.loads(file.read_text())["traceEvents"])
    return {"first": first, "second": second, "events": events}


def span(batches: Iterator[Any], begin: float, end: float) -> float:
    """CPU microseconds per image from one moment to another, on the clock of time.monotonic."""
    images = 0
    before: dict[tuple[int, float], float] = {}
    for batch in batches:
        now = time.monotonic()
        if now < begin:
            continue
        if not before:
            before = cpu_by_process()
            continue
        images += len(batch.index)
        if now > end:
            break
    after = cpu_by_process()
    spent = sum(after[process] - before.get(process, 0.0) for process in after)
    return spent / images * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store")
    parser.add_argument("--transform", default="light")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    connect()
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(args.repeats):
        for traced in (bool(repeat % 2), not repeat % 2):
            figures = measured(args, traced)
            ratios[traced].append(figures["first"] / figures["second"])
            kind = "traced" if traced else "plain"
            print(
                f"{kind:7}{figures['first']:9.1f} us of CPU per image, then {figures['second']:9.1f}: "
                f"{ratios[traced][-1]:.3f}{figures['events']:8} events",
                flush=True,
            )
    plain = statistics.median(ratios[False])
    of_traced = statistics.median(ratios[True])
    result = {
        "store": args.store,
        "transform": args.transform,
        "plain": plain,
        "traced": of_traced,
        "cost": of_traced / plain - 1,
        "repeats": args.repeats,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
