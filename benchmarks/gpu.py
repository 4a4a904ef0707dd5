"""What the device side costs, on one GPU: all figures by one command.

    python benchmarks/gpu.py                      # JPEGs made on the spot
    python benchmarks/gpu.py --store imagenet.lmdb

    resident     the training loop fed from one tensor that stays on the device: the ceiling of the device
    ring         the same, fed from host memory through the pinned ring: is the copy hidden?
    augmented    resident, with the `standard` augmentation, MixUp and CutMix
    stream       the training loop fed by the whole pipe, against resident and against what the CPUs can decode
    decode       JPEGs decoded on the device, alone

Ratios are of one run, medians over --repeats; the variants take turns, since clocks drift. The last line is one
JSON object. On a machine without CUDA it runs on the CPU, to be tried out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import raypipe
from raypipe.config import AugmentConfig, TrainConfig, TransformConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.device_decode import DeviceDecoder
from raypipe.device.mixing import Mixed, mixed_cross_entropy
from raypipe.device.prefetcher import on_device
from raypipe.plan.schedule import MicroBatchId
from raypipe.train.learning import build_model, build_optimizer
from raypipe.transform.batch import HostBatch
from raypipe.transform.contents import EncodedTransform, pack
from raypipe.transform.sample_transform import EncodedSample

STANDARD = AugmentConfig(preset="standard", mixup_alpha=0.2, cutmix_alpha=1.0)
Fed = tuple[torch.Tensor, torch.Tensor, Mixed | None]


class Loop:
    """A training step of a torchvision model: bf16 and channels_last on CUDA."""

    def __init__(self, model: str, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        torch.manual_seed(0)
        self.model = build_model(model, 1000).to(device, memory_format=torch.channels_last)
        self.optimizer = build_optimizer(self.model, TrainConfig(), fused=self.cuda)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def step(self, image: torch.Tensor, target: torch.Tensor, mixed: Mixed | None) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
            logits = self.model(image)
        mixed_cross_entropy(logits.float(), target, mixed, 0.1).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def images_per_s(self, batches: Iterable[Fed], steps: int, warmup: int = 3) -> float:
        """Throughput over `steps` steps after `warmup`."""
        images, started = 0, 0.0
        for number, (image, target, mixed) in enumerate(itertools.islice(batches, warmup + steps)):
            if number == warmup:
                self._wait()
                started = time.perf_counter()
            self.step(image, target, mixed)
            images += len(image) * (number >= warmup)
        self._wait()
        return images / (time.perf_counter() - started)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def host_batches(size: int, micro_batch: int, count: int) -> Iterator[HostBatch]:
    """Four micro-batches of noise in pageable memory, in turns."""
    rng = np.random.default_rng(0)
    shape = (micro_batch, size, size, 3)
    images = [rng.integers(0, 256, shape, np.uint8) for _ in range(4)]
    label = rng.integers(0, 1000, micro_batch)
    weight, index = np.ones(micro_batch, np.float32), np.arange(micro_batch)
    for number in range(count):
        yield HostBatch(MicroBatchId("train", 0, number, 0), images[number % 4], label, weight, index, 0)


def resident(args: Any, augment: DeviceAugment, device: torch.device) -> Iterator[Fed]:
    batch = next(iter(host_batches(args.size, args.micro_batch, 1)))
    image = torch.from_numpy(batch.image).to(device).permute(0, 3, 1, 2)
    target, counts = torch.from_numpy(batch.label).to(device), np.ones(args.micro_batch, bool)
    for seed in itertools.count():
        augmented, mixed = augment(image, target, counts, seed=seed)
        yield augmented, target, mixed


def through_ring(args: Any, augment: DeviceAugment, device: torch.device) -> Iterator[Fed]:
    source = host_batches(args.size, args.micro_batch, args.steps + 3)
    for batch in on_device(source, device, lambda at: at.step):
        yield augment.normalize(batch.image), batch.target, None


def streamed(args: Any, device: torch.device, store: str) -> Iterator[Fed]:
    spec = raypipe.StreamSpec.of(
        store,
        plan=raypipe.PlanConfig(epochs=10_000, micro_batch=args.micro_batch),
        transform=TransformConfig(train=args.transform, size=args.size),
        pool=raypipe.PoolConfig(min_actors=args.actors, max_actors=args.actors),
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for segment in raypipe.feed(spec, max_actors=args.actors, device=device, augment=STANDARD, dtype=dtype):
        for step in segment:
            for batch in step:
                yield batch.image, batch.target, batch.mixed


def make_store(folder: Path, count: int) -> str:
    """An LMDB of smooth random photographs of about ImageNet's size, 400 x 350."""
    import cv2

    from raypipe.stores.destination import write_atomically

    def picture(index: int) -> bytes:
        coarse = np.random.default_rng(index).integers(0, 256, (24, 28, 3), np.uint8)
        return cv2.imencode(".jpg", cv2.resize(coarse, (400, 350), interpolation=cv2.INTER_CUBIC))[1].tobytes()

    path = folder / "made.lmdb"
    samples = ({"image": picture(i), "label": i % 1000} for i in range(count))
    write_atomically(str(path), samples, tuple(map(str, range(1000))))
    return str(path)


def measure(args: Any, device: torch.device) -> dict[str, Any]:
    loop = Loop(args.model, device)
    dtype = torch.bfloat16 if loop.cuda else torch.float32
    plain = DeviceAugment(AugmentConfig(), device, dtype)
    standard = DeviceAugment(STANDARD, device, dtype)
    variants: dict[str, Callable[[], Iterator[Fed]]] = {
        "resident": lambda: resident(args, plain, device),
        "ring": lambda: through_ring(args, plain, device),
        "augmented": lambda: resident(args, standard, device),
    }
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(args.repeats):
        for name, batches in variants.items():
            found[name].append(loop.images_per_s(batches(), args.steps))
    medians = {f"{name}_images_per_s": statistics.median(values) for name, values in found.items()}
    pairs = list(zip(found["resident"], found["ring"], found["augmented"], strict=True))
    medians["copy_cost"] = statistics.median(plain / ring - 1 for plain, ring, _ in pairs)
    medians["augment_cost"] = statistics.median(plain / augmented - 1 for plain, _, augmented in pairs)
    return medians | measure_stream(args, loop, device)


def measure_stream(args: Any, loop: Loop, device: torch.device) -> dict[str, Any]:
    from raypipe.commands.bench import ceiling

    config = TransformConfig(train=args.transform, size=args.size)
    with tempfile.TemporaryDirectory() as folder:
        store = args.store or make_store(Path(folder), max(1000, 2 * args.micro_batch))
        cpus = ceiling(raypipe.open_store(store), config, args.actors, args.seconds / 2)["images_per_s"]
        decoded = measure_decode(args, device, store)
        raypipe.connect()
        # What is in flight when the pool has started must not count: it was made ahead.
        warmup = 4 * args.actors + 4
        seen = loop.images_per_s(streamed(args, device, store), args.steps, warmup)
        dtype = torch.bfloat16 if loop.cuda else torch.float32
        bound = loop.images_per_s(resident(args, DeviceAugment(STANDARD, device, dtype), device), args.steps)
    return {
        "decode_images_per_s": decoded,
        "cpu_ceiling_images_per_s": cpus,
        "stream_images_per_s": seen,
        "stream_over_limit": seen / min(cpus, bound),
        "limit": "cpu" if cpus < bound else "device",
    }


def measure_decode(args: Any, device: torch.device, store: str) -> float:
    """Images/s that the device's decoder makes of a store's first micro-batch, with random crops."""
    opened, rows = raypipe.open_store(store), np.arange(args.micro_batch)
    images = opened.read(rows % len(opened), ("image",))["image"]
    keys = np.stack([rows, rows], 1).astype(np.uint64)
    transform = EncodedTransform("light", TransformConfig(size=args.size))
    batch = pack(transform.one(EncodedSample(data), key) for data, key in zip(images, keys, strict=True))
    decoder = DeviceDecoder(args.size, device)
    decoder.decode(**batch)
    started, count = time.perf_counter(), 10
    for _ in range(count):
        image = decoder.decode(**batch).image
    image.cpu()
    return count * args.micro_batch / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="", help="a raypipe store; empty = JPEGs made on the spot")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--micro-batch", type=int, default=256)
    parser.add_argument("--transform", default="light")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the CPU ceiling, about")
    parser.add_argument("--actors", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chip = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU ({platform.machine()})"
    found = measure(args, device)
    found |= {"device": chip, "torch": torch.__version__, "model": args.model, "micro_batch": args.micro_batch}
    table = Table(title=f"{args.model}, {args.size} px, micro-batch {args.micro_batch}, {chip}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
