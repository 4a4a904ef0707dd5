from __future__ import annotations

import json
import logging
import logging.config
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import state
from ray.exceptions import ActorDiedError, RayActorError
from ray.train import FailureConfig, RunConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.constants import DEFAULT_HEALTH_CHECK_INTERVAL_S
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.failure_handling import (
    DefaultFailurePolicy,
    FailureDecision,
)
from ray.train.v2._internal.execution.worker_group.poll import (
    WorkerGroupPollStatus,
    WorkerStatus,
)
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import ControllerError, PreemptionError
from ray.train.v2.api.preemption import PreemptionInfo

import raypipe
from raypipe.errors import ConfigError, ResourceError
from raypipe.rayext import train_runs
from raypipe.rayext.controller import own_controller
from raypipe.rayext.failures import cause_of
from raypipe.rayext.train_runs import FinalErrors

# A process that only imports raypipe

INNOCENT = """
import logging, os, sys, warnings
before = dict(os.environ), dict(logging.Logger.manager.loggerDict), list(warnings.filters)
import raypipe
dir(raypipe), raypipe.__version__, raypipe.PlanConfig, raypipe.RaypipeError
assert dict(os.environ) == before[0], set(os.environ) ^ set(before[0])
names = set(logging.Logger.manager.loggerDict) - set(before[1])
assert all(name.startswith("raypipe") for name in names), names
assert warnings.filters == before[2]
assert not {"ray", "torch", "albumentations", "cv2"} & set(sys.modules)
"""


def test_an_import_leaves_the_environment_and_loggers_as_they_were() -> None:
    ours = {"NO_ALBUMENTATIONS_UPDATE", "ALBUMENTATIONS_NO_TELEMETRY"}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("RAY_", "RAYPIPE_"))
    }
    subprocess.run([sys.executable, "-c", INNOCENT], env=environment, check=True)


# A controller's callbacks


@pytest.mark.system
def test_a_plain_trainer_beside_raypipe_has_rays_defaults(
    ray_cluster: None, stores: dict[str, Path], tmp_path: Path
) -> None:
    def shown(controller: Any) -> dict[str, Any]:
        """The state of a controller of Ray Train, in its process."""
        from ray.train.v2._internal.callbacks import placement_group_callback

        silenced = logging.getLogger(
            f"ray.train.v2._internal.{train_runs._SILENCED[1]}"
        )
        cleaner = placement_group_callback.PlacementGroupCleanerCallback
        names = [
            type(callback).__name__ for callback in controller._worker_group._callbacks
        ]
        for callback in controller._controller_callbacks:
            if isinstance(callback, cleaner) and callback._cleaner:
                # `fit` would wait 12 s for its end on a cluster without a dashboard
                ray.kill(callback._cleaner)
        return {
            "names": names,
            "interval": controller._health_check_interval_s,
            "told": os.environ.get("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"),
            "callbacks": os.environ.get("RAY_TRAIN_CALLBACKS"),
            "filters": len(silenced.filters),
            "level": logging.getLogger("ray.train").level,
            "cleaner": cleaner.after_controller_start.__name__,
        }

    def train_fn(config: dict[str, Any]) -> None:
        found = ray.get(own_controller().__ray_call__.remote(shown))
        found["trainer_level"] = logging.getLogger("ray.train").level
        Path(config["found"]).write_text(json.dumps(found))

    trainer = TorchTrainer(
        train_fn,
        train_loop_config={"found": str(tmp_path / "found.json")},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    plan = raypipe.PlanConfig(micro_batch_size=6, global_batch_size=12)
    spec = raypipe.open_stream(stores["train"], plan=plan)
    raypipe.check_resources(spec, trainer.scaling_config)
    trainer.fit()
    found = json.loads((tmp_path / "found.json").read_text())
    told = found.pop("told")  # by the tests' own environment
    assert found.pop("interval") == float(told or DEFAULT_HEALTH_CHECK_INTERVAL_S)
    names = found.pop("names")
    assert "FinalErrors" not in names and "PlacementGroupCleanerCallback" in names
    assert found == {
        "callbacks": None,
        "filters": 0,
        "level": logging.DEBUG,  # Ray Train's: its file has all
        "trainer_level": logging.DEBUG,
        "cleaner": "after_controller_start",
    }


@pytest.mark.system
def test_an_own_elastic_loop_leaves_out_workers_that_do_not_divide(
    idle_cluster: None, stores: dict[str, Path], tmp_path: Path
) -> None:
    """A step has four micro-batches, and the cluster room for three trainers."""

    def train_fn(config: dict[str, Any]) -> None:
        stream = raypipe.loader(config["spec"])
        for epoch in stream.epochs():
            for _ in epoch.train:
                pass
        (tmp_path / str(stream.rank)).write_text(str(stream.world_size))

    plan = raypipe.PlanConfig(micro_batch_size=6, global_batch_size=24)
    pool = raypipe.PoolConfig(max_actors=1, stall_timeout_s=300)
    spec = raypipe.open_stream(stores["train"], plan=plan, pool=pool)
    config = ScalingConfig(num_workers=(1, 3))
    raypipe.check_resources(spec, config)
    trainer = TorchTrainer(
        train_fn,
        train_loop_config={"spec": spec},
        scaling_config=config,
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    trainer.fit()
    assert [(tmp_path / name).read_text() for name in "01"] == ["2", "2"]


# Errors of raypipe's own in a TorchTrainer

LOST = WorkerHealthCheckFailedError("rank 1 is gone", ActorDiedError())
PLAN = raypipe.PlanConfig(micro_batch_size=6, global_batch_size=12)
POOL = raypipe.PoolConfig(engine="inline")
NO_ROOM = ResourceError("2 trainers and 1 transform actor need 3 CPUs")


def polled(
    callback: FinalErrors, *errors: Exception | None, notice: Any = None
) -> None:
    """Show it the workers' state as Ray Train's controller sees it, by rank."""
    states = {
        rank: WorkerStatus(error is None, error, preemption_info=notice)
        for rank, error in enumerate(errors)
    }
    callback.after_worker_group_poll_status(WorkerGroupPollStatus(states))


def test_a_run_with_a_loader_does_not_retry_an_error_of_raypipe() -> None:
    callback = FinalErrors()
    polled(callback, None, None)
    with pytest.raises(ControllerError, match="need 3 CPUs") as caught:
        polled(callback, NO_ROOM, RuntimeError("gloo/ Connection closed by peer"))
    policy = DefaultFailurePolicy(FailureConfig(max_failures=3))
    assert (
        policy.make_decision(caught.value) == FailureDecision.RAISE
        and cause_of(caught.value) is NO_ROOM
    )


def test_a_run_with_a_loader_retries_losses_and_user_errors_as_told() -> None:
    callback = FinalErrors()
    polled(callback, ValueError("of the user's"))
    polled(callback, ConfigError("since its peer is gone"), LOST)
    # a node that was lost may come back
    polled(callback, NO_ROOM)
    with pytest.raises(ControllerError, match="a setting"):
        polled(callback, ConfigError("a setting"))


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_an_error_of_raypipe_ends_an_own_loop_at_its_first_try(
    tmp_path: Path,
) -> None:
    def train_fn(config: dict[str, Any]) -> None:
        with Path(config["tries"]).open("a") as file:
            file.write("tried\n")
        raypipe.loader(config["spec"])

    trainer = TorchTrainer(
        train_fn,
        train_loop_config={"tries": str(tmp_path / "tries"), "spec": "a.lmdb"},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=3)
        ),
    )
    with pytest.raises(ControllerError, match=r"raypipe\.loader: spec"):
        trainer.fit()
    assert (tmp_path / "tries").read_text() == "tried\n"
    # It asks a dashboard, which a local cluster has not.
    while "PlacementGroupCleaner" in {
        actor["ActorClassName"]
        for actor in state.actors(actor_state_name="ALIVE").values()
    }:
        time.sleep(0.1)


# What a controller leaves behind that was killed


@pytest.mark.system
def test_an_own_loop_whose_controller_was_killed_has_room_again(
    ray_cluster: None, stores: dict[str, Path], tmp_path: Path
) -> None:
    def train_fn(config: dict[str, Any]) -> None:
        marker = Path(config["marker"])
        raypipe.loader(raypipe.open_stream(config["store"], plan=PLAN, pool=POOL))
        if not marker.exists():
            marker.touch()
            ray.kill(own_controller())
            time.sleep(100)

    trainer = TorchTrainer(
        train_fn,
        train_loop_config={
            "marker": str(tmp_path / "marker"),
            "store": str(stores["train"]),
        },
        # the cluster has room for one such group
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1.5}),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(RayActorError):
        trainer.fit()
    trainer.fit()


def test_what_dies_after_a_notice_is_preempted_and_not_before() -> None:
    info: Any = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"node": [1]})
    # as trainer_notice raises it
    leaving = RayActorError(
        error_msg="the last checkpoint has been made", preempted=True
    )
    peer = RuntimeError("gloo/x.cc Connection reset by peer")
    callback = FinalErrors()
    # without a notice it has died
    polled(callback, None, LOST)
    for notice, error in ((info, peer), (None, LOST)):  # the notice comes once
        with pytest.raises(PreemptionError):
            polled(callback, error, None, notice=notice)
    for error in (
        leaving,
        ValueError("a mistake"),
        None,
    ):
        # Ray Train decides about these
        polled(callback, error, None, notice=info)
    callback.after_worker_group_start(None)
    polled(callback, None, LOST)
