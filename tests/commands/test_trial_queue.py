from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from raypipe.commands.trial_queue import Share, _outcome, share_out
from raypipe.config import PlanConfig, PoolConfig, RunConfig, TrainConfig
from raypipe.errors import ResourceError, StoreError
from raypipe.rayext.cluster import Resources


def idle(cpus: float, gpus: float = 0) -> Resources:
    return Resources(cpus, gpus, cpus, gpus)


def run(train: dict[str, Any] | None = None, **pool: Any) -> RunConfig:
    return RunConfig(train=TrainConfig(**(train or {})), pool=PoolConfig(**pool))


def test_one_trial_for_each_cpu_where_there_are_no_gpus() -> None:
    assert share_out(idle(2), run(), 12) == Share(2, False, 0.5, 1, 0.5)
    assert share_out(idle(16), run(), 12) == Share(12, False, 0.66, 1, 0.66)


def test_one_trial_for_each_gpu_with_an_equal_part_of_the_cpus() -> None:
    assert share_out(idle(96, 8), run(), 12) == Share(8, True, 1.0, 11, 1.0)
    assert share_out(Resources(96, 8, 96, 3), run(), 12) == Share(3, True, 1.0, 31, 1.0)
    assert share_out(idle(96, 8), run({"gpu": "no"}), 12).gpu is False


def test_fewer_at_a_time_have_more_each() -> None:
    assert share_out(idle(8), run(), 2) == Share(2, False, 1.0, 3, 1.0)
    assert share_out(idle(8), run(max_actors=2), 2).actors == 2
    assert share_out(idle(8), run({"cpus_per_worker": 2.0}, cpus_per_actor=0.5), 2) == Share(2, False, 2.0, 4, 0.5)


def test_what_other_jobs_hold_is_left_to_them() -> None:
    assert share_out(Resources(16, 0, 4, 0), run(), 2) == Share(2, False, 1.0, 1, 1.0)


def test_all_trials_of_a_time_fit_with_their_actors_on_every_small_cluster() -> None:
    for cpus in range(1, 12):
        for most in range(1, 12):
            for actors in (1, 2, 3):
                share = share_out(idle(cpus), run(min_actors=actors), most)
                assert 1 <= share.concurrent <= most and share.actors >= actors
                needed = share.concurrent * (share.cpus + share.actors * share.cpus_per_actor)
                assert needed <= cpus + 1e-9


def test_too_small_a_share_names_what_to_lower() -> None:
    with pytest.raises(ResourceError, match=r"lower tune\.max_concurrent or pool\.min_actors"):
        share_out(idle(1), run(min_actors=200), 1)


def test_a_share_reads_as_what_it_is() -> None:
    share = Share(2, True, 1.0, 3, 0.5)
    assert str(share) == "2 at a time, each with a GPU and 1 CPUs and 3 transform actors of 0.5 CPUs"
    assert Share(**dataclasses.asdict(share)) == share


def test_a_trial_that_was_stopped_early_is_not_done_whatever_ray_tune_calls_it() -> None:
    from ray.tune import Result

    def outcome(epochs: int, error: Exception | None = None) -> Any:
        metrics = {"config": {"number": 1}, "epochs": epochs, "done": True, "val_accuracy": 0.5, "val_loss": 1.0}
        return _outcome(Result(metrics=metrics, checkpoint=None, error=error, path=""), runs)

    runs = [run(), dataclasses.replace(run(), plan=PlanConfig(epochs=5))]
    assert not outcome(2).done and outcome(5).done
    assert (outcome(2).number, outcome(2).accuracy, outcome(2).error) == (1, 0.5, "")
    assert outcome(2, ValueError("of\nno use")).error == "no use"
    of_ray = RayTaskError(
        "step", "a trace\nof many lines", StoreError("x.lmdb does not exist; understood are:\n  LMDB")
    )
    assert outcome(2, of_ray).error == "StoreError: x.lmdb does not exist; understood are:\n  LMDB"
