"""The clock of a run through all schedules of a few sizes: a step of a validation is no step of the training."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from pictures import picture
from tiers import all_but_one_in_system
from without_ray import every_batch

import raypipe
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig
from raypipe.plan.places import Cursor
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.loader import Loader

SIZES = list(itertools.product((4, 7), (1, 4, 13), (1, 3), (1, 2), (1, 2)))
"""Samples, those of the validation, epochs, micro-batches in a step, epochs between two validations."""
RAMPS: tuple[Any, ...] = (1.0, (0.5, 1.0, 0.5), (0.0, 0.8, 1.0), (1.0, 0.7, 0.0))


def same(image: np.ndarray) -> np.ndarray:
    return image


def store(num: int) -> MemoryStore:
    return MemoryStore(
        [picture(i, 4, 4) for i in range(num)], [0] * num, classes=("a",)
    )


def loader_of(size: tuple[int, ...], strength: Any, at: int = 0) -> Loader:
    train, val, epochs, per_step, interval = size
    plan = PlanConfig(
        epochs=epochs,
        micro_batch_size=2,
        global_batch_size=2 * per_step,
        val_interval=interval,
        seed=3,
    )
    spec = raypipe.open_stream(
        store(train),
        store(val),
        plan=plan,
        train_transform=same,
        val_transform=same,
        pool=PoolConfig(engine="inline"),
    )
    return raypipe.loader(
        spec, augment=AugmentConfig(strength=strength), cursor=spec.plan.cursor_at(at)
    )


def strengths_of(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, Cursor, float]]:
    """Each batch's split, the place before it, and the strength that its augmentation was given."""
    given, made = list[float](), loader.augment
    assert made
    of_batch = made.of_batch

    def noting(batch: Any, strength: float) -> Any:
        given.append(strength)
        return of_batch(batch, strength)

    monkeypatch.setattr(made, "of_batch", noting)
    rows = []
    before = loader.cursor
    for batch in every_batch(loader):
        rows.append((batch.position.split, before, given[-1]))
        before = loader.cursor
    assert len(rows) == len(given)
    return rows


@pytest.mark.parametrize("strength", all_but_one_in_system(RAMPS), ids=str)
def test_each_batch_has_the_strength_of_the_training_before_it(
    strength: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AugmentConfig(strength=strength)
    for size in SIZES:
        steps = size[0] // (2 * size[3])
        for at in (0, steps):  # the second begins with a validation, or the next epoch
            for split, before, given in strengths_of(
                loader_of(size, strength, at), monkeypatch
            ):
                done = before.epoch * steps + before.step
                assert given == config.strength_at(done / (size[2] * steps)), (
                    size,
                    split,
                    before,
                )
