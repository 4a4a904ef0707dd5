"""A store behind latency, read three times with and without `store.in_memory`: images/s and bytes of each epoch.

    python benchmarks/in_memory.py --folder /tmp/in-memory

The stores, of JPEGs with a shorter side of 256 pixels, are a folder of images and a Parquet file, behind
benchmarks/slow_bucket.py with 20 ms before each answer. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from bucket_tars import pictures
from slow_bucket import sent, slow_bucket

import raypipe
from raypipe.rayext.cluster import connect
from raypipe.stores import open_writer

_EPOCHS = 3


def write_stores(folder: Path, num: int) -> None:
    """Write a folder of class folders and a Parquet file with the same images."""
    images = pictures(256)
    for number in range(num):
        path = folder / "images" / f"{number % 10:02d}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A comment segment makes each file another one.
        image = images[number % len(images)]
        path.write_bytes(image[:2] + b"\xff\xfe\x00\x08%06d" % number + image[2:])
    with open_writer(folder / "train.parquet") as writer:
        for number, path in enumerate(sorted((folder / "images").glob("*/*.jpg"))):
            writer.append({"image": path.read_bytes(), "label": number % 10})


def measure(address: str, endpoint: str, in_memory: bool) -> list[dict[str, Any]]:
    """Return images/s, bytes and requests of each epoch."""
    spec = raypipe.open_stream(
        address,
        plan=raypipe.PlanConfig(epochs=_EPOCHS, micro_batch_size=64),
        transform=raypipe.TransformConfig(train="light", size=224),
        in_memory=in_memory,
    )
    epochs = []
    sent(endpoint)
    started = 0.0
    for epoch in raypipe.loader(spec).epochs():
        images = 0
        for batch in epoch.train:
            if not started:
                started = time.perf_counter()
            else:
                images += len(batch.image)
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        counts = sent(endpoint)
        requests = counts.pop("requests", 0)
        epochs.append(
            {
                "images_per_s": round(images / seconds, 1),
                "bytes": sum(counts.values()),
                "requests": requests,
            }
        )
    return epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/raypipe-in-memory"))
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--latency-ms", type=float, default=20)
    options = parser.parse_args()
    bucket = options.folder / "bucket"
    if not bucket.exists():
        write_stores(bucket, options.images)
    os.environ["RAYPIPE_CACHE"] = str(options.folder / "cache")
    report: dict[str, Any] = {}
    with slow_bucket(options.folder, options.latency_ms / 1000) as endpoint:
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
        }
        os.environ |= {"AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        connect()
        for name in ("images", "train.parquet"):
            for in_memory in (False, True):
                way = f"{name}, in memory" if in_memory else name
                report[way] = measure(f"s3://bucket/{name}", endpoint, in_memory)
                print(way, report[way], flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
