"""CPU of validations that are made once: without the memory, in memory, on disk, and on disk by a later run.

    uv run --group dev benchmarks/validation.py imagenet-500.tar [--copies 8] [--epochs 8] [--ways memory disk]

Each way is a stream of its own whose validation, `center` at 224, has the images of the store several times over;
its training is one small micro-batch an epoch. CPU milliseconds per image are those of all processes, by role,
between the first batches of two validations. An epoch is partly made while the one before it is read, so the
second one shares the first one's cost: a later epoch is the mean of those from the third on. The hash of all
batches must be equal. The last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

WAYS: dict[str, dict[str, Any]] = {
    "off": {"remember": "off"},
    "memory": {"remember": {"memory": 1 << 30}},
    "disk": {"remember": {"disk": 4 << 30}},
    "disk, later run": {"remember": {"disk": 4 << 30}},
}
ROLES = {
    "MapWorker": "actors",
    "Supervisor": "supervisor",
    "ReadPlan": "reader",
    "gcs_server": "gcs",
    "raylet": "raylet",
}
_SIDE = 224
_BATCH = 50
_STORE_BYTES = 3 << 30


def make_stores(source: str, copies: int, folder: Path) -> tuple[str, str]:
    """Write the validation store, and the training store of one micro-batch."""
    import numpy as np
    from PIL import Image

    import raypipe

    store = raypipe.open_store(source)

    def samples() -> Iterator[dict[str, Any]]:
        for _ in range(copies):
            for index in range(len(store)):
                read = store.read(np.array([index]))
                assert read.images is not None
                image = read.images[0]
                assert image is not None
                yield {
                    "image": bytes(image),
                    "label": read.table["label"][0].as_py(),
                }

    def small() -> Iterator[dict[str, Any]]:
        for number in range(_BATCH):
            content = io.BytesIO()
            Image.new("RGB", (32, 32), (number, 0, 0)).save(content, "jpeg")
            yield {"image": content.getvalue(), "label": 0}

    raypipe.convert(samples(), str(folder / "val.lmdb"))
    raypipe.convert(small(), str(folder / "train.lmdb"))
    return str(folder / "train.lmdb"), str(folder / "val.lmdb")


def cpu_s() -> Counter[str]:
    """CPU seconds of this process and all below it, by role."""
    seconds = Counter[str]()
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        names = (role for word, role in ROLES.items() if word in title)
        role = "driver" if process == this else next(names, "others")
        seconds[role] += times.user + times.system
    return seconds


def run(way: str, train: str, val: str, epochs: int) -> dict[str, Any]:
    """Read all validations of a stream in this process, on a cluster of its own."""
    import raypipe
    from raypipe.rayext.cluster import connect

    connect(num_cpus=2, object_store_bytes=_STORE_BYTES)
    spec = raypipe.open_stream(
        train,
        val,
        plan=raypipe.PlanConfig(
            epochs=epochs, micro_batch_size=_BATCH, global_batch_size=_BATCH, seed=1
        ),
        transform=raypipe.TransformConfig(train="center", val="center", size=_SIDE),
        pool=raypipe.PoolConfig(
            max_actors=1, cpus_per_actor=1, head_start=0, **WAYS[way]
        ),
    )
    loader = raypipe.loader(spec)
    marks: list[tuple[float, Counter[str]]] = []
    hashes = []
    for epoch in loader.epochs():
        for _ in epoch.train:
            pass
        seen = hashlib.blake2b(digest_size=8)
        images = 0
        for batch in epoch.val:
            if not images:
                marks.append((time.perf_counter(), cpu_s()))
            images += len(batch.index)
            seen.update(batch.image[:, :, ::56, ::56].contiguous().numpy().data)
        hashes.append(seen.hexdigest())
    share = loader.times("val").remembered_fraction
    loader.close()
    rows = []
    for (start_s, before), (end_s, after) in itertools.pairwise(marks):
        spent = {role: after[role] - before[role] for role in after}
        row = {role: round(1e3 * s / images, 4) for role, s in spent.items()}
        row["all"] = round(1e3 * sum(spent.values()) / images, 4)
        row["wall"] = round(1e3 * (end_s - start_s) / images, 4)
        rows.append(row)
    return {
        "way": way,
        "images": images,
        "epochs": rows,
        "later": _mean(rows[2:]),
        "remembered": round(share, 3),
        "hashes": sorted(set(hashes)),
    }


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: round(sum(row.get(name, 0.0) for row in rows) / len(rows), 4)
        for name in names
    }


def main() -> None:
    """Measure each way in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--way", choices=list(WAYS), help="measure it in this process")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="validation-"))
    if args.way:
        train, val = args.store.split(",")
        print(json.dumps(run(args.way, train, val, args.epochs)))
        return
    os.environ["RAYPIPE_CACHE"] = str(folder / "cache")
    train, val = make_stores(args.store, args.copies, folder)
    results = []
    try:
        for way in args.ways:
            command = [sys.executable, __file__, f"{train},{val}", "--way", way]
            command += ["--epochs", str(args.epochs)]
            output = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            results.append(json.loads(output.stdout.splitlines()[-1]))
            for number, row in enumerate(results[-1]["epochs"], 1):
                print(way, number, row, flush=True)
    finally:
        shutil.rmtree(folder)
    roles = ["actors", *sorted(set(ROLES.values()) - {"actors"}), "driver", "all"]
    print(f"| CPU ms per image | {' | '.join(roles)} | remembered |")
    print("| --- |" + " ---: |" * (len(roles) + 1))
    for result in results:
        values = [f"{result['later'].get(role, 0.0):.4f}" for role in roles]
        print(
            f"| {result['way']} | {' | '.join(values)} | {result['remembered']:.0%} |"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
