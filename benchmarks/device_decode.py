"""Decoding on the device, `transform.decode: device`, beside the CPU road: bytes, images/s, the GPU's share.

    python benchmarks/device_decode.py                          # on a GPU, in about a minute
    python benchmarks/device_decode.py --store imagenet256.lmdb
    python benchmarks/device_decode.py --wire                   # bytes and CPU time of an image; needs no GPU

    wire_bytes, actor_us   of an image, by each road: bytes in Ray's block, and CPU time of the actor that makes it
    alone_…                for each library that is there: images/s of decoding, cutting and resizing alone, the ms
                           of a micro-batch, as the host sees them, and how many images the host had to decode
    resize_ms              of cutting and resizing a micro-batch alone
    resident               images/s of training on one tensor that stays on the device: the ceiling
    cpu, device            the same from the whole stream, by each road, with `--actors`; and shares of the time
                           that the trainer waited for data, and that the device's decoder ran beside the rest
    device_few             the device road with two actors

Without --store it draws 2,000 JPEGs of short side 256, of about 28 KB, as ImageNet's are. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import torch
from gpu import Loop

import raypipe
from raypipe.device import decoders
from raypipe.device.augment import DeviceAugment
from raypipe.device.resize import resize_boxes
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.row import block_row
from raypipe.transform.encoded import DATA, MAP

PLAIN = raypipe.AugmentConfig()
ROADS = ("cpu", "device")


def photo(index: int) -> bytes:
    """A JPEG of about 28 KB, with structure at all scales, and a short side of 256."""
    rng = np.random.default_rng(index)
    width, height = ((341, 256), (384, 256), (256, 341))[index % 3]
    pixels = np.full((height, width, 3), 128, np.float32)
    for side, level in ((4, 70), (16, 40), (64, 24), (160, 16)):
        noise = rng.normal(0, level, (side, side, 1 + 2 * (side < 64))).astype(
            np.float32
        )
        pixels += cv2.resize(noise, (width, height)).reshape(height, width, -1)
    quality = [cv2.IMWRITE_JPEG_QUALITY, 88]
    return cv2.imencode(".jpg", pixels.clip(0, 255).astype(np.uint8), quality)[
        1
    ].tobytes()


def make_store(folder: str, count: int) -> str:
    with ThreadPoolExecutor() as pool:
        images = list(pool.map(photo, range(count)))
    raypipe.convert(
        ({"image": image, "label": i % 1000} for i, image in enumerate(images)),
        f"{folder}/made.lmdb",
    )
    return f"{folder}/made.lmdb"


def spec_of(
    args: Any, store: str, road: Any, actors: int = 1, engine: Any = "ray"
) -> raypipe.StreamSpec:
    return raypipe.open_stream(
        store,
        plan=raypipe.PlanConfig(epochs=10_000, micro_batch_size=args.micro_batch_size),
        transform=raypipe.TransformConfig(
            train=args.transform, size=args.size, decode=road
        ),
        pool=raypipe.PoolConfig(engine=engine, min_actors=actors, max_actors=actors),
    )


def on_the_wire(args: Any, store: str) -> dict[str, Any]:
    """Bytes of an image in a block, and the CPU time that an actor takes for it, medians."""
    found: dict[str, Any] = {}
    for road in ROADS:
        maker = MicroBatchMaker(spec_of(args, store, road, engine="inline"))
        num = args.micro_batch_size
        seconds = list[float]()
        num_bytes = 0
        for step in range(8):
            began = time.process_time()
            row = block_row(
                [
                    maker.make(
                        MicroBatchId("train", 0, step % maker.plan.steps_per_epoch, 0)
                    )[0]
                ]
            )
            seconds.append(time.process_time() - began)
            num_bytes = sum(column.nbytes for column in row.values())
        found[f"{road}_wire_bytes"] = round(num_bytes / num)
        found[f"{road}_actor_us"] = round(statistics.median(seconds) / num * 1e6, 1)
    return found


def alone(args: Any, store: str, device: torch.device) -> dict[str, Any]:
    """Images/s of the decoder by itself, for each library."""
    batch = MicroBatchMaker(spec_of(args, store, "device", engine="inline")).make(
        MicroBatchId("train", 0, 0, 0)
    )[0]
    data: Any = batch.fields[DATA]
    found: dict[str, Any] = {}
    libraries = (
        dict(decoders.LIBRARIES) if device.type == "cuda" else {"libjpeg-turbo": None}
    )
    for name, load in libraries.items():
        if load:
            decoders.LIBRARIES.clear()
            decoders.LIBRARIES[name] = load
        try:
            decoder = decoders.DeviceDecoder(device)
        except raypipe.ConfigError as error:
            found[f"alone_{name}"] = f"not here: {error}"[:200]
            continue
        times = list[float]()
        for _ in range(args.rounds + 3):
            began = time.perf_counter()
            made = decoder(data, batch[MAP], batch.weight > 0)
            made.image.sum().item()
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[3:])
        found[f"alone_{name}_images_per_s"] = round(len(batch.index) / seconds)
        found[f"alone_{name}_ms"] = round(seconds * 1e3, 2)
        found[f"alone_{name}_by_host"] = made.num_by_host
    decoders.LIBRARIES.update({name: load for name, load in libraries.items() if load})
    boxes = [decoders.box_of_map(of_map) for of_map in batch[MAP]]
    cuts = [
        torch.zeros((3, bottom - top, right - left), dtype=torch.uint8, device=device)
        for top, left, bottom, right in boxes
    ]
    times = []
    for _ in range(args.rounds + 3):
        began = time.perf_counter()
        for rows in decoders._groups(
            {i: cut[0].numel() for i, cut in enumerate(cuts)}, 16 << 20, are_padded=True
        ):
            last = resize_boxes([cuts[row] for row in rows], batch[MAP][rows])
        last.sum().item()
        times.append(time.perf_counter() - began)
    return {**found, "resize_ms": round(statistics.median(times[3:]) * 1e3, 2)}


def train(args: Any, loop: Loop, store: str, road: str, actors: int) -> dict[str, Any]:
    """Images/s of training from the stream, after a warm-up, and the shares of its time."""
    loader = raypipe.loader(
        spec_of(args, store, road, actors, args.engine),
        max_actors=actors,
        device=loop.device,
        augment=PLAIN,
        dtype=torch.bfloat16 if loop.cuda else torch.float32,
    )
    with contextlib.closing(loader):
        batches = (batch for epoch in loader.epochs() for batch in epoch.train)
        for batch in itertools.islice(batches, args.warmup):
            loop.step(batch.image, batch.target, None)
        loop.wait()
        before = loader.times()
        began = time.perf_counter()
        for batch in itertools.islice(batches, args.steps):
            loop.step(batch.image, batch.target, None)
        loop.wait()
        seconds = time.perf_counter() - began
        spent = loader.times() - before
    return {
        "images_per_s": round(args.steps * args.micro_batch_size / seconds),
        "waiting": round(spent.wait_s / seconds, 3),
        "decoding": round(spent.decode_s / seconds, 3),
    }


def resident(
    args: Any, loop: Loop
) -> Iterator[tuple[torch.Tensor, torch.Tensor, None]]:
    shape = (args.micro_batch_size, 3, args.size, args.size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=loop.device)
    augment = DeviceAugment(
        PLAIN, loop.device, torch.bfloat16 if loop.cuda else torch.float32
    )
    target = torch.zeros(args.micro_batch_size, dtype=torch.int64, device=loop.device)
    pixels = pixels.contiguous(memory_format=torch.channels_last)
    while True:
        yield augment.normalize(pixels), target, None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", default="")
    parser.add_argument("--wire", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transform", default="light")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--micro-batch-size", type=int, default=256)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--actors", type=int, default=14)
    parser.add_argument("--engine", default="ray", choices=["ray", "inline"])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    began = time.perf_counter()
    found: dict[str, Any] = {}

    def tell(**figures: Any) -> None:
        found.update(figures)
        print(f"{time.perf_counter() - began:5.1f} s ", figures, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        store = args.store or make_store(folder, 2000)
        tell(**on_the_wire(args, store))
        if not args.wire:
            device = torch.device(args.device)
            if device.type == "cuda":
                name = torch.cuda.get_device_name()
            else:
                name = "cpu"
            tell(device=name, **alone(args, store, device))
            loop = Loop(args.model, device)
            tell(
                resident=round(
                    loop.images_per_s(resident(args, loop), args.steps, warmup=10)
                )
            )
            for key, road, actors in (
                ("device", "device", args.actors),
                ("cpu", "cpu", args.actors),
                ("device_few", "device", 2),
            ):
                tell(**{key: train(args, loop, store, road, actors)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
