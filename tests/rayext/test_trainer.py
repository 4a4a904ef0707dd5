from __future__ import annotations

import json
import logging
import logging.config
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayActorError
from ray.train import FailureConfig, RunConfig
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.scaling_policy import NoopDecision
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import (
    ControllerError,
    WorkerGroupError,
)

from raypipe.commands.status import print_status, status
from raypipe.errors import ResourceError
from raypipe.metrics.records import read_records
from raypipe.rayext.trainer import (
    BoundedScalingPolicy,
    DivisorScalingPolicy,
    FixedPolicy,
    OnlyDeathsPolicy,
    RunTrainer,
    who_died,
)


@pytest.mark.parametrize(
    ("per_step", "cpus", "fewest", "workers"),
    [
        (12, (24,), 1, 12),
        (12, (22,), 1, 6),
        (12, (10,), 1, 4),
        (7, (12,), 1, 1),
        (4, (100,), 1, 4),
        (6, (5,), 1, 2),
        # node by node: 1 + 1 + 2, and not 11 // 2
        (8, (3, 3, 5), 1, 4),
        # there is room for 3, of which 2 divide a step
        (4, (6,), 2, 2),
        (4, (6,), 4, None),
    ],
)
def test_elastic_training_takes_the_largest_divisor_of_m_with_room(
    per_step: int,
    cpus: tuple[float, ...],
    fewest: int,
    workers: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits where fewer than the fewest have room."""
    resources = {"CPU": 2}
    policy = DivisorScalingPolicy(
        ScalingConfig(num_workers=(fewest, 12), resources_per_worker=resources),
        900,
        per_step,
    )
    # Both ask an actor of Ray Train, which there is in a run only.
    nodes = {str(number): {"CPU": each} for number, each in enumerate(cpus)}
    monkeypatch.setattr(policy, "_maybe_send_resource_request", lambda: None)
    monkeypatch.setattr(policy, "_get_reserved_resources", lambda: nodes)
    decision: Any = policy.make_decision_for_non_running_worker_group()
    if workers is None:
        assert isinstance(decision, NoopDecision)
    else:
        assert decision.num_workers == workers


# Trainers that have no room


@pytest.mark.parametrize("elastic", [True, False])
def test_trainers_without_room_say_so_and_do_not_wait_for_ever(
    elastic: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr("raypipe.rayext.trainer.time.monotonic", lambda: now[0])
    policy: BoundedScalingPolicy = FixedPolicy(
        ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2}), 60
    )
    if elastic:
        policy = DivisorScalingPolicy(
            ScalingConfig(num_workers=(2, 4), resources_per_worker={"CPU": 2}),
            60,
            per_step=4,
        )
        monkeypatch.setattr(policy, "_get_reserved_resources", dict)
    # It asks an actor of Ray Train, which there is in a run only.
    monkeypatch.setattr(policy, "_maybe_send_resource_request", lambda: None)
    caplog.set_level(logging.WARNING, logger="raypipe")

    def said_after(seconds: float) -> list[str]:
        caplog.clear()
        now[0] = 100 + seconds
        policy.make_decision_for_non_running_worker_group()
        return [
            record.getMessage()
            for record in caplog.records
            if record.name == "raypipe.rayext.trainer"
        ]

    assert said_after(0) == []
    assert said_after(10) == [
        "2 trainers of 2 CPU each have no room; the run ends in 50 s (pool.stall_timeout_s). Add nodes, or "
        "stop other jobs (`ray job list`)"
    ]
    assert said_after(59) == []
    with pytest.raises(
        ResourceError, match=r"2 trainers of 2 CPU each have had no room for 60 s"
    ):
        said_after(61)


# Restarts


def test_restarts_of_the_trainers_are_counted_by_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[tuple[str, dict[str, str]]] = []

    class Counter:
        def __init__(self, name: str) -> None:
            self.name = name

        def inc(self, _: float, tags: dict[str, str]) -> None:
            counted.append((self.name, tags))

    monkeypatch.setattr("raypipe.metrics.prometheus._instrument", Counter)
    policy = OnlyDeathsPolicy(FailureConfig(max_failures=2), "first")
    gone = ActorDiedError()
    preempted = ActorDiedError()
    monkeypatch.setattr(
        type(preempted),
        "preempted",
        property(lambda error: error is preempted),
        raising=False,
    )
    for error in (
        WorkerGroupError("a trainer died", {0: gone}),
        WorkerGroupError("a node was preempted", {0: gone, 1: preempted}),
        ControllerError(WorkerGroupStartupFailedError("a node was lost")),
        WorkerGroupError(
            "a mistake", {0: ValueError("x")}
        ),  # would come again: no restart
    ):
        policy.make_decision(error)
    assert counted == [
        ("raypipe_trainer_restarts_total", {"run": "first", "reason": reason})
        for reason in ("died", "preempted", "no_start")
    ]


DEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tpid: 11115
\tnamespace: ba92b562
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"""
KILLED = WorkerHealthCheckFailedError(
    "A worker health check failed. Worker info: …", RuntimeError(DEAD)
)
WHO = "trainer 1 died: process 11115 on 192.0.2.2, worker process has died. Worker exit type: SYSTEM_ERROR"


def test_who_died_is_told_and_not_who_survived() -> None:
    survivor = RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer")
    error = WorkerGroupError("", {0: survivor, 1: KILLED, 2: survivor})
    assert who_died(error) == WHO
    assert who_died(WorkerGroupError("", {0: survivor})).startswith(
        "trainer 0 failed: RuntimeError"
    )
    taken = Exception()
    taken.preemption_info = SimpleNamespace(
        preempted_node_ids=["abcdefghij"], preempted_ranks=[0, 1]
    )  # type: ignore
    assert who_died(taken) == "the node of trainers 0, 1 was preempted (abcdefgh)"


def test_a_restart_of_the_trainers_is_a_fault_in_the_runs_record(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "start", "step": 0}\n{"kind": "train", "step": 7}\n{"cut'
    )
    policy = OnlyDeathsPolicy(FailureConfig(max_failures=1), "run", tmp_path.as_uri())
    assert policy.make_decision(WorkerGroupError("", {1: KILLED})).name == "RETRY"
    assert policy.make_decision(WorkerGroupError("", {1: KILLED})).name == "RAISE"
    found = read_records(tmp_path.as_uri())
    text = f"restarting the trainers: {WHO}"
    (fault,) = found[2:]
    assert abs(fault.pop("time") - time.time()) < 60
    assert fault == {"kind": "fault", "step": 7, "text": text, "reason": "died"}


def test_a_wait_for_nodes_is_neither_a_restart_nor_a_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="raypipe")
    policy = OnlyDeathsPolicy(FailureConfig(max_failures=0), "run", tmp_path.as_uri())
    for _ in range(20):
        no_room = ControllerError(WorkerGroupStartupTimeoutError(2))
        assert policy.make_decision(no_room).name == "RETRY"
    assert not read_records(tmp_path.as_uri()) and not caplog.records


@pytest.mark.parametrize("step", [None, 7])
def test_a_wait_for_nodes_is_a_state_that_keeps_the_step(
    step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step is not None:
        place = {"step": step, "to_step": 90, "step_at": 1.0, "every_s": 0}
        (tmp_path / "status.json").write_text(json.dumps(place))
    policy = FixedPolicy(ScalingConfig(num_workers=2), 60, run_uri=tmp_path.as_uri())
    monkeypatch.setattr(policy, "_maybe_send_resource_request", lambda: None)
    policy._since = time.monotonic() - 20
    policy.make_decision_for_non_running_worker_group()
    found = status(str(tmp_path))
    assert found["state"] == "waiting" and found["waits_for"] == "room"
    assert "2 trainers of 1 CPU each have no room" in found["whom"]
    assert found["step"] == (step or 0) and found["since_s"] >= 20
    assert found["faults"] == []
    print_status(found)


# The end of a run


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_no_controller_outlives_its_run(tmp_path: Path) -> None:
    trainer = RunTrainer(
        lambda: None,
        per_step=1,
        timeout_s=300,
        take_signals=lambda: None,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    trainer.fit()
    # The handle keeps an actor that nobody has ended. Ray kills asynchronously: a loaded machine takes its time.
    with pytest.raises(RayActorError):
        while True:
            ray.get(trainer._controller.get_state.remote(), timeout=300)
            time.sleep(0.1)
