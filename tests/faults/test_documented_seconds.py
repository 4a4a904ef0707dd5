"""docs/failures.md says after how many seconds what happens: the figures are those of the code."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from ray._raylet import Config
from ray.dashboard.modules.job.job_supervisor import JobSupervisor

from raypipe.commands import status
from raypipe.config import TrainConfig, TransformConfig
from raypipe.rayext import controller, processes, train_runs, watchdog
from raypipe.storage import lease, retries
from raypipe.streaming import run_log, supervisor

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text()
# In the clusters that raypipe ships.
CLUSTERS = [ROOT / "cluster.yaml", *sorted((ROOT / "deploy").glob("*.yaml"))]


def rows() -> dict[str, list[str]]:
    """The cells of the table of watchers, by the process that is watched."""
    _, _, after = PAGE.partition("### Who watches whom")
    lines = [
        line
        for line in after.partition("\n## ")[0].splitlines()
        if line.startswith("|")
    ][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {process: others for process, *others in cells}


def seconds(cell: str) -> list[int]:
    return [int(number) for number in re.findall(r"(\d+)(?: s|\))", cell)]


def turns_until(period_s: float, is_over: Callable[[float], bool]) -> float:
    """The time of the first turn, one each period, that finds that it is over."""
    now = 0.0
    while not is_over(now):
        now += period_s
    return now


def of_stream() -> float:
    """A stopped actor, reader, trainer or coordinator: the stream is still, and then a turn looks twice."""
    return watchdog._STILL_S + watchdog._PERIOD_S + processes._SURE_S


def of_supervisor() -> float:
    """A stopped Supervisor: a rank's question, turns that wait for its answer, and two looks."""
    turn_s = 2 * watchdog._SUPERVISOR_PERIOD_S  # a pause, and a wait for the answer
    asked_s = watchdog._SUPERVISOR_PERIOD_S
    checked_s = (
        turns_until(turn_s, lambda now: now >= watchdog._SUPERVISOR_ANSWER_S)
        + watchdog._SUPERVISOR_PERIOD_S
    )
    return asked_s + checked_s + processes._SURE_S


def of_controller() -> float:
    """A stopped controller of Ray Train: turns of the driver that see it so, and a last look."""
    return controller._PERIOD_S * controller._STOPPED_TURNS + processes._SURE_S


def of_trainer() -> float:
    """A dead trainer: Ray Train's controller asks all of them once a period, which raypipe sets."""
    return train_runs.HEALTH_CHECK_INTERVAL_S


def health_checks(file: Path) -> dict[str, int]:
    """How the head of a cluster looks after its nodes."""
    found = re.findall(r'RAY_health_check_(\w+)(?:=|, value: ")(\d+)', file.read_text())
    return {name: int(value) for name, value in found}


def of_node(period_ms: int, timeout_ms: int, threshold: int) -> tuple[float, float]:
    """A node that is gone refuses each question at once; a frozen one leaves it without an answer."""
    return threshold * period_ms / 1000, threshold * (period_ms + timeout_ms) / 1000


@pytest.mark.parametrize(
    ("process", "column", "watcher", "found_s"),
    [
        ("actor, reader", 1, "supervisor", of_stream),
        ("supervisor", 1, "every rank", of_supervisor),
        ("trainer, coordinator", 0, "controller", of_trainer),
        ("Ray Train's controller", 1, "driver", of_controller),
        ("head", 0, "driver", lambda: controller._FIRST_TOLD_S),
        (
            "head",
            2,
            "the run ends",
            lambda: controller._GONE_SHARE * controller._RAY_ENDS_S,
        ),
    ],
)
def test_the_seconds_of_a_watcher_are_those_of_its_periods(
    process: str, column: int, watcher: str, found_s: Callable[[], float]
) -> None:
    cell = rows()[process][column]
    assert cell.startswith(watcher)
    assert seconds(cell) == [math.ceil(found_s())], cell


def test_the_seconds_of_a_node_are_those_of_the_clusters_and_of_ray() -> None:
    config, shipped = Config, health_checks(CLUSTERS[0])
    found = of_node(
        shipped["period_ms"], shipped["timeout_ms"], shipped["failure_threshold"]
    )
    default = of_node(
        config.health_check_period_ms(),
        config.health_check_timeout_ms(),
        config.health_check_failure_threshold(),
    )
    for cell, ours, rays in zip(rows()["CPU node"][:2], found, default, strict=True):
        assert seconds(cell) == [ours, rays], cell
    for file in CLUSTERS[1:]:
        assert health_checks(file) in (shipped, {}), file


TRANSFORM = TransformConfig()
JOB_STOP = re.findall(r"JOB_STOP_WAIT_TIME_S=(\d+)", CLUSTERS[0].read_text())[0]
SENTENCES = [
    f"rank 0 has reported within {status._LATE * run_log._STATUS_S:.0f} s; in object storage within "
    f"{status._LATE * run_log._STATUS_REMOTE_S / 60:.0f} minutes",
    f"Waits of {run_log._FIRST_TOLD_S:.0f} s or more are logged.",
    f"after `transform.time_limit_s` ({TRANSFORM.time_limit_s / 60:.0f} minutes)",
    f"within `train.stop_grace_s` ({TrainConfig().stop_grace_s:.0f} s), then exit code {os.EX_TEMPFAIL}",
    f"within `RAY_JOB_STOP_WAIT_TIME_S` ({JobSupervisor.DEFAULT_RAY_JOB_STOP_WAIT_TIME_S} s; "
    f"{JOB_STOP} in `cluster.yaml`)",
    f"for `RAYPIPE_STORAGE_PATIENCE_S` ({retries._PATIENCE_S / 60:.0f} min), with a line every "
    f"{retries._LOG_EVERY_S:.0f} s",
    {0.2: "requests are repeated for a fifth of that"}.get(
        retries._DENIED_SHARE, "another share"
    ),
    {60.0: "free at once on the same machine, after a minute on another"}.get(
        lease._EXPIRES_S, "another time"
    ),
    # Its first death may have been of any sample of its block.
    {3: "a sample that has ended three processes"}.get(
        1 + supervisor._DEATHS_AT_A_SAMPLE, "another number"
    ),
    {6: "a reader dies six times at one row group"}.get(
        supervisor.MAX_ATTEMPTS, "another number"
    ),
    f"`transform.max_bad_fraction` ({100 * TRANSFORM.max_bad_fraction:.0f} %) bad samples",
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_other_figures_of_the_page_are_those_of_the_code(sentence: str) -> None:
    assert sentence in " ".join(PAGE.split())
