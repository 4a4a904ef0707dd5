"""How long an LMDB of another program with many keys takes to open, first and again, and its memory per process.

    python benchmarks/lmdb_keys.py [--keys 10000000] [--layout image]

Layouts: `image`, keys of 8 digits; `folders`, keys `class/name.jpg` of 1,000 classes; `values`, msgpack's (image,
label) with the list of keys in `__keys__`. Images are 16 bytes. Each opening is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import msgpack
import numpy as np

from raypipe.stores import open_store

_CHUNK = 200_000  # entries in a transaction
_NUM_READ = 20_000


def entries(
    layout: str, start: int, stop: int, num: int
) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys in ascending order, and values."""
    for number in range(start, stop):
        image = b"\xff\xd8\xff%013d" % number
        if layout == "folders":
            yield b"n%08d/%08d.JPEG" % (number * 1000 // num, number), image
        else:
            yield (
                b"%08d" % number,
                image if layout == "image" else msgpack.packb((image, number % 1000)),
            )


def write(path: Path, layout: str, num: int) -> None:
    with lmdb.open(
        str(path), subdir=False, lock=False, sync=False, map_size=1 << 38
    ) as env:
        for start in range(0, num, _CHUNK):
            with env.begin(write=True) as txn:
                part = entries(layout, start, min(num, start + _CHUNK), num)
                txn.cursor().putmulti(part, append=True)
        if layout == "values":
            with env.begin(write=True) as txn:
                txn.put(
                    b"__keys__",
                    msgpack.packb([b"%08d" % number for number in range(num)]),
                )


def resident() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        line.split(":")[0]: int(line.split()[1]) << 10
        for line in lines
        if line.startswith(("RssAnon", "RssFile"))
    }


def measure(path: Path) -> dict[str, float]:
    """Open the store in this process, and read samples from everywhere."""
    open_store(path)  # imports
    before = resident()
    begun_s = time.perf_counter()
    begun_cpu_s = time.process_time()
    store = open_store(path)
    num = len(store)
    _ = store.fingerprint
    open_s = time.perf_counter() - begun_s
    open_cpu_s = time.process_time() - begun_cpu_s
    indices = np.random.default_rng(0).integers(0, num, _NUM_READ)
    begun_cpu_s = time.process_time()
    store.read(indices, ("image",))
    read_us = (time.process_time() - begun_cpu_s) / _NUM_READ * 1e6
    after = resident()
    return {
        "open_s": round(open_s, 3),
        "open_cpu_s": round(open_cpu_s, 3),
        "read_us": round(read_us, 1),
        "own_bytes_per_key": round((after["RssAnon"] - before["RssAnon"]) / num, 2),
        "mapped_bytes_per_key": round((after["RssFile"] - before["RssFile"]) / num, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument(
        "--layout", choices=["image", "folders", "values"], default="image"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAYPIPE_CACHE"] = f"{folder}/cache"
        path = Path(folder, "keys.lmdb")
        write(path, args.layout, args.keys)
        result: dict[str, object] = {
            "keys": args.keys,
            "layout": args.layout,
            "file_bytes": path.stat().st_size,
        }
        for name in ("first", "second"):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                result[name] = pool.apply(measure, (path,))
            print(f"{name}: {result[name]}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
