"""Notices to trainers' nodes, and the checkpoints that they ask for."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.train.v2._internal.execution import context

from raypipe.rayext.trainer_notice import Notice, noticed


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray Train's place for a notice, in a worker of its."""
    given = SimpleNamespace(preemption_info=None)
    monkeypatch.setattr(
        context, "get_train_context", lambda: SimpleNamespace(preemption_context=given)
    )
    return given


class Clock:
    """Takes the place of the module `time`: a test says how time passes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("raypipe.rayext.trainer_notice.time", clock)
    return clock


def info(*nodes: str, left_s: float | None = None) -> Any:
    deadline_ms = None if left_s is None else (Clock().now + left_s) * 1000
    return SimpleNamespace(
        preempted_node_ids=list(nodes), preempted_ranks=[1], deadline_ms=deadline_ms
    )


def test_no_notice_comes_outside_of_ray_train_or_before_its_version_2_60(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert noticed() is None
    assert not Notice().is_due(print)
    # it has no such context
    monkeypatch.setattr(context, "get_train_context", SimpleNamespace)
    assert not Notice().is_due(print)


def test_each_notice_is_told_and_asks_for_a_checkpoint_at_once(given: Any) -> None:
    told: list[str] = []
    notice = Notice()
    assert not notice.is_due(told.append) and not told
    given.preemption_info = info("abcdefghij")
    assert notice.is_due(told.append) and not notice.is_due(told.append)
    given.preemption_info = info("abcdefghij", "other")
    assert notice.is_due(told.append) and not notice.is_due(told.append)
    assert told == [
        f"the node of trainers 1 is about to go ({name}): making a checkpoint"
        for name in ("abcdefgh", "other")
    ]


def step(notice: Notice, clock: Clock, seconds: float) -> bool:
    """A step that takes so long; whether a checkpoint is due after it."""
    notice.begin_step()
    clock.now += seconds
    return notice.is_due(print)


@pytest.mark.parametrize(
    ("left_s", "then_s"), [(None, 15), (120, 15), (21, 10), (5, 2)]
)
def test_checkpoints_come_more_often_as_the_nodes_end_comes_near(
    given: Any, clock: Clock, left_s: float | None, then_s: float
) -> None:
    given.preemption_info, notice = info("a", left_s=left_s), Notice()
    begun_at = clock.now
    assert notice.is_due(print)
    while not step(notice, clock, 0.1):
        pass
    assert clock.now - begun_at == pytest.approx(then_s, abs=0.2) and not notice.is_last


@pytest.mark.parametrize("left_s", [None, 300.0, 30.0, 12.0, 3.0])
@pytest.mark.parametrize(
    ("step_s", "checkpoint_s"), [(0.01, 0.01), (0.3, 0.5), (2.0, 0.2), (0.5, 9.0)]
)
def test_a_train_function_ends_before_its_node_after_a_checkpoint(
    given: Any, clock: Clock, left_s: float | None, step_s: float, checkpoint_s: float
) -> None:
    notice, choose, checkpoints = Notice(), random.Random(0), 0
    # Ray Train's default where the end is not known
    ends_at = clock.now + (left_s or 120)
    notice.saved_in(checkpoint_s)
    given.preemption_info, is_due = info("a", left_s=left_s), False
    with pytest.raises(RayActorError) as error:
        while True:
            notice.begin_step()
            clock.now += step_s * choose.uniform(0.8, 1.4)
            if is_due := notice.is_due(print):
                checkpoints += 1
                clock.now += checkpoint_s
    assert error.value.preempted and is_due and checkpoints <= 40
    if step_s + checkpoint_s < ends_at - 1000 - 1:  # there was time for one
        assert (
            ends_at - max(10.0, 3 * (step_s + checkpoint_s)) < clock.now < ends_at - 0.5
        )


def test_before_a_validation_a_checkpoint_is_due_in_any_case(
    given: Any, clock: Clock
) -> None:
    notice = Notice()
    assert not notice.is_due(print, at_end=True)
    given.preemption_info = info("a", left_s=100)
    assert (
        notice.is_due(print)
        and not notice.is_due(print)
        and notice.is_due(print, at_end=True)
    )
