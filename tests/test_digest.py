from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raypipe.digest import batch_digest, combine
from raypipe.plan import PADDING, Cursor, MicroBatchId, Plan, PlanConfig, Split
from raypipe.prefetch import HostBatch
from raypipe.source import PLACE_SCHEMA, MicroBatchSource, place_of, read_samples
from raypipe.stores.base import Store
from raypipe.stores.memory import MemoryStore

BATCH = HostBatch(
    at=MicroBatchId("train", 0, 1, 2),
    image=np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3),
    label=np.array([3, 4]),
    weight=np.ones(2, np.float32),
    index=np.array([7, 8]),
    num_bad=0,
)


def flipped(array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    changed.flat[-1] += 1
    return changed


# The digest


def test_golden_digests() -> None:
    assert batch_digest(BATCH).hex() == "8a1e5b905f132e445f95f9e3c819ba10"
    assert combine([b"a" * 16, b"b" * 16]) == "3106330ede3673ae78e9b017358c794a"


@pytest.mark.parametrize("name", ["image", "label", "weight", "index"])
def test_one_changed_value_changes_the_digest(name: str) -> None:
    changed = replace(BATCH, **{name: flipped(getattr(BATCH, name))})
    assert batch_digest(changed) != batch_digest(BATCH)


def test_the_place_and_the_shape_are_part_of_the_digest() -> None:
    assert batch_digest(replace(BATCH, at=MicroBatchId("val", 0, 1, 2))) != batch_digest(BATCH)
    assert batch_digest(replace(BATCH, image=BATCH.image.reshape(2, 1, 4, 3))) != batch_digest(BATCH)


def test_read_only_memory_gives_the_same_digest() -> None:
    frozen = BATCH.image.copy()
    frozen.flags.writeable = False
    assert batch_digest(replace(BATCH, image=frozen)) == batch_digest(BATCH)


def test_combine_is_of_the_order() -> None:
    assert combine([b"a", b"b"]) != combine([b"b", b"a"])
    assert combine(iter([b"a", b"b"])) == combine([b"a", b"b"])


# What the digest is taken over: the rows of the source, without Ray


def store(size: int) -> MemoryStore:
    return MemoryStore([bytes([i]) * 3 for i in range(size)], np.arange(size) * 10)


def rows(plan: Plan, cursor: Cursor, readers: dict[Split, Store]) -> list[dict[str, Any]]:
    [task] = MicroBatchSource(plan, cursor, readers).get_read_tasks(1)
    tables = list(task())
    assert all(table.schema == PLACE_SCHEMA and table.num_rows == 1 for table in tables)
    assert task.metadata.num_rows == len(tables)
    return [row for table in tables for row in table.to_pylist()]


def test_the_source_yields_one_row_per_micro_batch_of_the_plan() -> None:
    train, val = store(9), store(3)
    plan = Plan.of(PlanConfig(epochs=2, micro_batch=2, per_step=2), train, val)
    found = rows(plan, plan.start(), {"train": train, "val": val})
    assert [place_of(row) for row in found] == list(plan.micro_batches(plan.start()))
    for row in found:
        indices = plan.indices(place_of(row)).tolist()
        assert row["encoded"] == [None if i == PADDING else bytes([i]) * 3 for i in indices]
        assert row["label"] == [0 if i == PADDING else i * 10 for i in indices]


def test_the_source_after_a_resume_yields_the_same_tail() -> None:
    train = store(9)
    plan = Plan.of(PlanConfig(epochs=2, micro_batch=2, per_step=2), train)
    unbroken = rows(plan, plan.start(), {"train": train})
    for step in range(4):
        assert rows(plan, plan.cursor_at(step), {"train": train}) == unbroken[2 * step :]


def test_what_the_actors_read_themselves_travels_as_its_place_alone() -> None:
    train, val = store(4), store(3)
    plan = Plan.of(PlanConfig(epochs=1, micro_batch=2), train, val)
    found = rows(plan, plan.start(), {"val": val})
    assert [row["encoded"] is None for row in found] == [True, True, False, False]
    assert [row["label"] is None for row in found] == [True, True, False, False]


def test_read_samples_of_nothing_but_padding() -> None:
    images, labels = read_samples(store(4), np.full(3, PADDING))
    assert images == [None] * 3
    assert labels.tolist() == [0] * 3 and labels.dtype == np.int64
