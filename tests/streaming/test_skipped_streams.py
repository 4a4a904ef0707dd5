"""Streams without some steps: all other batches, from any resume, for any ranks."""

from __future__ import annotations

from typing import Any

import pytest
import small_streams
import without_ray

import raypipe
from raypipe.config import PlanConfig
from raypipe.device.prefetcher import Batch
from raypipe.plan.places import MicroBatchId
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.plain import plain_loaders
from raypipe.streaming.spec import StreamSpec

from pictures import picture  # isort: skip

SKIP = ["3..4", "6..7", 12]
"""Of 12 steps in 3 epochs: the ends of two, and the middle of one."""


def spec_of(skip: list[Any] = SKIP, val_interval: int = 1) -> StreamSpec:
    train, val = (
        MemoryStore([picture(first + number, 8, 8) for number in range(num)], [0] * num)
        for first, num in ((0, 35), (50, 6))
    )
    plan = PlanConfig(
        epochs=3,
        micro_batch_size=4,
        global_batch_size=8,
        seed=2,
        skip=skip,
        val_interval=val_interval,
    )
    return small_streams.spec_of(train, val, plan=plan)


def is_left_out(at: MicroBatchId) -> bool:
    step = at.epoch * 4 + at.step + 1
    return at.split == "train" and step in (3, 4, 6, 7, 12)


def taken(loader: Any) -> list[tuple[MicroBatchId, bytes]]:
    return [described(batch) for batch in without_ray.every_batch(loader)]


def described(batch: Batch) -> tuple[MicroBatchId, bytes]:
    return batch.position, batch.image.numpy().tobytes()


@pytest.mark.parametrize("val_interval", [0, 1])
def test_all_other_batches_are_the_same_bit_for_bit(val_interval: int) -> None:
    with raypipe.loader(spec_of([], val_interval)) as loader:
        whole = taken(loader)
    spec = spec_of(val_interval=val_interval)
    with raypipe.loader(spec) as loader:
        epochs = []
        found = []
        for epoch in loader.epochs():
            epochs.append((len(epoch.train), len(epoch.val)))
            found += [described(batch) for batch in (*epoch.train, *epoch.val)]
        assert loader.global_step == 12
    assert found == [each for each in whole if not is_left_out(each[0])]
    num_val = 2 * val_interval
    assert epochs == [(4, num_val), (4, num_val), (6, num_val)]
    assert len(found) == spec.plan.num_micro_batches(spec.plan.start())


def test_plain_loaders_have_the_length_of_their_epoch() -> None:
    with raypipe.loader(spec_of()) as loader:
        train, _ = plain_loaders(loader)
        lengths = []
        for _ in range(3):
            before = len(train)
            batches = iter(train)
            next(batches)
            lengths.append((before, len(train), 1 + len(list(batches))))
    assert lengths == [(4, 4, 4), (4, 4, 4), (6, 6, 6)]
