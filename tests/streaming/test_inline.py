"""The stream without Ray: the same bits, in this process."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import without_ray
from process_state import undisturbed
from torchvision.transforms import v2

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import TransformError
from raypipe.streaming.handover import loader
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.maker import MicroBatchMaker, try_samples
from raypipe.streaming.opening import open_stream
from raypipe.streaming.plain import plain_loaders
from raypipe.streaming.spec import StreamSpec

INLINE = PoolConfig(engine="inline")


@pytest.fixture(scope="module")
def spec(stores: dict[str, Path]) -> StreamSpec:
    plan = PlanConfig(epochs=2, micro_batch_size=6, global_batch_size=24)
    transform = TransformConfig(train="light", val="resize", size=12)
    return open_stream(
        stores["train"], stores["val"], plan=plan, transform=transform, pool=INLINE
    )


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_it_has_the_bits_of_a_cluster_from_any_step(
    spec: StreamSpec, threads: int
) -> None:
    threaded = replace(spec, pool=PoolConfig(engine="inline", max_actors=threads))
    for step in (0, 3):
        found = [
            batch_hash(batch)
            for batch in inline_batches(threaded, spec.plan.cursor_at(step))
        ]
        assert found == without_ray.digests(spec, step)
    before = threading.active_count()
    next(inline_batches(threaded, spec.plan.start()))
    assert threading.active_count() == before, "one that is left early ends its threads"


def test_a_transform_runs_in_the_thread_that_asks_where_a_debugger_stops(
    stores: dict[str, Path],
) -> None:
    seen = []

    def transform(image: np.ndarray) -> np.ndarray:
        seen.append(threading.current_thread())
        return image[:8, :8]

    spec = open_stream(
        stores["train"],
        plan=PlanConfig(epochs=1, micro_batch_size=4),
        train_transform=transform,
        pool=INLINE,
    )
    batch = next(next(loader(spec).epochs()).train)
    assert batch.image.shape == (4, 3, 8, 8) and seen == [threading.main_thread()] * 4


def noisy(image: np.ndarray) -> np.ndarray:
    """Draws from all generators of the process."""
    drawn = random.random() + np.random.random() + torch.rand(()).item()
    return (image[:8, :8] * (drawn / 3)).astype(np.uint8)


def drawn_column(columns: dict[str, Any]) -> dict[str, Any]:
    return {"drawn": random.random() + np.random.random() + torch.rand(()).item()}


PLAN = PlanConfig(epochs=2, micro_batch_size=6)
CROP = v2.RandomResizedCrop(8)
COLUMNS: dict[str, Any] = {"columns": ["label"], "make_columns": drawn_column}
DRAWING: dict[str, dict[str, Any]] = {
    "function": {"train_transform": noisy, "val_transform": noisy},
    "torchvision": {
        "train_transform": v2.Compose([CROP, v2.RandomHorizontalFlip()]),
        "val_transform": CROP,
    },
    "views": {"train_transform": {"a": (noisy, 2)}, "val_transform": {"a": (CROP, 2)}},
    "columns": {
        **COLUMNS,
        "transform": TransformConfig(train="light", val="resize", size=8),
    },
}


def drawing(stores: dict[str, Path], name: str, **pool: Any) -> StreamSpec:
    """A stream that draws from the generators of the process."""
    config = PoolConfig(engine="inline", **pool)
    return open_stream(
        stores["train"], stores["val"], plan=PLAN, pool=config, **DRAWING[name]
    )


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("name", [*DRAWING])
def test_a_process_draws_the_same_as_if_there_were_no_stream(
    stores: dict[str, Path], name: str, threads: int
) -> None:
    with undisturbed():
        train, val = plain_loaders(
            loader(drawing(stores, name, max_actors=threads)), "batch"
        )
        for _ in range(PLAN.epochs):
            assert [*train] and [*val]


def test_the_driver_that_tries_samples_is_left_as_it_was(
    stores: dict[str, Path],
) -> None:
    with undisturbed():
        spec = drawing(stores, "function")
        try_samples(spec, 5)


def test_opencv_has_one_thread_where_micro_batches_are_made(
    stores: dict[str, Path],
) -> None:
    def counted(image: np.ndarray) -> np.ndarray:
        return np.full((4, 4, 3), cv2.getNumThreads(), np.uint8)

    with undisturbed():
        spec = open_stream(
            stores["train"], plan=PLAN, train_transform=counted, pool=INLINE
        )
        assert (next(inline_batches(spec, spec.plan.start()))["image"] == 1).all()


def test_a_stream_that_is_left_early_leaves_nothing_of_itself(
    stores: dict[str, Path],
) -> None:
    for threads in (0, 2):
        with undisturbed():
            spec = open_stream(
                stores["train"],
                transform=TransformConfig(train="heavy", size=8),
                plan=PLAN,
                pool=PoolConfig(engine="inline", max_actors=threads),
            )
            batches = inline_batches(spec, spec.plan.start())
            next(batches)
            batches.close()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("cuda_or_pretended")
def test_draws_from_shared_generators_are_made_by_the_asking_thread(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring, a decoder and pool.max_actors have threads: beside one of them the main thread may draw."""
    made_in, make = set(), MicroBatchMaker.make

    def seen(*args: Any, **named: Any) -> Any:
        made_in.add(threading.current_thread())
        return make(*args, **named)

    monkeypatch.setattr(MicroBatchMaker, "make", seen)
    for name, threads in itertools.product(DRAWING, (0, 1, 2)):
        spec = drawing(stores, name, max_actors=threads)
        batches = [
            *without_ray.every_batch(
                loader(spec, device="cpu" if name == "decoded" else "cuda")
            )
        ]
        assert len(batches) == len([*spec.plan.micro_batches(spec.plan.start())])
        assert made_in == {threading.main_thread()}, name


@pytest.mark.usefixtures("cuda_or_pretended")
def test_pixels_are_the_same_on_a_device_while_the_main_thread_draws(
    stores: dict[str, Path],
) -> None:
    spec = drawing(stores, "function")
    expected = [batch["image"] for batch in inline_batches(spec, spec.plan.start())]
    for number, batch in enumerate(
        without_ray.every_batch(loader(spec, device="cuda"))
    ):
        for _ in range(50):
            noisy(np.zeros((8, 8, 3), np.uint8))
        assert np.array_equal(
            batch.image.cpu().permute(0, 2, 3, 1).numpy(), expected[number]
        ), number
    assert number == len(expected) - 1


@pytest.mark.parametrize("threads", [0, 2])
def test_what_a_transform_raises_names_the_sample(
    stores: dict[str, Path], threads: int
) -> None:
    def broken(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        raise ValueError("no")

    spec = open_stream(
        stores["train"],
        train_transform=broken,
        transform=TransformConfig(max_bad_fraction=0),
        pool=PoolConfig(engine="inline", max_actors=threads),
    )
    where = r"the transform failed at .*test_inline\.py:\d+ in broken: ValueError: no"
    with pytest.raises(
        TransformError,
        match=rf"train\.lmdb.* sample \d+ .*: {where} .*pool\.engine=inline",
    ):
        list(inline_batches(spec, spec.plan.start()))


def test_no_cluster_starts_and_neither_ray_data_nor_train_is_imported(
    stores: dict[str, Path],
) -> None:
    program = f"""
import sys, raypipe
spec = raypipe.open_stream({str(stores["train"])!r}, pool=raypipe.PoolConfig(engine="inline"))
for epoch in raypipe.loader(spec).epochs():
    for batch in epoch.train:
        assert batch.image.shape == (64, 3, 224, 224)
        import ray
        assert not ray.is_initialized() and not {{"ray.data", "ray.train"}} & set(sys.modules)
        sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 7
