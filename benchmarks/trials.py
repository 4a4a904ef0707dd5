"""Trials of a learning rate at one time: raypipe, which makes equal micro-batches once, without that, and torch.

    uv run --group dev benchmarks/trials.py imagenet-500.tar [--trials 4] [--epochs 20]

Each trial is a process of its own, a driver that joins one cluster on this machine, as four notebooks would. It
trains a linear model on the pixels with its own learning rate, and hashes every batch. Seconds are those from the
start of the first trial to the end of the last, the start of Ray not counted; CPU seconds are those of all
processes, and of the transform actors among them, with and without their starts; a start costs what each actor of
as many trials of one epoch takes, less the images of that epoch. Memory is the peak of private pages. All trials
of raypipe must have one hash. They have no head start, whose micro-batches are made by each trial's own process,
unless --head-start -1 asks for it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

WAYS = ("raypipe", "raypipe, not sharing", "torch DataLoader")
_LOOK_S = 0.5
_SIDE = 224
_BATCH = 50


def train(batches: Any, lr: float) -> dict[str, str]:
    """Train a linear model on batches of uint8 images (B, 3, H, W) and labels; return hashes of all."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(3 * 14 * 14, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    seen = hashlib.blake2b(digest_size=8)
    for images, labels in batches:
        rows = images[:, :, ::32, ::32].contiguous()
        seen.update(rows.numpy().data)
        small = torch.nn.functional.interpolate(rows.float() / 255, size=(14, 14))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(small.flatten(1)), labels)
        loss.backward()
        optimizer.step()
    weights = model.weight.detach().numpy().tobytes()
    return {
        "stream": seen.hexdigest(),
        "weights": hashlib.blake2b(weights, digest_size=8).hexdigest(),
    }


def by_raypipe(store: str, epochs: int, remember: str, head_start: int) -> Any:
    """Batches of a stream."""
    import torch

    import raypipe

    spec = raypipe.open_stream(
        store,
        plan=raypipe.PlanConfig(epochs=epochs, micro_batch_size=_BATCH, seed=1),
        transform=raypipe.TransformConfig(train="light", size=_SIDE),
        pool=raypipe.PoolConfig(
            max_actors=1,
            cpus_per_actor=0.5,
            remember=remember,
            head_start=head_start,
        ),
    )
    loader = raypipe.loader(spec)
    for epoch in loader.epochs():
        for batch in epoch.train:
            yield batch.image, torch.from_numpy(batch.target_host)
    times = loader.times("train")
    print(json.dumps({"remembered": times.remembered_fraction}), file=sys.stderr)
    loader.close()


class Files:
    """A dataset of torch over the same samples, with the same steps by Albumentations."""

    def __init__(self, store: str) -> None:
        import albumentations

        import raypipe

        self.store = raypipe.open_store(store)
        self.transform = albumentations.Compose(
            [
                albumentations.RandomResizedCrop((_SIDE, _SIDE)),
                albumentations.HorizontalFlip(p=0.5),
            ]
        )

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        import simplejpeg

        samples = self.store.read(np.array([index]))
        assert samples.images is not None
        image = samples.images[0]
        assert image is not None
        pixels = simplejpeg.decode_jpeg(bytes(image))
        label = samples.table["label"][0].as_py()
        made = self.transform(image=pixels)["image"]
        return np.ascontiguousarray(made.transpose(2, 0, 1)), label


def by_torch(store: str, epochs: int) -> Any:
    """Batches of a DataLoader with one worker."""
    import torch

    loader: Any = torch.utils.data.DataLoader(
        Files(store),  # type: ignore[arg-type]
        _BATCH,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        drop_last=True,
    )
    for _ in range(epochs):
        yield from loader


def run_trial(way: str, store: str, epochs: int, lr: float, head_start: int) -> None:
    """Run one trial in this process, and print its hashes."""
    if way == "torch DataLoader":
        batches = by_torch(store, epochs)
    else:
        remember = "memory" if way == "raypipe" else "off"
        batches = by_raypipe(store, epochs, remember, head_start)
    print(json.dumps(train(batches, lr)))


class Watch:
    """CPU seconds and memory of all processes below this one, while it runs."""

    def __init__(self) -> None:
        self._cpu_s: dict[tuple[int, float], float] = {}
        self._titles: dict[tuple[int, float], str] = {}
        self.peak_bytes = 0
        self._before: dict[tuple[int, float], float] = {}
        self._ended = threading.Event()
        self._look()
        self._before = dict(self._cpu_s)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self._thread.join()
        self._look()

    def cpu_s(self, title: str = "") -> float:
        """CPU seconds of the processes with a part of a title."""
        return sum(
            seconds - self._before.get(process, 0.0)
            for process, seconds in self._cpu_s.items()
            if title in self._titles[process]
        )

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        num_bytes = 0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                key = process.pid, process.create_time()
                times = process.cpu_times()
                self._cpu_s[key] = times.user + times.system
                title = " ".join(process.cmdline()[:1])
                if "MapWorker" in title or key not in self._titles:
                    self._titles[key] = title
                memory = process.memory_info()
                num_bytes += memory.rss - memory.shared
        self.peak_bytes = max(self.peak_bytes, num_bytes)


def measure(
    way: str, store: str, trials: int, epochs: int, head_start: int
) -> dict[str, Any]:
    """Run all trials of a way at once."""
    environment = dict(os.environ)
    if way != "torch DataLoader":
        import ray

        from raypipe.rayext.cluster import connect

        connect(num_cpus=4, object_store_bytes=4 << 30)
        environment = dict(os.environ)  # with the token of the cluster
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    watch = Watch()
    started = time.perf_counter()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, store, "--epochs", str(epochs)),
                *("--way", way, "--lr", str(0.01 * 2**number)),
                *("--head-start", str(head_start)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(trials)
    ]
    outputs = [process.communicate() for process in processes]
    seconds = time.perf_counter() - started
    watch.end()
    if "RAY_ADDRESS" in environment:
        ray.shutdown()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise SystemExit(errors)
    results = [
        json.loads(line)
        for output, _ in outputs
        for line in output.splitlines()
        if line.startswith('{"stream"')  # Ray writes there, too
    ]
    shares = [
        json.loads(line)["remembered"]
        for _, errors in outputs
        for line in errors.splitlines()
        if line.startswith('{"remembered"')
    ]
    return {
        "way": way,
        "trials": trials,
        "seconds": round(seconds, 1),
        "cpu_s": round(watch.cpu_s(), 1),
        "actors_cpu_s": round(watch.cpu_s("MapWorker"), 1),
        "load": round(os.getloadavg()[0]),
        "peak_gb": round(watch.peak_bytes / 1e9, 2),
        "remembered": [round(share, 2) for share in shares],
        "streams": sorted({result["stream"] for result in results}),
        "weights": [result["weights"] for result in results],
    }


def main() -> None:
    """Measure each way, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--way", choices=WAYS, help="run one trial in this process")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--head-start", type=int, default=0)
    args = parser.parse_args()
    store = str(Path(args.store).absolute())
    if args.way:
        run_trial(args.way, store, args.epochs, args.lr, args.head_start)
        return
    first_s = dict.fromkeys((1, args.trials), 0.0)
    if set(args.ways) & set(WAYS[:2]):
        for trials in first_s:
            first = measure(WAYS[1], store, trials, 1, 0)
            first_s[trials] = first["actors_cpu_s"]
    rows = []
    epoch_s = 0.0
    for trials in (1, *[args.trials] * args.repeats):
        for way in args.ways:
            row = measure(way, store, trials, args.epochs, args.head_start)
            rows.append(row)
            later_s = row["actors_cpu_s"] - first_s[trials]
            if not epoch_s:
                epoch_s = max(0.0, later_s) / max(1, args.epochs - 1)
            makes_s = later_s + trials * epoch_s
            row["actors_without_starts_s"] = round(max(0.0, makes_s), 1)
            print(row, flush=True)
    columns = {
        "seconds": "seconds",
        "cpu_s": "CPU s",
        "actors_cpu_s": "of actors",
        "actors_without_starts_s": "without starts",
        "peak_gb": "GB",
        "load": "load",
    }
    print(f"| way | trials | {' | '.join(columns.values())} |")
    print(f"| --- | ---: |{' ---: |' * len(columns)}")
    for row in rows:
        values = (row[name] for name in columns)
        print(f"| {row['way']} | {row['trials']} | {' | '.join(map(str, values))} |")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
