"""What the device side costs, on one GPU: all figures by one command.

    python benchmarks/gpu.py                      # JPEGs made on the spot
    python benchmarks/gpu.py --store imagenet.lmdb
    python benchmarks/gpu.py --device cpu --quick # to try it out, in a minute or two, without a GPU

    resident        the training loop fed from one tensor that stays on the device: the ceiling of the device
    ring            the same, fed from host memory through the pinned ring: is the copy hidden?
    augmented       resident, with the `standard` augmentation, MixUp and CutMix
    stream          the training loop fed by the whole pipe, against resident and against what the CPUs can decode
    small_…         resident and streams with --small-model, which takes more than the CPUs can decode
    host_ms         of a micro-batch: what the calls take of the training thread, which never waits for the device,
                    for each preset without mixing, and for StepBatchNorm at one micro-batch to a step
    launches        kernels, copies and fills that they give to the device
    beside          rate of a loop of small torch operations while the same process consumes the stream, a
                    micro-batch every --pace-ms, over its rate alone. The stream is executed outside of the process
                    (by Ray), and for beside_inline in it (`pool.engine: inline`)
    stream_inline   the stream made in this process, with as many threads
    each            where there are several GPUs: `resident`, and `ring`, by a process for each of them at once

Ratios are of one run, medians over --repeats; the variants take turns, since clocks drift. The last line is one
JSON object. Each figure is of the chip that `device` names.
"""

from __future__ import annotations

import argparse
import contextlib
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
from raypipe.device.augment import PRESETS, DeviceAugment
from raypipe.device.mixing import Mix, mixed_cross_entropy
from raypipe.device.prefetcher import on_device
from raypipe.plan.places import MicroBatchId
from raypipe.train.models import build_model, build_optimizer
from raypipe.train.ordered import StepBatchNorm
from raypipe.transform.fields import MicroBatch

STANDARD = AugmentConfig(preset="standard", mixup_alpha=0.2, cutmix_alpha=1.0)
Fed = tuple[torch.Tensor, torch.Tensor, Mix | None]


class Loop:
    """A training step of a torchvision model: bf16 and channels_last on CUDA."""

    def __init__(self, model: str, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        torch.manual_seed(0)
        self.model = (
            build_model(model, 1000).to(device).to(memory_format=torch.channels_last)
        )
        self.optimizer = build_optimizer(
            self.model, TrainConfig(lr=0.1), fused=self.cuda
        )
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    def step(
        self, image: torch.Tensor, target: torch.Tensor, mixed: Mix | None
    ) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
            logits = self.model(image)
        mixed_cross_entropy(logits.float(), target, mixed, 0.1).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def images_per_s(
        self, batches: Iterable[Fed], steps: int, warmup: int = 3
    ) -> float:
        """Throughput over `steps` steps after `warmup`."""
        images = 0
        started = 0.0
        for number, (image, target, mixed) in enumerate(
            itertools.islice(batches, warmup + steps)
        ):
            if number == warmup:
                self.wait()
                started = time.perf_counter()
            self.step(image, target, mixed)
            images += len(image) * (number >= warmup)
        self.wait()
        return images / (time.perf_counter() - started)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def host_batches(size: int, micro_batch: int, count: int) -> Iterator[MicroBatch]:
    """Four micro-batches of noise in pageable memory, in turns."""
    rng = np.random.default_rng(0)
    shape = (micro_batch, size, size, 3)
    images = [rng.integers(0, 256, shape, np.uint8) for _ in range(4)]
    label = rng.integers(0, 1000, micro_batch)
    weight = np.ones(micro_batch, np.float32)
    index = np.arange(micro_batch)
    for number in range(count):
        fields: Any = {"image": images[number % 4], "label": label}
        yield MicroBatch(MicroBatchId("train", 0, number, 0), index, weight, fields)


def resident(args: Any, augment: DeviceAugment, device: torch.device) -> Iterator[Fed]:
    batch = next(iter(host_batches(args.size, args.micro_batch_size, 1)))
    image = torch.from_numpy(batch["image"]).to(device).permute(0, 3, 1, 2)
    target = torch.from_numpy(batch["label"]).to(device)
    counts = np.ones(args.micro_batch_size, bool)
    for seed in itertools.count():
        augmented, mixed = augment(image, target, counts, seed=seed)
        yield augmented, target, mixed


def through_ring(
    args: Any, augment: DeviceAugment, device: torch.device
) -> Iterator[Fed]:
    source = host_batches(args.size, args.micro_batch_size, args.steps + 3)
    for batch in on_device(source, device, lambda at: at.step):
        yield augment.normalize(batch.image), batch.target, None


def pool_of(args: Any, engine: Any = "ray") -> raypipe.PoolConfig:
    """As many actors, or threads of this process."""
    return raypipe.PoolConfig(
        engine=engine, min_actors=args.actors, max_actors=args.actors
    )


def streamed(
    args: Any,
    device: torch.device,
    store: str,
    engine: Any = "ray",
) -> Iterator[Fed]:
    spec = raypipe.open_stream(
        store,
        plan=raypipe.PlanConfig(epochs=10_000, micro_batch_size=args.micro_batch_size),
        transform=TransformConfig(train=args.transform, size=args.size),
        pool=pool_of(args, engine),
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loader = raypipe.loader(
        spec, max_actors=args.actors, device=device, augment=STANDARD, dtype=dtype
    )
    with contextlib.closing(loader):  # the next one needs its CPUs
        for epoch in loader.epochs():
            for batch in epoch.train:
                yield batch.image, batch.target, batch.mix


def make_store(folder: Path, count: int) -> str:
    """An LMDB of smooth random photographs of about ImageNet's size, 400 x 350."""
    import cv2

    from raypipe.stores.destination import write_atomically

    def picture(index: int) -> bytes:
        coarse = np.random.default_rng(index).integers(0, 256, (24, 28, 3), np.uint8)
        return cv2.imencode(
            ".jpg", cv2.resize(coarse, (400, 350), interpolation=cv2.INTER_CUBIC)
        )[1].tobytes()

    path = folder / "made.lmdb"
    samples = ({"image": picture(i), "label": i % 1000} for i in range(count))
    write_atomically(str(path), samples, tuple(map(str, range(1000))))
    return str(path)


def measure(args: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Figures by name, each part as soon as it is there."""
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
    medians: dict[str, Any] = {
        f"{name}_images_per_s": statistics.median(values)
        for name, values in found.items()
    }
    pairs = list(zip(found["resident"], found["ring"], found["augmented"], strict=True))
    medians["copy_cost"] = statistics.median(
        plain / ring - 1 for plain, ring, _ in pairs
    )
    medians["augment_cost"] = statistics.median(
        plain / augmented - 1 for plain, _, augmented in pairs
    )
    yield medians
    yield measure_host(args, loop, device)
    yield from measure_streams(args, loop, device)


def measure_streams(
    args: Any, loop: Loop, device: torch.device
) -> Iterator[dict[str, Any]]:
    from raypipe.commands.bench import ceiling

    config = TransformConfig(train=args.transform, size=args.size)
    dtype = torch.bfloat16 if loop.cuda else torch.float32
    # What is in flight when the pool has started must not count: it was made ahead.
    warmup = 4 * args.actors + 4
    with tempfile.TemporaryDirectory() as folder:
        store = args.store or make_store(
            Path(folder), max(1000, 2 * args.micro_batch_size)
        )
        opened = raypipe.open_store(store)
        alone = pool_of(args)
        cpus = ceiling(opened, config, alone, args.micro_batch_size, args.seconds / 2)[
            "images_per_s"
        ]
        yield {"cpu_ceiling_images_per_s": cpus}
        raypipe.connect()
        for prefix, each in (("", loop), ("small_", Loop(args.small_model, device))):
            seen = each.images_per_s(streamed(args, device, store), args.steps, warmup)
            augment = DeviceAugment(STANDARD, device, dtype)
            bound = each.images_per_s(
                resident(args, augment, device), args.steps, warmup=10
            )
            yield {
                f"{prefix}bound_images_per_s": bound,
                f"{prefix}stream_images_per_s": seen,
                f"{prefix}stream_over_limit": seen / min(cpus, bound),
                f"{prefix}limit": "cpu" if cpus < bound else "device",
            }
        inline = loop.images_per_s(
            streamed(args, device, store, engine="inline"), args.steps, warmup
        )
        yield {"stream_inline_images_per_s": inline}
        beside = {
            engine: measure_beside(args, device, store, engine)
            for engine in ("ray", "inline")
        }
        yield {"beside": beside["ray"], "beside_inline": beside["inline"]}


def measure_each(args: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """A process for each GPU, all at once, as ranks of one host are."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count < 2:
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure_one, (args, folder), nprocs=count)
        found = [
            json.loads(Path(folder, str(number)).read_text()) for number in range(count)
        ]
    yield {
        f"each_{name}_images_per_s": [each[name] for each in found]
        for name in ("resident", "ring")
    }


def measure_one(number: int, args: Any, folder: str) -> None:
    """Runs in a process of its own, on the GPU of that number."""
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    loop = Loop(args.model, device)
    plain = DeviceAugment(AugmentConfig(), device, torch.bfloat16)
    feeds = {
        "resident": resident(args, plain, device),
        "ring": through_ring(args, plain, device),
    }
    found = {
        name: loop.images_per_s(batches, args.steps) for name, batches in feeds.items()
    }
    Path(folder, str(number)).write_text(json.dumps(found))


def measure_host(args: Any, loop: Loop, device: torch.device) -> dict[str, Any]:
    """Host milliseconds and launches of each preset, and of StepBatchNorm."""
    batch = next(iter(host_batches(args.size, args.micro_batch_size, 1)))
    image = torch.from_numpy(batch["image"]).to(device).permute(0, 3, 1, 2)
    target = torch.from_numpy(batch["label"]).to(device)
    counts = np.ones(args.micro_batch_size, bool)
    dtype = torch.bfloat16 if loop.cuda else torch.float32
    seeds = itertools.count()
    model = build_model(args.model, 1000).to(device)
    batch_norm = StepBatchNorm(model, 1, 1)

    def norm() -> None:
        batch_norm.begin()
        batch_norm.take()
        batch_norm.end()

    def augmented(preset: str) -> Callable[[], Any]:
        augment = DeviceAugment(AugmentConfig(preset=preset), device, dtype)  # type: ignore[arg-type]
        return lambda: augment(image, target, counts, seed=next(seeds))

    parts: dict[str, Callable[[], Any]] = {
        f"preset_{name}": augmented(name) for name in PRESETS
    }
    found: dict[str, Any] = {}
    for name, part in (parts | {"step_batch_norm": norm}).items():
        took = []
        for number in range(4 + 20):
            loop.wait()  # so that no full queue of launches holds the host up
            started = time.perf_counter()
            part()
            took += [time.perf_counter() - started] if number >= 4 else []
        found[f"{name}_host_ms"] = 1000 * statistics.median(took)
        found[f"{name}_launches"] = launches(part, loop) if loop.cuda else 0
    return found


def launches(part: Callable[[], Any], loop: Loop, calls: int = 8) -> float:
    """What a call gives to the device, on average: random branches differ."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(calls):
            part()
        loop.wait()
    return (
        sum(
            event.device_type == torch.autograd.DeviceType.CUDA
            for event in seen.events()
        )
        / calls
    )


def measure_beside(args: Any, device: torch.device, store: str, engine: str) -> float:
    """Of a loop of small operations, whose rate is the host's: its share beside a stream."""
    small = torch.zeros(8, device=device)

    def operations(seconds: float) -> float:
        small.sum().item()  # what was given to the device before is done
        started = time.perf_counter()
        count = 0
        while (passed := time.perf_counter() - started) < seconds:
            for _ in range(100):
                small.add_(1)
            count += 100
        return count / passed

    batches = streamed(args, device, store, engine=engine)
    operations(0.5)
    alone = [operations(args.pace_ms / 1000) for _ in range(40)]
    for _ in range(4 * args.actors + 4):
        next(batches)
    beside = []
    for _ in range(40):
        next(batches)
        beside.append(operations(args.pace_ms / 1000))
    batches.close()  # type: ignore[attr-defined]
    return statistics.mean(beside) / statistics.mean(alone)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--store", default="", help="a raypipe store; empty = JPEGs made on the spot"
    )
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--small-model", default="resnet18")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--micro-batch-size", type=int, default=256)
    parser.add_argument("--transform", default="light")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of the CPU ceiling, about"
    )
    parser.add_argument(
        "--pace-ms",
        type=float,
        default=60.0,
        help="as resnet50 takes for 256 images on an H100",
    )
    parser.add_argument(
        "--device",
        default="",
        help="cuda, cuda:1 or cpu; empty = a GPU, if there is one",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny, to see whether all of it runs"
    )
    parser.add_argument(
        "--actors", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1)
    )
    args = parser.parse_args()
    if args.quick:
        args.model = args.small_model = "small"
        args.size = 32
        args.micro_batch_size = 8
        args.steps = 4
        args.repeats = 1
        args.seconds = 1.0
        args.pace_ms = 5.0
        args.actors = 1
    device = torch.device(
        args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    if device.type == "cuda":
        chip = torch.cuda.get_device_name(device)
    else:
        chip = f"CPU ({platform.machine()})"
    found: dict[str, Any] = {"device": chip, "torch": torch.__version__}
    found |= {
        "model": args.model,
        "small_model": args.small_model,
        "micro_batch": args.micro_batch_size,
    }
    for part in itertools.chain(measure(args, device), measure_each(args, device)):
        print(part, flush=True)
        found |= part
    table = Table(
        title=f"{args.model}, {args.size} px, micro-batch {args.micro_batch_size}, {chip}"
    )
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in found.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
