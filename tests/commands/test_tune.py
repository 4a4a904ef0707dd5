from __future__ import annotations

import dataclasses
import json
import os
import runpy
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from raypipe.commands import tune
from raypipe.commands.settings import parse_job, parse_run
from raypipe.commands.tune import TuneConfig, policies, share_out
from raypipe.config import (
    AugmentConfig,
    PlanConfig,
    PoolConfig,
    RunConfig,
    StoreConfig,
    TrainConfig,
    TransformConfig,
)
from raypipe.errors import ConfigError, RaypipeError, ResourceError
from raypipe.metrics.records import read_records
from raypipe.rayext.cluster import Allocation, Resources

JOB: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "jobs" / "tune.py"))
best_of, final_runs, seeds = (JOB[name] for name in ("best_of", "final_runs", "seeds"))
search, search_runs = JOB["search"], JOB["search_runs"]
TUNE = TuneConfig(trials=3, epochs=2, repeats=2, seed=1)


@pytest.fixture
def run(stores: dict[str, Path], tmp_path: Path) -> RunConfig:
    return RunConfig(
        store=StoreConfig(str(stores["train"]), str(stores["val"])),
        plan=PlanConfig(epochs=2, micro_batch_size=6, global_batch_size=24, seed=1),
        transform=TransformConfig(train="small", val="resize", size=12),
        pool=PoolConfig(max_actors=1),
        train=TrainConfig(model="small", optimizer="adamw", lr=0.003),
        augment=AugmentConfig(mixup_alpha=0.2),
        storage_path=str(tmp_path / "runs"),
    )


def outcome(number: int, epochs: int, accuracy: float, error: str = "") -> dict[str, Any]:
    return {"number": number, "epochs": epochs, "accuracy": accuracy, "error": error}


# What is trained


def test_trials_differ_in_their_policies_alone(run: RunConfig) -> None:
    chosen = policies(TUNE, run)
    trials = search_runs(run, TUNE, chosen)
    assert [(trial.transform, trial.augment) for trial in trials] == [(c.transform, c.augment) for c in chosen]
    policy = {"transform": run.transform, "augment": run.augment}
    same = {repr(dataclasses.replace(trial, **policy, name="")) for trial in trials}
    assert len(same) == 1
    assert all(trial.plan == dataclasses.replace(run.plan, epochs=2) for trial in trials)
    assert len({trial.name for trial in trials}) == 3


def test_a_search_takes_half_of_the_epochs(run: RunConfig) -> None:
    longer = dataclasses.replace(run, plan=dataclasses.replace(run.plan, epochs=10))
    trials = search_runs(longer, TuneConfig(), policies(TUNE, run))
    assert {trial.plan.epochs for trial in trials} == {5}


def test_the_best_and_the_default_are_compared_with_the_same_new_seeds(run: RunConfig) -> None:
    best = policies(TUNE, run)[2]
    finals = final_runs(run, TUNE, best)
    assert [final.augment for final in finals] == [best.augment, best.augment, run.augment, run.augment]
    assert [final.plan.seed for final in finals] == 2 * seeds(TUNE, run)
    assert all(final.store == run.store for final in finals)
    assert {final.plan.epochs for final in finals} == {run.plan.epochs}


def test_the_best_of_the_trials_went_all_the_way_and_is_not_the_default() -> None:
    trials = [outcome(0, 4, 0.99), outcome(1, 4, 0.96), outcome(2, 2, 0.98), outcome(3, 4, 0.97)]
    assert best_of(trials) == 3
    assert best_of([*trials, outcome(4, 4, 0.98), outcome(5, 4, 1.0, error="broken")]) == 4
    with pytest.raises(RaypipeError, match="every trial failed, the last one so: broken"):
        best_of([outcome(0, 4, 0.9), outcome(1, 0, 0.0, error="broken")])


# What is wrong is told before anything starts


def test_a_search_without_validation_is_an_error(run: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"needs a validation: set store\.val"):
        search(dataclasses.replace(run, store=StoreConfig(run.store.train)), TUNE)


def test_an_unknown_transform_is_an_error(run: RunConfig) -> None:
    with pytest.raises(ConfigError, match="no transform preset 'lightt'"):
        search(run, dataclasses.replace(TUNE, trials=20, transforms=["lightt"]))
    assert not any(Path(run.storage_path).iterdir())


# Who gets what


def idle(cpus: float, gpus: float = 0) -> Resources:
    return Resources(cpus, gpus, cpus, gpus)


def settings(gpu: bool = False, cpus: float = 0.0, **pool: Any) -> RunConfig:
    train = TrainConfig(num_workers=1, use_gpu=gpu, cpus_per_worker=cpus)  # type: ignore[arg-type]
    return RunConfig(train=train, pool=PoolConfig(**pool))


def test_as_many_trials_as_the_cpus_have_room_for_where_there_are_no_gpus() -> None:
    assert share_out(idle(2), settings(), 12) == (1, Allocation(1, False, 1.0, 1))
    assert share_out(idle(16), settings(), 12) == (12, Allocation(1, False, 0.33, 1))


def test_one_trial_for_each_gpu_with_an_equal_part_of_the_cpus() -> None:
    assert share_out(idle(96, 8), settings(True), 12) == (8, Allocation(1, True, 1.0, 11))
    assert share_out(Resources(96, 8, 96, 3), settings(True), 12) == (3, Allocation(1, True, 1.0, 31))


def test_fewer_at_a_time_have_more_each_and_what_other_jobs_hold_is_left_to_them() -> None:
    assert share_out(idle(8), settings(), 2) == (2, Allocation(1, False, 1.0, 3))
    assert share_out(idle(8), settings(max_actors=2), 2)[1].max_actors == 2
    assert share_out(idle(8), settings(cpus=2.0, cpus_per_actor=0.5), 2) == (2, Allocation(1, False, 2.0, 4))
    assert share_out(Resources(16, 0, 4, 0), settings(), 2) == (2, Allocation(1, False, 1.0, 1))


def test_all_trials_of_a_time_fit_with_their_actors_on_every_small_cluster() -> None:
    for cpus in range(4, 12):
        for most in range(1, 12):
            for actors in (1, 2, 3):
                at_once, share = share_out(idle(cpus), settings(min_actors=actors), most)
                assert 1 <= at_once <= most and share.max_actors >= actors
                assert at_once * (share.cpus_per_worker + share.max_actors) <= cpus + 1e-9


def test_too_small_a_cluster_names_what_to_lower() -> None:
    with pytest.raises(ResourceError, match=r"200 transform actors need .* set pool\.engine=inline"):
        share_out(idle(1), settings(min_actors=200), 2)


# A trial


class Alone(tune.Trial):
    """A trial outside of Ray Tune, which gives it the rest of its arguments."""

    def __init__(self, runs: list[RunConfig], number: int = 0) -> None:
        self._given = runs
        super().__init__({"number": number})

    def setup(self, config: dict[str, Any], *_: Any) -> None:  # type: ignore[override]
        super().setup(config, self._given, 1)


def state(run_folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(max(run_folder.glob("checkpoint_*/state.pt")), weights_only=True)["model"]


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_a_trial_goes_epoch_by_epoch_and_from_its_checkpoint(
    run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = PlanConfig(epochs=2, micro_batch_size=10, global_batch_size=20, seed=1)
    small = dataclasses.replace(run, plan=plan, storage_path=str(tmp_path))
    runs = [dataclasses.replace(small, name=name) for name in ("whole", "broken")]
    # What is broken goes on with a stream of Ray's; the rest is the same without.
    inline = [dataclasses.replace(each, pool=PoolConfig(engine="inline")) for each in runs]
    trial = Alone(inline)
    first, second = trial.train(), trial.train()
    assert [first["done"], second["done"]] == [False, True]
    assert [(each["steps"], each["epochs"]) for each in (first, second)] == [(5, 1), (10, 2)]
    assert {"val_accuracy", "val_loss"} <= first.keys()

    trial.cleanup()
    broken = Alone(inline, 1)
    broken.train()
    broken.cleanup()
    resumed = Alone(runs, 1)
    last = resumed.train()
    assert last["done"] and (last["steps"], last["epochs"]) == (10, 2)
    assert last["val_accuracy"] == second["val_accuracy"]
    whole = state(tmp_path / "whole")
    for name, value in state(tmp_path / "broken").items():
        assert torch.equal(value, whole[name]), name
    resumed.cleanup()
    found = read_records((tmp_path / "broken").as_uri())
    assert found is not None
    kinds = [record["kind"] for record in found.kept]
    # Each start tells of its first step as well.
    assert kinds.count("val") == 2 and kinds.count("train") == 4
    assert "epoch" not in capsys.readouterr().out


# A search


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(240)
def test_a_search_that_was_interrupted_goes_on_and_ends_with_a_yaml_that_trains(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, tune = Path(run.storage_path) / "mine", dataclasses.replace(TUNE, trials=2)

    def interrupt() -> None:
        while not list(folder.glob("trials/search-*/checkpoint*/*")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt, daemon=True)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        search(dataclasses.replace(run, name="mine"), tune)
    interrupting.join()
    shown = capsys.readouterr().out
    assert f"go on with --resume {folder}" in shown and not (folder / "best.yaml").exists()
    begun = {path.name for path in folder.glob("tune/search/Trial*")}

    # As a new job would: from what the first one has left behind.
    again, own = parse_job([f"--resume={folder}"], None, tune=TuneConfig)
    assert own["tune"] == tune
    result = search(again, own["tune"])
    assert result["trials"] == 2 and result["failed"] == 0 and result["run_dir"] == str(folder)
    # Those that had begun are not begun anew; the other one may not have begun.
    folders = {path.name for path in folder.glob("tune/search/Trial*")}
    assert begun <= folders and len(folders) == 2

    report = json.loads((folder / "report.json").read_text())
    trials = report["all_trials"]
    assert [trial["number"] for trial in trials] == [0, 1]
    assert all(0 < trial["epochs"] <= 2 and 0 <= trial["accuracy"] <= 1 for trial in trials)
    for number in range(2):  # each epoch once, whatever was interrupted
        found = read_records((folder / "trials" / f"search-{number}").as_uri())
        assert found is not None
        epochs = [record["epoch"] for record in found.kept if record["kind"] == "train"]
        assert epochs == list(range(trials[number]["epochs"]))
    comparison = report["comparison"]
    assert comparison["seeds"] == seeds(TUNE, run) and len(comparison["best"]) == len(comparison["default"]) == 2
    gain = sum(a - b for a, b in zip(comparison["best"], comparison["default"], strict=True)) / 2
    assert result["gain"] == pytest.approx(gain)

    winner = parse_run([f"--config={result['config']}"], None)
    expected = policies(tune, run)[report["best"] if result["better"] else 0]
    assert winner == dataclasses.replace(expected, name="")
    assert yaml.safe_load((folder / "best.yaml").read_text())["plan"]["epochs"] == 2
    mean = sum(comparison["best" if result["better"] else "default"]) / 2
    assert result["val_accuracy"] == pytest.approx(mean)
