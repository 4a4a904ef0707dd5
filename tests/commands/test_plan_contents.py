from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raypipe.commands import plan_summary
from raypipe.commands.plan_summary import _of_sources, class_shares, draw_counts
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


def test_a_plain_plan_draws_each_sample_of_its_whole_steps_once() -> None:
    times = draw_counts(plan_of(LONG_TAIL, [3, 50], shuffle="global"))
    assert times is not None and np.bincount(times).tolist() == [2, 56]


def test_the_classes_of_a_balanced_plan_are_drawn_alike() -> None:
    plan = plan_of(LONG_TAIL, class_balance=1.0)
    times = draw_counts(plan)
    assert times is not None and times.sum() == 60
    shares = class_shares(plan, times, np.array(LABELS))
    assert {label: stored for label, (stored, _) in shares.items()} == {"0": 40 / 60, "1": 0.25, "2": 5 / 60}
    assert {drawn for _, drawn in shares.values()} == {1 / 3}


@pytest.mark.parametrize(
    "config", [{"weights": "weight"}, {"class_balance": 0.5, "aug_repeats": 2, "global_batch_size": 8}]
)
def test_draws_that_are_too_many_to_count_are_those_of_a_pass(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(LONG_TAIL, [0], **config)
    counted = draw_counts(plan)
    monkeypatch.setattr(plan_summary, "MAX_COUNTED", 10)
    of_pass = draw_counts(plan)
    assert counted is not None and of_pass is not None
    assert of_pass.sum() == counted.sum() and of_pass.tolist() == counted.tolist()
    assert draw_counts(plan_of(LONG_TAIL)) is None


def test_sources_have_the_draws_that_the_stream_has() -> None:
    small = MemoryStore([b"y"] * 20, [7] * 20)
    joined = JoinedStore({"long": LONG_TAIL, "small": small})
    plan = plan_of(
        joined,
        mixture={0: {"long": 3, "small": 1}, 1: {"long": 1, "small": 1}},
        aug_repeats=2,
        global_batch_size=8,
    )
    sources = _of_sources(plan, joined)
    positions = np.arange(plan.steps_per_epoch * 8)
    drawn = [np.bincount(plan.source_of(plan.draw_epoch(epoch, positions).indices)) for epoch in (0, 2)]
    assert list(zip(*(source["share"] for source in sources.values()), strict=True)) == [
        tuple((counts / len(positions)).tolist()) for counts in drawn
    ]
    assert sources["small"]["passes"] == drawn[0][1] / 2 / 20
