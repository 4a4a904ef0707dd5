"""The stream without Ray: the same bits, in this process."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import without_ray
from process_state import undisturbed
from small_streams import spec_of
from torchvision.transforms import v2

from raypipe.config import PlanConfig, PoolConfig
from raypipe.streaming.handover import loader
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.plain import plain_loaders
from raypipe.streaming.spec import StreamSpec

Stores = dict[str, Path]


@pytest.fixture(scope="module")
def spec(stores: Stores) -> StreamSpec:
    plan = PlanConfig(epochs=2, micro_batch_size=6, global_batch_size=24)
    return spec_of(stores["train"], stores["val"], plan=plan)


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
    stores: Stores,
) -> None:
    seen = []

    def transform(image: np.ndarray) -> np.ndarray:
        seen.append(threading.current_thread())
        return image[:8, :8]

    spec = spec_of(stores["train"], plan=PLAN, train_transform=transform)
    batch = next(next(loader(spec).epochs()).train)
    assert batch.image.shape == (6, 3, 8, 8)
    assert seen == [threading.main_thread()] * 6


def noisy(image: np.ndarray) -> np.ndarray:
    """Draws from all generators of the process."""
    drawn = random.random() + np.random.random() + torch.rand(()).item()
    return (image[:8, :8] * (drawn / 3)).astype(np.uint8)


def drawn_column(columns: dict[str, Any]) -> dict[str, Any]:
    return {"drawn": random.random() + np.random.random() + torch.rand(()).item()}


PLAN = PlanConfig(epochs=2, micro_batch_size=6)
CROP = v2.RandomResizedCrop(8)
DRAWING: dict[str, dict[str, Any]] = {
    "function": {"train_transform": noisy, "val_transform": noisy},
    "torchvision": {
        "train_transform": v2.Compose([CROP, v2.RandomHorizontalFlip()]),
        "val_transform": CROP,
    },
    "views": {"train_transform": {"a": (noisy, 2)}, "val_transform": {"a": (CROP, 2)}},
    "columns": {"columns": ["label"], "make_columns": drawn_column},
}


def drawing(stores: Stores, name: str, **pool: Any) -> StreamSpec:
    """A stream that draws from the generators of the process."""
    options = {"plan": PLAN, "pool": PoolConfig(engine="inline", **pool)}
    return spec_of(stores["train"], stores["val"], **options, **DRAWING[name])


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("name", [*DRAWING])
def test_a_process_draws_the_same_as_if_there_were_no_stream(
    stores: Stores, name: str, threads: int
) -> None:
    with undisturbed():
        train, val = plain_loaders(
            loader(drawing(stores, name, max_actors=threads)), "batch"
        )
        for _ in range(PLAN.epochs):
            assert [*train] and [*val]


@pytest.mark.usefixtures("cuda_or_pretended")
def test_pixels_are_the_same_on_a_device_while_the_main_thread_draws(
    stores: Stores,
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


def test_no_cluster_starts_and_neither_ray_data_nor_train_is_imported(
    stores: Stores,
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
