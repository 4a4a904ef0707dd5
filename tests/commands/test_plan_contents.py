from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raypipe.commands import plan_contents
from raypipe.commands.plan_contents import contents_of
from raypipe.config import PlanConfig
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.stores.base import MemoryStore, Store
from raypipe.stores.joined import JoinedStore
from raypipe.streaming.planning import make_plan

LABELS = [0] * 40 + [1] * 15 + [2] * 5
LONG_TAIL = MemoryStore([b"x"] * 60, LABELS, columns={"weight": [1.0, 3.0] * 30})


def plan_of(store: Store, exclude: Any = (), **config: Any) -> Plan:
    selections = [Selection(exclude, len(store))] if exclude else None
    return make_plan(PlanConfig(epochs=3, micro_batch_size=4, **config), store, selections=selections)


def test_of_a_plain_plan_each_sample_is_drawn_once_but_for_those_that_make_no_step() -> None:
    found = contents_of(plan_of(LONG_TAIL, [3, 50], shuffle="global"), [0])
    assert found.times is not None and np.bincount(found.times).tolist() == [2, 56]
    assert not found.sources and not found.classes


def test_the_classes_of_a_balanced_plan_are_drawn_alike() -> None:
    found = contents_of(plan_of(LONG_TAIL, class_balance=1.0), [0], np.array(LABELS))
    assert {label: stored for label, (stored, _) in found.classes.items()} == {0: 40 / 60, 1: 0.25, 2: 5 / 60}
    assert {drawn for _, drawn in found.classes.values()} == {1 / 3}
    assert found.times is not None and found.times.sum() == 60


@pytest.mark.parametrize(
    "config", [{"weights": "weight"}, {"class_balance": 0.5, "repeats": 2, "repeats_in": "micro_batch"}]
)
def test_what_is_not_counted_draw_by_draw_is_told_of_a_pass(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(LONG_TAIL, [0], **config)
    counted = contents_of(plan, [0]).times
    monkeypatch.setattr(plan_contents, "MAX_COUNTED", 10)
    told = contents_of(plan, [0]).times
    assert counted is not None and told is not None
    assert told.sum() == counted.sum() and told.tolist() == counted.tolist()
    assert contents_of(plan_of(LONG_TAIL), [0]).times is None


def test_sources_have_the_draws_that_the_stream_has() -> None:
    small = MemoryStore([b"y"] * 20, [7] * 20)
    joined = JoinedStore({"long": LONG_TAIL, "small": small})
    plan = plan_of(
        joined,
        mixture={0: {"long": 3, "small": 1}, 1: {"long": 1, "small": 1}},
        repeats=2,
        repeats_in="micro_batch",
    )
    found = contents_of(plan, [0, 1, 2])
    positions = np.arange(plan.steps_per_epoch * 4)
    drawn = [np.bincount(plan.source_of(plan.draw_epoch(epoch, positions).indices)) for epoch in range(3)]
    assert list(zip(*found.sources.values(), strict=True)) == [tuple(each.tolist()) for each in drawn]
    assert found.passes["small"] == found.sources["small"][0] / 2 / 20
