from __future__ import annotations

import logging
import os

import pytest
from ray._private import node
from ray.train.v2.api import data_parallel_trainer

from raypipe.progress import print_progress, relay_progress
from raypipe.rayext import tweaks

NOISE = [
    "[2026-11-23 10:10:07,401 E 29387 29448] core_worker.cc:2465: Actor with class name: 'MapWorker(…)' and "
    "ID: '43f1' has constructor arguments in the object store and max_restarts > 0. If the arguments …",
    "Task MapWorker(MapBatches(TransformWorker)).submit failed. There are infinite retries remaining, so the "
    "task will be retried. Error: The actor is dead because it was killed by `ray.kill`.",
    "WARNING: 8 PYTHON worker processes have been started on node: 1b1776d9 with address: 192.0.2.2, which is 4x "
    "the maximum expected startup concurrency (2). This could be a result of using a large number of actors",
    "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
]


def test_progress_is_printed_noise_is_dropped_and_the_rest_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    relay_progress(True)
    try:
        logger = logging.getLogger("raypipe")
        print_progress(logger, "two\nlines → of it", step=3, kind="train")
        print_progress(logger, "")
    finally:
        relay_progress(False)
    told = capsys.readouterr().out.splitlines()
    assert tweaks.begin_progress() and not tweaks._progress_ended.is_set()
    assert tweaks.sift([*NOISE, *told, "a user's print"]) == ["a user's print"]
    assert capsys.readouterr().out == "two\nlines → of it\n"
    assert tweaks._progress_ended.is_set()


def test_one_variable_leaves_ray_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    start = node.Node.start_api_server
    with tweaks.small_head():
        assert node.Node.start_api_server is not start
    assert node.Node.start_api_server is start
    monkeypatch.setenv("RAYPIPE_TWEAKS", "0")
    replaced: list[str] = []
    monkeypatch.setattr(tweaks, "replace", lambda path, *_, loss: replaced.append(path))
    tweaks.tweak_ray_data()
    with tweaks.small_head():
        assert node.Node.start_api_server is start
    assert tweaks.sift([*NOISE, "a user's print"]) == [*NOISE, "a user's print"]
    assert not tweaks.begin_progress() and replaced == []


def test_a_run_inherits_the_environment_unless_the_driver_changed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def propagated() -> dict[str, str]:
        variables = data_parallel_trainer.get_env_vars_to_propagate()
        variables.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")
        return dict(variables)

    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
    monkeypatch.setattr(tweaks, "local_environment", lambda: dict(os.environ))
    with tweaks.without_environment():
        assert propagated() == {}
    monkeypatch.setattr(tweaks, "local_environment", dict)
    with tweaks.without_environment():
        assert propagated()["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] == "1"
    # a cluster of others
    monkeypatch.setattr(tweaks, "local_environment", lambda: None)
    with tweaks.without_environment():
        assert "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC" in propagated()
