# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "raypipe-data[albumentations,opencv]",
#     "datasets>=5,<6",
#     "grain>=0.2.18",
#     "lancedb>=0.40",
#     "litdata>=0.2.76,<0.3",
#     "matplotlib>=3.10,<4",
#     "mosaicml-streaming>=0.13,<0.14",
#     "nvidia-dali-cuda120>=2,<3",
#     "psutil>=5.9",
#     "pylance>=14",
#     "spdl>=0.8,<0.9",
#     "torch>=2.14",  # torchvision is built against the CUDA build of torch: the two are asked for together
#     "torchvision>=0.29",
#     "webdataset>=1.0,<2",
# ]
#
# [tool.uv.sources]
# raypipe-data = { path = "..", editable = true }
# ///
"""raypipe and its peers on the same files, with the same transform, cores and batch, one after the other.

    uv run benchmarks/peers.py imagenet-500.tar --tiny-store cifar10-train.parquet [--picture FILE.png]
    uv run benchmarks/peers.py cifar10-train.parquet --cases tiny
    uv run benchmarks/peers.py imagenet-500.tar --first --repeats 5 --only raypipe "torch DataLoader"

uv gives it an environment of its own, with the versions that the peers ask for: MosaicML Streaming wants an older
numpy than the tests run with. FFCV needs the headers of OpenCV and libjpeg-turbo; add it by hand.

Each run is a process of its own. The repeats are interleaved, ceiling first, since the machine's speed drifts. A
loader may hand out several batches at a time, so no figure takes the gap between two of them for the time of one.
Epochs are long, since raypipe's blocks still grow while the first dozens of batches come.

    ceiling         raypipe's decode and transform alone, whole micro-batches on every core, no loader at all (as
                    `raypipe bench`), by decode mode
    steady          images/s from a quarter of an epoch to its end, by least squares, from the second epoch on; of
                    a loader that hands out an epoch in less time than it stood still before it, images/s of both
    sustained       images/s from the end of the first epoch to that of the last: with the epochs' boundaries
    first batch     from the call that starts the loader, its modules imported, to its first batch
    boundary        the gap before an epoch's first batch, but the first, as a multiple of the ordinary gap, which
                    is the mean gap that a moment falls into; a tenth of the time is in gaps longer than "long
                    gap", another such multiple
    memory          peak of the proportional set size (PSS) of all processes
    CPU             CPU seconds of all processes per 1,000 images, over the time of "sustained"

A loader that cannot run here is in the table with the reason. The case "largest" is benchmarks/largest.py: the
start of raypipe over stores of any size. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
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
from peer_data import (
    Sample,
    Work,
    photos,
    read_samples,
    repeated,
    short_side,
    tiny,
    write_all,
)
from peer_loaders import FORMATS, LOADERS
from peer_report import draw, show, verdicts
from rich.progress import Progress

from raypipe.stores import open_store

_TIMEOUT_S = 600.0
_SIZE = 224
_TINY_SIZE = 32
_SHORT_SIDE = 256
_PHOTO_BATCH = 32
_CASES = {
    "heavy": "heavy",
    "light": "light",
    "s256": "light",
    "tiny": "flip-crop",
    "photos": "light",
}


def consume(name: str, work: Work, only_first: bool = False) -> dict[str, Any]:
    """Run a loader in this process: when each batch of each epoch came, or only the first one."""
    start = LOADERS[name](work)
    started = time.perf_counter()
    epochs = []
    for batches in itertools.islice(start(), work.epochs):
        arrivals = []
        for image, label in batches:
            arrivals.append(time.perf_counter())
            shape = tuple(image.shape)
            channels_last = (work.batch, work.size, work.size)
            right = (
                (*channels_last, 3),
                (work.batch, 3, work.size, work.size),
                (*channels_last, 1),
            )
            if (
                shape not in right
                or len(label) != work.batch
                or "uint8" not in str(image.dtype)
            ):
                raise SystemExit(
                    f"{name} gave {image.dtype} {shape}, {len(label)} labels"
                )
            if only_first:
                return {"started": started, "epochs": [arrivals]}
        epochs.append(arrivals)
    return {"started": started, "epochs": epochs}


def figures(seen: dict[str, Any], cost: peer_cost.Cost, batch: int) -> dict[str, float]:
    """What the arrivals of one run amount to."""
    epochs = seen["epochs"]
    first_batch_s = epochs[0][0] - seen["started"]
    if len(epochs[0]) == 1:
        return {"first_batch_s": first_batch_s}
    later = epochs[1:]
    settled = [np.array(arrivals[len(arrivals) // 4 :]) for arrivals in later]
    gaps = np.sort(np.concatenate([np.diff(arrivals) for arrivals in settled]))
    gap_s = float((gaps**2).sum() / gaps.sum())
    long_gap_s = float(gaps[np.searchsorted(gaps.cumsum(), 0.9 * gaps.sum())])
    start = epochs[0][-1]
    end = epochs[-1][-1]
    num = sum(map(len, later)) * batch
    boundary_s = statistics.median(
        after[0] - before[-1] for before, after in itertools.pairwise(epochs)
    )
    # Plain Ray Data may make a whole epoch before its first batch: then nothing is steady but the whole.
    at_once = later[0][0] - epochs[0][-1] > later[0][-1] - later[0][0]
    if at_once:
        steady = len(later[0]) / (later[0][-1] - epochs[0][-1])
    else:
        steady = statistics.mean(map(_pace, settled))
    return {
        "steady": steady * batch,
        "sustained": num / (end - start),
        "first_batch_s": first_batch_s,
        "boundary_s": boundary_s,
        "boundary": boundary_s / gap_s,
        "long_gap": long_gap_s / gap_s,
        "memory_mib": max(cost.memory, default=0) / 2**20,
        "cpu_s_per_1000": cost.cpu_between(start, end) / num * 1000,
    }


def _pace(arrivals: np.ndarray) -> float:
    """Batches/s: the slope of their number over the time, which does not depend on how many come at a time."""
    return float(np.polyfit(arrivals - arrivals[0], np.arange(len(arrivals)), 1)[0])


def measure(name: str, work: Work, only_first: bool = False) -> dict[str, float]:
    """One run of a loader, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="peer") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--one", name, "--result", str(result)]
        command += ["--work", json.dumps(asdict(work), default=str)]
        command += ["--first"] * only_first
        # A cluster of its own, and one thread for each library: the cores are shared out by the loader. Under
        # `uv run`, plain Ray Data's workers would build an environment of their own, without these modules.
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "NO_ALBUMENTATIONS_UPDATE": "1",
            "RAY_TMPDIR": folder,
        }
        env["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        env.pop("RAY_ADDRESS", None)
        _, cost = peer_cost.run(command, _TIMEOUT_S, env)
        return figures(json.loads(result.read_text()), cost, work.batch)


def ceiling(work: Work, seconds: float) -> float:
    """Images/s of decode and transform alone."""
    from raypipe.commands import bench
    from raypipe.config import PoolConfig, TransformConfig

    config = TransformConfig(train=work.transform, size=work.size)
    pool = PoolConfig(min_actors=work.workers, max_actors=work.workers)
    store = open_store(work.folder / "train.lmdb")
    return bench.ceiling(store, config, pool, work.batch, seconds)["images_per_s"]


def loaders_of(work: Work, names: list[str]) -> list[str]:
    """The loaders that differ in a case: flip-crop has no crop to decode by itself."""
    if work.transform != "flip-crop":
        return names
    return [name for name in names if "seekable" not in name]


def measure_all(
    cases: dict[str, Work],
    names: list[str],
    repeats: int,
    seconds: float,
    only_first: bool = False,
) -> dict[str, Any]:
    """Runs of each case: {case: {loader or "ceiling": {figure: [one of each repeat]} or {"error": why}}}."""
    results: dict[str, Any] = {case: {} for case in cases}
    with Progress() as progress:
        task = progress.add_task(
            "",
            total=repeats * sum(len(loaders_of(w, names)) + 1 for w in cases.values()),
        )
        for _ in range(repeats):
            for case, work in cases.items():
                rows = results[case]
                progress.update(task, description=f"{case}: ceiling")
                if not only_first:
                    row = rows.setdefault("ceiling", {"steady": []})
                    row["steady"].append(ceiling(work, seconds))
                progress.advance(task)
                for name in loaders_of(work, names):
                    progress.update(task, description=f"{case}: {name}")
                    row = rows.setdefault(name, {})
                    if "error" not in row:
                        try:
                            for figure, value in measure(
                                name, work, only_first
                            ).items():
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
            name: row
            if "error" in row
            else {figure: statistics.median(row[figure]) for figure in row}
            for name, row in rows.items()
        }
        for case, rows in results.items()
    }


def _samples(options: argparse.Namespace, case: str) -> list[Sample]:
    """The images of an epoch of a case."""
    if case == "tiny":
        return tiny(
            read_samples(options.tiny_store or options.store, options.tiny), _TINY_SIZE
        )
    if case == "photos":
        # 24 of them, again and again: none stays in a cache of the CPU's.
        few = min(24, options.photos)
        return repeated(photos(read_samples(options.store, few)), options.photos)
    samples = read_samples(options.store, options.images)
    if case == "s256":
        num = min(len(samples), len(open_store(options.store)))
        return repeated(short_side(samples[:num], _SHORT_SIDE), options.images)
    return samples


def write_cases(options: argparse.Namespace) -> dict[str, Work]:
    """The cases that were asked for, their images in every format that can be written here."""
    cases = {}
    for case, transform in _CASES.items():
        kind = case if case in ("tiny", "photos", "s256") else "images"
        if kind == "s256":
            num = options.images
        else:
            num = getattr(options, kind)
        if case not in options.cases or not num:
            continue
        store = (case == "tiny" and options.tiny_store) or options.store
        path = Path(options.folder) / f"{Path(store).stem}-{kind}-{num}"
        formats = {
            "train.lmdb",
            *(FORMATS[name] for name in options.only if name in FORMATS),
        }
        for name, why in write_all(
            path, formats, functools.partial(_samples, options, case)
        ).items():
            print(f"{name} of {kind} could not be written: {why}")
        batch = _PHOTO_BATCH if case == "photos" else options.batch
        size = _TINY_SIZE if case == "tiny" else _SIZE
        cases[case] = Work(
            path, transform, size, options.workers, batch, options.epochs
        )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "store", nargs="?", help="JPEGs: a tar, a folder of classes, Parquet, LMDB"
    )
    parser.add_argument(
        "--folder",
        default=str(Path(tempfile.gettempdir()) / "raypipe-peers"),
        help="for the formats",
    )
    parser.add_argument(
        "--images",
        type=int,
        default=12_000,
        help="of an epoch; the store's, again and again",
    )
    parser.add_argument(
        "--tiny",
        type=int,
        default=150_000,
        help="images of 32 px of an epoch; 0 = without",
    )
    parser.add_argument(
        "--tiny-store", help="of images of 32 px; without it STORE's are made so small"
    )
    parser.add_argument(
        "--photos",
        type=int,
        default=384,
        help="photos of 12 MP of an epoch; 0 = without",
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each ceiling")
    parser.add_argument(
        "--cases", nargs="+", default=[*_CASES, "largest"], choices=[*_CASES, "largest"]
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=list(LOADERS),
        choices=list(LOADERS),
        metavar="LOADER",
    )
    parser.add_argument(
        "--first", action="store_true", help="measure only the first batch"
    )
    parser.add_argument("--picture", help="where to draw the figures")
    parser.add_argument(
        "--output", help="where to write every repeat's figures, as JSON"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        fields = json.loads(options.work)
        work = Work(**fields | {"folder": Path(fields["folder"])})
        seen = consume(options.one, work, options.first)
        Path(options.result).write_text(json.dumps(seen))
        return
    if not options.store:
        parser.error("the store is missing")
    cases = write_cases(options)
    results = measure_all(
        cases, options.only, options.repeats, options.seconds, options.first
    )
    if "largest" in options.cases and not options.first:
        starts = largest.measure(options.repeats)
    else:
        starts = {}
    if options.output:
        Path(options.output).write_text(json.dumps(results, indent=1))
    median = medians(results)
    show(median)
    held = verdicts(
        results, [[run["first_batch_s"] for run in runs] for runs in starts.values()]
    )
    if options.picture and not options.first:
        draw(median, options.picture)
    print(
        json.dumps(
            {
                "medians": median,
                "bars": held,
                "met": all(bar["met"] for bar in held.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
