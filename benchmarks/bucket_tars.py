"""Tar shards in a bucket against the same shards on disk: first batch, bytes of an epoch, CPU time, images/s.

    python benchmarks/bucket_tars.py --folder /tmp/bucket-tars
    python benchmarks/bucket_tars.py --shards 6 --rounds 3       # six shards, three rounds
    python benchmarks/bucket_tars.py --shards 4 --shard-mb 20    # a quick look

The bucket is benchmarks/slow_bucket.py, with 20 ms before each answer. Each way starts with an empty cache, and
the ways take turns. CPU time is that of this process and all its descendants, Ray's too, from the first batch on;
the server's is counted apart. The last line is JSON.

On a node that has run for long, the kernel's cache of files takes all memory, and a new page of the cache is an
old one of another file. A virtual machine that has just deleted a cache has given its pages back to the host, and
each takes 8 us or more to come again, as measured here. --fill FILE reads a file before each way, for memory as on
such a node.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import tarfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from slow_bucket import sent, slow_bucket

import raypipe
from raypipe.rayext.cluster import connect

_LOOK_S = 0.2
# where the shards are, plan.shuffle, pool.reader
_WAYS = {
    "bucket": ("bucket", "auto", "auto"),
    "disk": ("disk", "auto", "auto"),
    "bucket, read by actors": ("bucket", "auto", "actors"),
    "disk, in windows": ("disk", "window", "auto"),
}
_NUM_PICTURES = 400  # different images; shards repeat them in other orders


def pictures(side: int) -> list[bytes]:
    """JPEGs with a shorter side of so many pixels, as large as those of photos."""
    made = []
    for number in range(_NUM_PICTURES):
        rng = np.random.default_rng(number)
        coarse = cv2.resize(
            rng.integers(0, 256, (24, 32, 3), np.uint8), (side * 4 // 3, side)
        )
        noise = rng.normal(0, 9, coarse.shape)
        pixels = np.clip(coarse + noise, 0, 255).astype(np.uint8)
        made.append(
            cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 85])[1].tobytes()
        )
    return made


def write_shards(folder: Path, num_shards: int, shard_bytes: int, side: int) -> int:
    """Write WebDataset shards; return the number of samples."""
    folder.mkdir(parents=True)
    images = pictures(side)
    number = 0
    rng = np.random.default_rng(0)
    for shard in range(num_shards):
        with tarfile.open(folder / f"train-{shard:04d}.tar", "w") as tar:
            while tar.offset < shard_bytes:
                image = images[rng.integers(len(images))]
                for suffix, content in (
                    ("jpg", image),
                    ("cls", b"%d" % (number % 100)),
                ):
                    member = tarfile.TarInfo(f"{number:08d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
                number += 1
    return number


def fill_memory(file: Path) -> None:
    """Read a file, so that the kernel's cache of files takes all free memory."""
    buffer = bytearray(16 << 20)
    with file.open("rb", buffering=0) as source:
        while source.readinto(buffer):
            pass


class CpuTimes(threading.Thread):
    """The CPU seconds of this process and its descendants, looked at again and again, since processes end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._seconds: dict[int, float] = {}  # by process id, when it was last seen
        self._before: dict[int, float] = {}
        self._roles: dict[int, str] = {}
        self._lock = threading.Lock()
        self.start()

    def run(self) -> None:
        while True:
            self._look()
            time.sleep(_LOOK_S)

    def begin(self) -> None:
        """Count from now on."""
        self._look()
        with self._lock:
            self._before = dict(self._seconds)

    def by_role(self) -> dict[str, float]:
        """Return the seconds since `begin`, by what the processes do."""
        self._look()
        seconds: dict[str, float] = defaultdict(float)
        with self._lock:
            for pid, spent in self._seconds.items():
                seconds[self._roles[pid]] += spent - self._before.get(pid, 0.0)
        return seconds

    def _look(self) -> None:
        parents: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            pid = int(folder.name)
            parents[pid] = int(fields[1])
            seconds[pid] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
        for pid, spent in seconds.items():
            ancestor = pid
            while ancestor > 1 and ancestor != os.getpid():
                ancestor = parents.get(ancestor, 0)
            if ancestor != os.getpid():
                continue
            with contextlib.suppress(OSError), self._lock:
                self._roles[pid] = _role_of(pid)
                self._seconds[pid] = spent


def _role_of(pid: int) -> str:
    if pid == os.getpid():
        return "driver"
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    if "slow_bucket.py" in command:
        return "server"
    if "TransformWorker" in command:
        return "actors"
    if command.startswith("ray::Supervisor"):
        return "Supervisor"
    if command.startswith(("ray::IDLE", "ray::ReadPlan")):
        return "reader"  # Ray's idle workers too, which do nothing
    return "Ray"


def measure(
    address: str,
    shuffle: Any,
    reader: Any,
    endpoint: str,
    cpu_times: CpuTimes,
    epochs: int,
    preset: str,
) -> dict[str, Any]:
    """Read epochs of a store through a stream with Ray: what the first batch and each epoch took."""
    sent(endpoint)
    begun = time.perf_counter()
    spec = raypipe.open_stream(
        address,
        plan=raypipe.PlanConfig(epochs=epochs, micro_batch_size=64, shuffle=shuffle),
        transform=raypipe.TransformConfig(train=preset, size=224),
        pool=raypipe.PoolConfig(reader=reader, head_start=0),
    )
    result: dict[str, Any] = {
        "open_s": round(time.perf_counter() - begun, 2),
        "open_bytes": _bytes(endpoint),
    }
    loader = raypipe.loader(spec)
    epoch_images = list[int]()
    seconds = list[float]()
    num_bytes = list[int]()
    num_requests = list[int]()
    first = True
    for epoch in loader.epochs():
        started = time.perf_counter()
        images = 0
        for batch in epoch.train:
            if first:
                counts = sent(endpoint)
                result["first_batch_s"] = round(time.perf_counter() - begun, 2)
                result["first_batch_bytes"] = sum(
                    n for path, n in counts.items() if path.endswith(".tar")
                )
                first = False
                cpu_times.begin()
                started = time.perf_counter()
                images = 0
            images += len(batch.image)
        seconds.append(time.perf_counter() - started)
        counts = sent(endpoint)
        num_requests.append(counts.pop("requests", 0))
        num_bytes.append(sum(n for path, n in counts.items() if path.endswith(".tar")))
        epoch_images.append(images)
    cpu = cpu_times.by_role()
    result["cpu_us_per_image"] = {
        name: round(1e6 * spent / sum(epoch_images), 1)
        for name, spent in cpu.items()
        if spent > 0
    }
    result["cpu_us_without_server"] = round(
        1e6 * (sum(cpu.values()) - cpu["server"]) / sum(epoch_images), 1
    )
    num_bytes[0] += result["first_batch_bytes"]
    result["epoch_bytes"] = num_bytes
    result["epoch_requests"] = num_requests
    result["images_per_s"] = [
        round(n / s, 1) for n, s in zip(epoch_images, seconds, strict=True)
    ]
    return result


def _bytes(endpoint: str) -> int:
    return sum(n for path, n in sent(endpoint).items() if path.endswith(".tar"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/raypipe-bucket-tars"))
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--shard-mb", type=int, default=100)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--preset", default="light")
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fill", type=Path, help="a file as large as the free memory")
    parser.add_argument("--ways", nargs="+", default=list(_WAYS), choices=list(_WAYS))
    options = parser.parse_args()
    shards = options.folder / "bucket" / "shards"
    if not shards.exists():
        write_shards(shards, options.shards, options.shard_mb * 1_000_000, options.side)
    stored = sum(path.stat().st_size for path in shards.glob("*.tar"))
    cache = options.folder / "cache"
    os.environ["RAYPIPE_CACHE"] = str(cache)
    shutil.rmtree(shards / "_raypipe_index", ignore_errors=True)
    with slow_bucket(options.folder, options.latency_ms / 1000) as endpoint:
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
        }
        os.environ |= {"AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        begun = time.perf_counter()
        store: Any = raypipe.open_store("s3://bucket/shards")
        index = store.write_index()
        report: dict[str, Any] = {
            "stored_bytes": stored,
            "samples": index["samples"],
            "index_s": round(time.perf_counter() - begun, 1),
            "index_bytes_read": _bytes(endpoint),
            "index_bytes": sum(
                path.stat().st_size for path in (shards / "_raypipe_index").iterdir()
            ),
        }
        connect()
        cpu_times = CpuTimes()
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in options.ways}
        for _ in range(options.rounds):
            for name in options.ways:
                place, shuffle, reader = _WAYS[name]
                shutil.rmtree(cache, ignore_errors=True)
                if options.fill:
                    fill_memory(options.fill)
                rounds[name].append(
                    measure(
                        "s3://bucket/shards" if place == "bucket" else str(shards),
                        shuffle,
                        reader,
                        endpoint,
                        cpu_times,
                        options.epochs,
                        options.preset,
                    )
                )
                print(name, rounds[name][-1], flush=True)
        report["rounds"] = rounds
        report["medians"] = {
            name: {
                "images_per_s": statistics.median(
                    rate for result in results for rate in result["images_per_s"]
                ),
                "cpu_us_per_image": statistics.median(
                    result["cpu_us_without_server"] for result in results
                ),
            }
            for name, results in rounds.items()
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
