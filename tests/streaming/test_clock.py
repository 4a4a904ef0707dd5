"""The clock of a run: a step of a validation is no step of the training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pictures import picture
from small_streams import spec_of
from without_ray import every_batch

import raypipe
from raypipe.config import AugmentConfig, PlanConfig
from raypipe.stores.memory import MemoryStore

SIZES = list(itertools.product((1, 4, 13), (1, 2), (1, 2)))
"""Samples of the validation, micro-batches in a step, epochs between two validations."""


def store(num: int) -> MemoryStore:
    return MemoryStore([picture(i, 4, 4) for i in range(num)], [0] * num)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_each_batch_has_the_strength_of_the_training_before_it(
    size: tuple[int, int, int], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_val, per_step, interval = size
    plan = PlanConfig(
        epochs=3,
        micro_batch_size=2,
        global_batch_size=2 * per_step,
        val_interval=interval,
    )
    spec = spec_of(store(7), store(num_val), plan=plan)
    steps = spec.plan.steps_per_epoch
    config = AugmentConfig(strength=(0.5, 1.0, 0.5))
    # the second begins with a validation, or the next epoch
    cursor = spec.plan.cursor_at(at * steps)
    loader = raypipe.loader(spec, augment=config, cursor=cursor)
    augment = loader.augment
    assert augment
    given = list[float]()
    of_batch = augment.of_batch

    def noting(batch: Any, strength: float, *more: Any) -> Any:
        given.append(strength)
        return of_batch(batch, strength, *more)

    monkeypatch.setattr(augment, "of_batch", noting)
    before = loader.cursor
    for number, _ in enumerate(every_batch(loader)):
        done = before.epoch * steps + before.step
        assert given[number] == config.strength_at(done / (3 * steps)), before
        before = loader.cursor
