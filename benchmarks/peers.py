# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "raypipe",
#     "datasets>=5,<6",
#     "litdata>=0.2.76,<0.3",
#     "matplotlib>=3.10,<4",
#     "mosaicml-streaming>=0.13,<0.14",
#     "nvidia-dali-cuda120>=2,<3",
#     "psutil>=5.9",
#     "spdl>=0.8,<0.9",
#     "torch>=2.14",  # torchvision is built against the CUDA build of torch: the two are asked for together
#     "torchvision>=0.29",
#     "webdataset>=1.0,<2",
# ]
#
# [tool.uv.sources]
# raypipe = { path = "..", editable = true }
# ///
"""raypipe and its peers on the same files, with the same transform, cores and batch, one after the other.

    uv run benchmarks/peers.py STORE [--repeats 3] [--picture docs/peers.png]

uv gives it an environment of its own, with the versions that the peers ask for: MosaicML Streaming wants an older
numpy than the tests run with. FFCV needs the headers of OpenCV and libjpeg-turbo; add it by hand.

Each run is a process of its own. The repeats are interleaved, ceiling first, since the machine's speed drifts.

    ceiling         decode and transform alone on every core, no loader at all (as `raypipe bench`), by decode mode
    steady          images/s from a quarter of an epoch to its end, from the second epoch on; of a loader that
                    hands out an epoch in less time than it stood still before it, images/s of both together
    sustained       images/s from the first batch of the second epoch to the last: with the epochs' boundaries
    first batch     from the call that starts the loader, its modules imported, to its first batch
    boundary        the gap before an epoch's first batch, but the first, as a multiple of the ordinary gap; of
                    ordinary gaps, one in ten is longer than "long gap", another such multiple
    memory          peak of the private pages of all processes, and shared memory
    CPU             CPU seconds of all processes per 1,000 images, in the steady state of the second epoch on

A loader that cannot run here is in the table with the reason. The case "largest" is benchmarks/largest.py: the
start of raypipe over stores of any size. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import largest
import numpy as np
import peer_cost
from peer_data import Work, photos, read_samples, write_all
from peer_loaders import LOADERS, SIZE
from peer_report import draw, show, verdicts
from rich.progress import Progress

_TIMEOUT_S = 600.0
_PHOTO_BATCH = 32


def consume(name: str, work: Work) -> dict[str, Any]:
    """Run a loader in this process: when each batch of each epoch came."""
    start = LOADERS[name](work)
    started = time.perf_counter()
    epochs = []
    for batches in start():
        arrivals = []
        for image, label in batches:
            arrivals.append(time.perf_counter())
            shape = tuple(image.shape)
            right = (work.batch, SIZE, SIZE, 3), (work.batch, 3, SIZE, SIZE)
            if shape not in right or len(label) != work.batch or "uint8" not in str(image.dtype):
                raise SystemExit(f"{name} gave {image.dtype} {shape}, {len(label)} labels")
        epochs.append(arrivals)
    return {"started": started, "epochs": epochs}


def figures(seen: dict[str, Any], cost: peer_cost.Cost, batch: int) -> dict[str, float]:
    """What the arrivals of one run amount to."""
    epochs = seen["epochs"]
    later = epochs[1:]
    gaps: list[float] = []
    for arrivals in later:
        gaps += np.diff(arrivals[len(arrivals) // 4 :]).tolist()
    gap_s = statistics.mean(gaps)
    start, end = later[0][0], later[-1][-1]
    cpu_s = cost.cpu_between(start, end)
    num = sum(map(len, later)) - 1
    sustained = num * batch / (end - start)
    boundaries = [after[0] - before[-1] for before, after in itertools.pairwise(epochs)]
    # Plain Ray Data may make a whole epoch before its first batch: then nothing is steady but the whole.
    at_once = boundaries[0] > (later[0][-1] - later[0][0])
    steady = (len(later[0]) * batch / (boundaries[0] + later[0][-1] - later[0][0])) if at_once else 0.0
    return {
        "steady": steady or batch / gap_s,
        "sustained": sustained,
        "first_batch_s": epochs[0][0] - seen["started"],
        "boundary_s": statistics.median(boundaries),
        "boundary": statistics.median(boundaries) / gap_s,
        "long_gap": float(np.quantile(gaps, 0.9)) / gap_s,
        "memory_mib": max(cost.memory, default=0) / 2**20,
        "cpu_s_per_1000": cpu_s / (num * batch) * 1000,
    }


def measure(name: str, work: Work) -> dict[str, float]:
    """One run of a loader, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="peer") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--one", name, "--result", str(result)]
        command += ["--work", json.dumps(asdict(work), default=str)]
        # A cluster of its own, and one thread for each library: the cores are shared out by the loader.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_ALBUMENTATIONS_UPDATE": "1", "RAY_TMPDIR": folder}
        env.pop("RAY_ADDRESS", None)
        _, cost = peer_cost.run(command, _TIMEOUT_S, env)
        return figures(json.loads(result.read_text()), cost, work.batch)


def ceiling(work: Work, mode: Any, seconds: float) -> float:
    """Images/s of decode and transform alone."""
    from raypipe.commands import bench
    from raypipe.config import TransformConfig
    from raypipe.stores import open_store

    config = TransformConfig(train=work.transform, size=SIZE, crop_decode=mode)
    return bench.ceiling(open_store(work.folder / "train.lmdb"), config, work.workers, seconds)["images_per_s"]


def measure_all(cases: dict[str, Work], names: list[str], repeats: int, seconds: float) -> dict[str, Any]:
    """Runs of each case: {case: {loader or "ceiling, MODE": {figure: [one of each repeat]} or {"error": why}}}."""
    results: dict[str, Any] = {case: {} for case in cases}
    with Progress() as progress:
        task = progress.add_task("", total=repeats * len(cases) * (len(names) + 1))
        for _ in range(repeats):
            for case, work in cases.items():
                rows = results[case]
                progress.update(task, description=f"{case}: ceiling")
                for mode in ("off", "exact", "scaled"):
                    row = rows.setdefault(f"ceiling, {mode}", {"steady": []})
                    row["steady"].append(ceiling(work, mode, seconds))
                progress.advance(task)
                for name in names:
                    progress.update(task, description=f"{case}: {name}")
                    row = rows.setdefault(name, {})
                    if "error" not in row:
                        try:
                            for figure, value in measure(name, work).items():
                                row.setdefault(figure, []).append(value)
                        except peer_cost.FailedError as error:
                            rows[name] = {"error": str(error)}
                            progress.print(f"{name}: {error}", markup=False)
                    progress.advance(task)
    return results


def medians(results: dict[str, Any]) -> dict[str, Any]:
    """The medians over the repeats."""
    return {
        case: {
            name: row if "error" in row else {figure: statistics.median(row[figure]) for figure in row}
            for name, row in rows.items()
        }
        for case, rows in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", help="JPEGs: a tar, a folder of classes, Parquet, LMDB")
    parser.add_argument(
        "--folder", default=str(Path(tempfile.gettempdir()) / "raypipe-peers"), help="for the formats"
    )
    parser.add_argument("--images", type=int, default=6000, help="of an epoch; the store's, again and again")
    parser.add_argument("--photos", type=int, default=384, help="photos of 12 MP of an epoch; 0 = without")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each ceiling")
    parser.add_argument("--cases", nargs="+", default=["heavy", "light", "photos", "largest"])
    parser.add_argument("--only", nargs="+", default=list(LOADERS), choices=list(LOADERS), metavar="LOADER")
    parser.add_argument("--picture", help="where to draw the figures")
    parser.add_argument("--output", help="where to write every repeat's figures, as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        fields = json.loads(options.work)
        seen = consume(options.one, Work(**fields | {"folder": Path(fields["folder"])}))
        Path(options.result).write_text(json.dumps(seen))
        return
    if not options.store:
        parser.error("the store is missing")
    folder = Path(options.folder)
    samples = read_samples(options.store, options.images)
    unwritten = write_all(folder / f"images-{options.images}", samples)
    common = (options.workers, options.batch, options.epochs)
    cases = {
        case: Work(folder / f"images-{options.images}", case, *common)
        for case in options.cases
        if case in ("heavy", "light")
    }
    if options.photos and "photos" in options.cases:
        path = folder / f"photos-{options.photos}"
        if not (path / "train.lmdb").exists():
            # 24 of them, again and again: none stays in a cache of the CPU's.
            few = photos(samples, min(24, options.photos))
            write_all(path, [few[i % len(few)] for i in range(options.photos)])
        cases["photos"] = Work(path, "light", options.workers, _PHOTO_BATCH, options.epochs)
    for name, why in unwritten.items():
        print(f"{name} could not be written: {why}")
    results = measure_all(cases, options.only, options.repeats, options.seconds)
    starts = largest.measure(options.repeats) if "largest" in options.cases else {}
    if options.output:
        Path(options.output).write_text(json.dumps(results, indent=1))
    median = medians(results)
    show(median)
    held = verdicts(results, [[run["first_batch_s"] for run in runs] for runs in starts.values()])
    if options.picture:
        draw(median, options.picture)
    print(json.dumps({"medians": median, "bars": held, "met": all(bar["met"] for bar in held.values())}))


if __name__ == "__main__":
    main()
