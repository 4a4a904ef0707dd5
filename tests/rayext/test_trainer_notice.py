"""Notices to trainers' nodes, and the checkpoints that they ask for."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train.v2._internal.execution import context

from raypipe.rayext.trainer_notice import Notice, noticed


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray Train's place for a notice, in a worker of its."""
    given = SimpleNamespace(preemption_info=None)
    monkeypatch.setattr(context, "get_train_context", lambda: SimpleNamespace(preemption_context=given))
    return given


def info(*nodes: str, left_s: float | None = None) -> Any:
    deadline_ms = None if left_s is None else (time.time() + left_s) * 1000
    return SimpleNamespace(preempted_node_ids=list(nodes), preempted_ranks=[1], deadline_ms=deadline_ms)


def test_no_notice_comes_outside_of_ray_train_or_before_its_version_2_60(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError):
        noticed()
    assert not Notice(print).is_due() and not Notice(print).agreed(0)
    monkeypatch.setattr(context, "get_train_context", SimpleNamespace)  # it has no such context
    assert not Notice(print).is_due() and not Notice(print).agreed(0)


def test_each_notice_is_told_and_asks_for_a_checkpoint_at_once(given: Any) -> None:
    told: list[str] = []
    notice = Notice(told.append)
    assert not notice.is_due() and not told
    given.preemption_info = info("abcdefghij")
    assert notice.is_due() and not notice.is_due()
    given.preemption_info = info("abcdefghij", "other")
    assert notice.is_due() and not notice.is_due()
    assert told == [
        f"the node of trainers 1 is about to go ({name}): a checkpoint is made" for name in ("abcdefgh", "other")
    ]


@pytest.mark.parametrize(("left_s", "then_s"), [(None, 15), (120, 15), (20, 10), (4, 2), (-3, 1)])
def test_checkpoints_come_more_often_as_the_nodes_end_comes_near(
    given: Any, monkeypatch: pytest.MonkeyPatch, left_s: float | None, then_s: float
) -> None:
    given.preemption_info, notice, now = info("a", left_s=left_s), Notice(print), time.time()
    for later_s, due in ((0.0, True), (then_s - 0.1, False), (then_s + 0.1, True)):
        clock = SimpleNamespace(time=lambda at=now + later_s: at)
        monkeypatch.setattr("raypipe.rayext.trainer_notice.time", clock)
        assert notice.is_due() == due


def test_each_step_of_a_nodes_last_seconds_has_a_checkpoint(given: Any) -> None:
    notice = Notice(print)
    given.preemption_info = info("a", left_s=100)
    assert notice.is_due() and not notice.is_near()
    notice = Notice(print)
    given.preemption_info = info("a", left_s=1.5)
    assert [notice.is_due() for _ in range(3)] == [True] * 3 and notice.is_near()


def test_ranks_agree_once_a_second_by_the_steps_of_the_first(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("ray.train.collective.broadcast_from_rank_zero", lambda data: sent.append(data) or data)
    clock = iter([100.0, 100.1, 101.1])
    own = SimpleNamespace(time=time.time, monotonic=lambda: next(clock))
    monkeypatch.setattr("raypipe.rayext.trainer_notice.time", own)
    notice = Notice(print)
    assert not notice.agreed(0) and sent == [(False, 10)]  # a step took 0.1 s
    given.preemption_info = info("a")
    assert [notice.agreed(0) for _ in range(10)] == [False] * 9 + [True] and sent[1:] == [(True, 10)]
