from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from raypipe.config import PlanConfig, TransformConfig
from raypipe.plan.schedule import MicroBatchId
from raypipe.stores.base import Columns, MemoryStore
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.worker import TransformWorker
from raypipe.transform.micro_batch import Attempt

from conftest import CLASSES, picture  # isort: skip


class Noted(MemoryStore):
    """A store that notes what is read of it, and where one sample must not be."""

    deadly = -1

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        assert self.deadly not in indices, "it is dead now"
        self.notes += [("read", index) for index in indices.tolist()]
        return super().read(indices, columns)


class Careful:
    """A guard whose every attempt is as after the deaths of a sample."""

    def __init__(self, bad: int, touch: Any) -> None:
        self._attempt = Attempt({bad: "its process died twice while at it"}, touch)

    @contextlib.contextmanager
    def micro_batch(self, at: MicroBatchId) -> Iterator[Attempt]:
        yield self._attempt


def noted() -> Noted:
    store = Noted([picture(number) for number in range(16)], [number % 5 for number in range(16)], CLASSES)
    store.notes = []
    return store


def rows(store: Noted, micro_batch: int, guard: Any = None) -> list[dict[str, np.ndarray]]:
    plan = PlanConfig(epochs=1, micro_batch=micro_batch)
    worker = TransformWorker(
        StreamSpec.of(store, store, plan=plan, transform=TransformConfig(train="small", size=16, val="center"))
    )
    worker._guard = guard
    found = [worker.run(at) for at in worker._plan.micro_batches(worker._plan.start())]
    return [{name: row[name] for name in row if not name.endswith("_s")} for row in found]


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_in_a_careful_attempt_each_sample_is_announced_then_read_and_a_bad_one_never(micro_batch: int) -> None:
    damaged = noted()
    damaged._columns["image"][0] = b"damaged"
    expected = rows(damaged, micro_batch)
    store = noted()
    store.deadly = 0  # the first of a validation, and of those that tell the size of padding
    found = rows(store, micro_batch, Careful(0, lambda index: store.notes.append(("announced", index))))
    for row, same in zip(found, expected, strict=True):
        assert all(np.array_equal(row[name], same[name]) for name in row)
    reads = [number for number, (what, _) in enumerate(store.notes) if what == "read"]
    assert len(reads) >= 30 and all(store.notes[n - 1] == ("announced", store.notes[n][1]) for n in reads)


def test_a_sample_that_is_known_to_be_bad_is_not_read_with_its_micro_batch_either() -> None:
    store = noted()
    store.deadly = 5
    found = rows(store, 4, Careful(5, None))
    assert sum(int(row["num_bad"][0]) for row in found) == 2
