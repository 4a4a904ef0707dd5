"""Class-balanced against uniform sampling on a long-tailed cut of a store of small images, by mean class accuracy.

    OMP_NUM_THREADS=1 python benchmarks/long_tail.py cifar10-train.parquet cifar10-test.parquet --epochs 5

Class c of C keeps n·I^(-c / (C - 1)) of its n samples, the first ones; I is the imbalance. Both trainings have the
same model, steps and seed, in this process. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import raypipe
from raypipe.stores import ParquetWriter
from raypipe.train.models import small_model


def long_tail(address: str, path: Path, imbalance: float) -> list[int]:
    """Write the cut to `path`; samples of each class."""
    store = raypipe.open_store(address)
    columns = store.read(np.arange(len(store)))
    by_class = [
        np.flatnonzero(columns["label"] == c)
        for c in range(int(columns["label"].max()) + 1)
    ]
    shares = imbalance ** (-np.arange(len(by_class)) / (len(by_class) - 1))
    sizes = [round(len(of) * share) for of, share in zip(by_class, shares, strict=True)]
    kept = [
        index for of, size in zip(by_class, sizes, strict=True) for index in of[:size]
    ]
    with ParquetWriter(path, classes=store.classes) as writer:
        for index in kept:
            writer.append(
                {
                    "image": columns["image"][index],
                    "label": int(columns["label"][index]),
                }
            )
    return sizes


def accuracies(
    train: Path, test: str, balance: float, options: argparse.Namespace
) -> list[float]:
    """Train, and the accuracy of each class of `test`."""
    crop = {"RandomResizedCrop": {"size": [32, 32], "scale": [0.6, 1.0]}}
    spec = raypipe.open_stream(
        train,
        test,
        plan=raypipe.PlanConfig(
            epochs=options.epochs,
            micro_batch_size=64,
            seed=options.seed,
            weights=balance,
            shuffle="global",  # the cut is in the order of its classes
            val_interval=options.epochs,
        ),
        transform=raypipe.TransformConfig(
            train=[crop, {"HorizontalFlip": {"p": 0.5}}], val="resize", size=32
        ),
        pool=raypipe.PoolConfig(engine="inline"),
    )
    loader = raypipe.loader(spec, augment=raypipe.AugmentConfig())
    num_classes = len(raypipe.open_store(train).classes or ()) or 10
    torch.manual_seed(options.seed)
    model = small_model(num_classes, options.width).to(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    steps = options.epochs * spec.plan.steps_per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.05, steps, pct_start=0.2
    )
    right = torch.zeros(num_classes)
    total = torch.zeros(num_classes)
    for epoch in loader.epochs():
        for batch in epoch.train:
            loss = cross_entropy(model(batch.image), batch.target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(
            f"weights {balance:g}, epoch {epoch.number}: loss {loss.item():.3f}",
            flush=True,
        )
        model.eval()
        for batch in epoch.val:
            with torch.no_grad():
                found = model(batch.image).argmax(1)
            right.index_add_(0, batch.target, (found == batch.target) * batch.weight)
            total.index_add_(0, batch.target, batch.weight)
        model.train()
    return (right / total).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--imbalance", type=float, default=100)
    parser.add_argument(
        "--width",
        type=int,
        default=16,
        help="of the model `small`, 32 in jobs/train.py",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--balance",
        type=float,
        nargs="+",
        default=[0, 1],
        help="values of plan.weights",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cut = Path(folder, "cut.parquet")
        result = {
            "sizes": long_tail(options.train, cut, options.imbalance),
            **vars(options),
        }
        for balance in options.balance:
            began = time.perf_counter()
            by_class = accuracies(cut, options.test, balance, options)
            result[f"weights {balance:g}"] = {
                "mean": round(float(np.mean(by_class)), 4),
                "by_class": [round(each, 3) for each in by_class],
                "seconds": round(time.perf_counter() - began),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
