from __future__ import annotations

import logging

import pytest
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2.api.config import ScalingConfig

from raypipe.errors import ResourceError
from raypipe.rayext.trainer import BoundedScalingPolicy, DivisorScalingPolicy, FixedPolicy


def decided(
    monkeypatch: pytest.MonkeyPatch, per_step: int, fewest: int, most: int, nodes: dict[str, dict[str, float]]
) -> int | None:
    """How many workers Ray Train's policy starts where these resources are reserved; None = it waits."""
    policy = DivisorScalingPolicy(
        ScalingConfig(num_workers=(fewest, most), resources_per_worker={"CPU": 2}), 900, per_step
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


# Trainers that have no room


@pytest.mark.parametrize("elastic", [True, False])
def test_trainers_without_room_say_so_and_do_not_wait_for_ever(
    elastic: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr("raypipe.rayext.trainer.time.monotonic", lambda: now[0])
    policy: BoundedScalingPolicy = FixedPolicy(ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2}), 60)
    if elastic:
        policy = DivisorScalingPolicy(
            ScalingConfig(num_workers=(2, 4), resources_per_worker={"CPU": 2}), 60, per_step=4
        )
        monkeypatch.setattr(policy, "_get_reserved_resources", dict)
    # It asks an actor of Ray Train, which there is in a run only.
    monkeypatch.setattr(policy, "_maybe_send_resource_request", lambda: None)
    caplog.set_level(logging.WARNING, logger="raypipe")

    def said_after(seconds: float) -> list[str]:
        caplog.clear()
        now[0] = 100 + seconds
        policy.make_decision_for_non_running_worker_group()
        return [record.getMessage() for record in caplog.records if record.name == "raypipe.rayext.trainer"]

    assert said_after(0) == []
    assert said_after(10) == [
        "2 trainers of 2 CPU each have no room; the run ends in 50 s (pool.stall_timeout_s). Add nodes, or "
        "stop other jobs (`ray job list`)"
    ]
    assert said_after(59) == []
    with pytest.raises(ResourceError, match=r"2 trainers of 2 CPU each have had no room for 60 s"):
        said_after(61)
