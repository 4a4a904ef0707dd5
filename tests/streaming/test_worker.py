"""An actor: its counts, and its time limit with a clock of the test; test_guard.py has real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from raypipe.plan.places import MicroBatchId
from raypipe.streaming import worker

AT = MicroBatchId("train", 0, 0, 0)


def test_an_actor_counts_what_it_has_made_and_what_was_bad() -> None:
    counted: dict[str, float] = {}
    one: Any = worker.TransformWorker.__new__(worker.TransformWorker)
    one._metrics = SimpleNamespace(
        add=lambda amounts, split: counted.update(amounts, **{split: 1}),
        add_storage=lambda role: None,
    )
    made = SimpleNamespace(position=AT, num_remembered=0, read_s=0.5, work_s=2.0)
    known = SimpleNamespace(position=AT, num_remembered=1, read_s=0.0, work_s=0.25)
    bad = [SimpleNamespace(substitute=substitute) for substitute in (3, None, 0)]
    one._count([made, known, made], bad)
    assert counted == {
        "actor_micro_batches_total": 2,
        "actor_remembered_total": 1,
        "actor_read_seconds_total": 1.0,
        "actor_work_seconds_total": 4.25,
        "bad_samples_total": 3,
        "substituted_samples_total": 2,
        "train": 1,
    }
