"""jobs/tune.py: the list of policies, the comparison, and a search that is interrupted and goes on."""

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
from small_runs import parse_run

from raypipe.commands.settings import parse_command
from raypipe.config import AugmentConfig, RunConfig, StoreConfig
from raypipe.errors import ConfigError
from raypipe.launch.run_checks import check_augment
from raypipe.metrics.records import read_records

JOB: dict[str, Any] = runpy.run_path(
    str(Path(__file__).parents[1] / "jobs" / "tune.py")
)
policies, judge, search = JOB["policies"], JOB["judge"], JOB["search"]
RUN = parse_run([], None)  # of the digits


def test_the_runs_own_policy_and_none_are_the_first_and_none_comes_twice() -> None:
    found = policies(RUN, 40, ())
    nothing = AugmentConfig(mean=RUN.augment.mean, std=RUN.augment.std)
    assert found[:2] == [RUN, dataclasses.replace(RUN, augment=nothing)]
    assert all(found.count(policy) == 1 for policy in found)


def test_each_policy_can_be_run_and_keeps_the_normalisation() -> None:
    steps = [{"HorizontalFlip": None}]
    found = policies(RUN, 40, ("heavy", steps))
    for policy in found:
        assert (policy.augment.mean, policy.augment.std) == (
            RUN.augment.mean,
            RUN.augment.std,
        )
        check_augment(policy.augment)
    assert {json.dumps(policy.transform.train) for policy in found} == {
        '"small"',
        '"heavy"',
        json.dumps(steps),
    }
    unflipped = [
        policy.augment.ops for policy in found if policy.augment.preset == "none"
    ]
    assert not any(
        entry["op"] == "RandomHorizontalFlip" for ops in unflipped for entry in ops
    )


@pytest.mark.parametrize(
    ("first", "second", "better"),
    [
        ([0.98, 0.99, 0.985], [0.97, 0.982, 0.975], True),
        (
            [0.71, 0.81, 0.91],
            [0.70, 0.80, 0.90],
            True,
        ),  # the seeds differ by far more than the policies
        ([0.71, 0.81, 0.91], [0.90, 0.70, 0.80], False),
        ([0.99, 0.97, 0.98], [0.97, 0.98, 0.97], False),  # as likely luck
        ([0.97, 0.97, 0.97], [0.98, 0.98, 0.98], False),
        ([0.98, 0.98, 0.98], [0.98, 0.98, 0.98], False),
    ],
)
def test_only_a_gain_that_the_seeds_agree_on_is_better(
    first: list[float], second: list[float], better: bool
) -> None:
    assert judge(first, second)["better"] is better


def test_what_is_wrong_is_told_before_anything_starts(tmp_path: Path) -> None:
    run = dataclasses.replace(RUN, storage_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs 2 trials, 2 seeds and a validation"):
        search(dataclasses.replace(run, store=StoreConfig("a.lmdb")))
    with pytest.raises(ConfigError, match=r"needs 2 trials"):
        search(run, trials=1)
    with pytest.raises(ConfigError, match="no transform preset 'lightt'"):
        search(run, transforms=("lightt",))
    assert not any(tmp_path.iterdir())


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_an_interrupted_search_goes_on_to_a_yaml_that_trains(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "mine"
    small = [
        "--plan.epochs=4",
        "--plan.micro_batch_size=6",
        "--plan.global_batch_size=24",
        "--transform.size=12",
        "--transform.train=small",
        "--transform.val=resize",
        "--train.model=small",
        "--pool.engine=inline",
    ]
    arguments = [
        *small,
        f"--store.train={stores['train']}",
        f"--store.val={stores['val']}",
        f"--storage_path={folder.parent}",
        "--name=mine",
        "--trials=2",
        "--seeds=2",
    ]

    def interrupt() -> None:
        while not list(folder.glob("trials/search-*/checkpoint*/*")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt, daemon=True)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        search(**parse_command("", search, arguments))
    interrupting.join()
    assert not (folder / "best.yaml").exists()
    begun = {path.name for path in folder.glob("tune/search/Trial*")}

    # As a new job would: from what the first one has left behind.
    again = parse_command("", search, [f"--resume={folder}"])
    assert (again["trials"], again["seeds"]) == (2, 2)
    result = search(**again)
    assert begun <= {path.name for path in folder.glob("tune/search/Trial*")}
    trials = json.loads((folder / "report.json").read_text())["trials"]
    assert all(
        0 < trial["epochs"] <= 2 and 0 <= trial["accuracy"] <= 1 for trial in trials
    )
    for number in range(2):  # each epoch once, whatever was interrupted
        found = read_records((folder / "trials" / f"search-{number}").as_uri())
        epochs = [record["epoch"] for record in found if record["kind"] == "val"]
        assert epochs == list(range(trials[number]["epochs"]))
    gain = (
        sum(a - b for a, b in zip(result["best"], result["default"], strict=True)) / 2
    )
    assert result["gain"] == pytest.approx(gain)
    winner = parse_run([f"--config={folder}/best.yaml"], None)
    expected = policies(again["run"], 2, ())[1 if result["better"] else 0]
    assert (winner.augment, winner.transform) == (expected.augment, expected.transform)
    assert winner.plan == again["run"].plan and isinstance(winner, RunConfig)
