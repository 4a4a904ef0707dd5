from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml

from raypipe.commands.cli import parse_job, parse_run
from raypipe.commands.policies import Policy, TuneConfig, policies, seeds
from raypipe.commands.trial_queue import Outcome
from raypipe.commands.tune import _anywhere, best_of, final_runs, milestones, search, search_runs
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
from raypipe.rayext.cluster import Resources

TUNE = TuneConfig(trials=3, epochs=2, repeats=2, final_epochs=1, seed=1, max_concurrent=1)


@pytest.fixture
def run(stores: dict[str, Path], tmp_path: Path) -> RunConfig:
    return RunConfig(
        store=StoreConfig(str(stores["train"]), str(stores["val"])),
        plan=PlanConfig(epochs=4, micro_batch=6, per_step=4, seed=1),
        transform=TransformConfig(train="small", val="resize", size=12),
        pool=PoolConfig(max_actors=1),
        train=TrainConfig(model="small", optimizer="adamw", lr=0.003),
        augment=AugmentConfig(mixup_alpha=0.2),
        runs=str(tmp_path / "runs"),
    )


def outcome(number: int, epochs: int, accuracy: float, loss: float = 1.0, error: str = "") -> Outcome:
    return Outcome(number, epochs, epochs == 4, accuracy, loss, error)


# What is trained


def test_trials_differ_in_their_policies_alone(run: RunConfig) -> None:
    chosen = policies(TUNE, run)
    trials = search_runs(run, TUNE, chosen)
    assert [Policy.of(trial) for trial in trials] == chosen
    same = {repr(dataclasses.replace(Policy.of(run).applied(trial), name="")) for trial in trials}
    assert len(same) == 1
    assert all(trial.plan == dataclasses.replace(run.plan, epochs=2) for trial in trials)
    assert len({trial.name for trial in trials}) == 3


def test_a_search_takes_half_of_the_epochs_and_stops_none_in_the_first_half_of_a_trial(run: RunConfig) -> None:
    settings = dataclasses.replace(run, plan=dataclasses.replace(run.plan, epochs=10))
    assert milestones(settings, TuneConfig()) == (2, 5, 2.0)
    assert milestones(settings, TuneConfig(epochs=9, grace_epochs=3, keep=0.25)) == (3, 9, 4.0)
    assert milestones(dataclasses.replace(run, plan=PlanConfig(epochs=1)), TuneConfig()) == (1, 1, 2.0)


def test_the_best_and_the_default_are_compared_with_the_same_new_seeds(run: RunConfig) -> None:
    best = policies(TUNE, run)[2]
    finals = final_runs(run, TUNE, best)
    assert [Policy.of(final) for final in finals] == [best, best, Policy.of(run), Policy.of(run)]
    assert [final.plan.seed for final in finals] == 2 * seeds(TUNE, run)
    assert {final.store for final in finals} == {run.store}
    assert final_runs(run, TuneConfig(), best)[0].plan.epochs == run.plan.epochs


def test_they_are_compared_on_a_store_that_the_search_has_not_seen_where_there_is_one(run: RunConfig) -> None:
    store = dataclasses.replace(run.store, val_leave_out="bad.json")
    unseen = dataclasses.replace(TUNE, final_val="/data/test.lmdb")
    finals = final_runs(dataclasses.replace(run, store=store), unseen, Policy.of(run))
    assert {(final.store.val, final.store.val_leave_out) for final in finals} == {("/data/test.lmdb", "")}


def test_the_best_of_the_trials_went_all_the_way_and_is_not_the_default() -> None:
    trials = [outcome(0, 4, 0.99), outcome(1, 4, 0.96), outcome(2, 2, 0.98), outcome(3, 4, 0.97, 0.5)]
    assert best_of(trials) == 3
    assert best_of([*trials, outcome(4, 4, 0.97, 0.4), outcome(5, 4, 1.0, error="broken")]) == 4
    with pytest.raises(RaypipeError, match="every trial failed, the last one so: broken"):
        best_of([outcome(0, 4, 0.9), outcome(1, 0, 0.0, error="broken")])


# What is wrong is told before anything starts


def test_trials_find_stores_by_addresses_that_hold_in_any_folder(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    store = StoreConfig("train.lmdb", "s3://bucket/val.lmdb", leave_out="bad.json")
    here = tmp_path.as_posix()
    assert _anywhere(store) == StoreConfig(f"{here}/train.lmdb", store.val, leave_out=f"{here}/bad.json")
    tune = dataclasses.replace(TUNE, final_val="test.lmdb")
    assert {final.store.val for final in final_runs(run, tune, Policy.of(run))} == {f"{here}/test.lmdb"}


def test_a_search_without_validation_is_an_error(run: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"needs a validation: set store\.val"):
        search(dataclasses.replace(run, store=StoreConfig(run.store.train)), TUNE)


def test_an_unknown_transform_is_an_error(run: RunConfig) -> None:
    with pytest.raises(ConfigError, match="no transform preset 'lightt'"):
        search(run, dataclasses.replace(TUNE, trials=20, transforms=["lightt"]))
    assert not Path(run.runs).exists()


def test_a_search_does_not_go_on_in_a_smaller_cluster(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(run.runs) / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    share = {"concurrent": 4, "gpu": False, "cpus": 1.0, "actors": 1, "cpus_per_actor": 1.0}
    (folder / "share.json").write_text(json.dumps(share))
    for name in ("connect", "preflight"):
        monkeypatch.setattr(f"raypipe.commands.tune.{name}", lambda *_: None)
    monkeypatch.setattr("raypipe.commands.tune.cluster_resources", lambda: Resources(4, 0, 4, 0))
    with pytest.raises(ResourceError, match=r"begun with 4 at a time.* 8 CPUs in all; the cluster has 4 CPUs"):
        search(dataclasses.replace(run, resume=str(folder)), TUNE)


# A search


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(240)
def test_a_search_that_was_interrupted_goes_on_and_ends_with_a_yaml_that_trains(
    run: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, tune = Path(run.runs) / "mine", dataclasses.replace(TUNE, trials=2)

    def interrupt() -> None:
        while not list(folder.glob("tune/search/Trial*/checkpoint*/*")):
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
    assert winner == dataclasses.replace(expected.applied(run), name="")
    assert yaml.safe_load((folder / "best.yaml").read_text())["plan"]["epochs"] == 4
    mean = sum(comparison["best" if result["better"] else "default"]) / 2
    assert result["val_accuracy"] == pytest.approx(mean)
