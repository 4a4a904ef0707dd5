"""Notices to trainers' nodes, and the checkpoints that they ask for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.train.v2._internal.execution import context

from raypipe.rayext import notice


def test_nothing_is_noticed_outside_of_a_worker_of_ray_train_or_before_a_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert notice.noticed() is None
    told = SimpleNamespace(preemption_context=SimpleNamespace(preemption_info=None))
    monkeypatch.setattr(context, "get_train_context", lambda: told)
    assert notice.noticed() == ()
    told.preemption_context.preemption_info = SimpleNamespace(preempted_node_ids=["a"])
    assert notice.noticed() == ("a",)
    del told.preemption_context  # before Ray 2.60
    assert notice.noticed() is None


def test_a_notice_asks_for_a_checkpoint_at_once_and_then_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = notice.Notice()
    assert not asks.is_due(())
    assert asks.is_due(("a",)) and asks.is_due(("a",))  # until it is made
    asks.saved()
    assert not asks.is_due(("a",)) and asks.is_due(("a", "b"))
    asks.saved()
    monkeypatch.setattr(notice, "_AGAIN_S", 0.0)
    assert asks.is_due(("a", "b")) and not asks.is_due(())
    assert not asks.agreed(0)  # this process is no trainer of Ray Train's
