from __future__ import annotations

import pytest
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2.api.config import ScalingConfig

from raypipe.trainer import DivisorScalingPolicy


def decided(
    monkeypatch: pytest.MonkeyPatch, per_step: int, fewest: int, most: int, nodes: dict[str, dict[str, float]]
) -> int | None:
    """How many workers Ray Train's policy starts where these resources are reserved; None = it waits."""
    policy = DivisorScalingPolicy(
        ScalingConfig(num_workers=(fewest, most), resources_per_worker={"CPU": 2}), per_step
    )
    # Both ask an actor of Ray Train, which there is in a run only.
    monkeypatch.setattr(policy, "_maybe_send_resource_request", lambda: None)
    monkeypatch.setattr(policy, "_get_reserved_resources", lambda: nodes)
    decision = policy.make_decision_for_non_running_worker_group()
    if isinstance(decision, NoopDecision):
        return None
    assert isinstance(decision, ResizeDecision)
    return decision.num_workers


@pytest.mark.parametrize(
    ("per_step", "cpus", "workers"),
    [(12, 24, 12), (12, 22, 6), (12, 10, 4), (8, 14, 4), (7, 12, 1), (4, 100, 4), (6, 5, 2)],
)
def test_elastic_training_takes_the_largest_divisor_of_m_that_there_is_room_for(
    per_step: int, cpus: float, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decided(monkeypatch, per_step, 1, per_step, {"node": {"CPU": cpus}}) == workers


def test_room_is_counted_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"one": {"CPU": 3.0}, "two": {"CPU": 3.0}, "three": {"CPU": 5.0}}
    assert decided(monkeypatch, 8, 1, 8, nodes) == 4  # 1 + 1 + 2, and not 11 // 2


def test_fewer_divisors_than_the_fewest_workers_means_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    # There is room for 3, of which 2 divide M = 4: too few where 4 are wanted.
    assert decided(monkeypatch, 4, 4, 8, {"node": {"CPU": 6}}) is None
    assert decided(monkeypatch, 4, 2, 8, {"node": {"CPU": 6}}) == 2
