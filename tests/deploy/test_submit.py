"""deploy/submit.py: one run per name, whoever submits it how often, with the run's own exit code."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SUBMIT = runpy.run_path(str(Path(__file__).parents[2] / "deploy" / "submit.py"))
attached, follow = SUBMIT["attached"], SUBMIT["follow"]


class Jobs:
    """The jobs of a cluster, as Ray's client gives them. `answers` are taken in turn by `get_job_info`."""

    def __init__(self, **statuses: str) -> None:
        self.jobs = {
            name.replace("_", "-"): status for name, status in statuses.items()
        }
        self.answers: list[Any] = []
        self.log = ""

    def list_jobs(self) -> list[Any]:
        return [
            SimpleNamespace(submission_id=name, status=status)
            for name, status in self.jobs.items()
        ]

    def submit_job(self, entrypoint: str, submission_id: str) -> str:
        assert submission_id not in self.jobs, "Ray refuses an id twice"
        self.jobs[submission_id] = "PENDING"
        return submission_id

    def get_job_info(self, submission_id: str) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        status, code = answer
        return SimpleNamespace(status=status, driver_exit_code=code)

    def get_job_logs(self, submission_id: str) -> str:
        self.log += f"line {len(self.log.splitlines())}\n"
        return self.log


@pytest.mark.parametrize("status", ["PENDING", "RUNNING"])
def test_a_run_that_goes_on_is_attached_to_and_not_started_twice(status: str) -> None:
    jobs = Jobs(first_1="FAILED", first_2=status, other_3="SUCCEEDED")
    assert attached(jobs, "first", "command") == "first-2"
    assert len(jobs.jobs) == 3


@pytest.mark.parametrize("status", ["FAILED", "STOPPED", "SUCCEEDED"])
def test_a_run_that_has_ended_is_submitted_under_the_next_number(status: str) -> None:
    jobs = Jobs(first_9="FAILED", first_10=status, first_run_11="RUNNING")
    assert attached(jobs, "first", "command") == "first-11"
    assert attached(Jobs(), "first", "command") == "first-1"
    assert attached(jobs, "first", "command") == "first-11"  # by a second pod


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 75, 75),
        ("FAILED", 1, 1),
        ("FAILED", None, 1),
        ("STOPPED", None, 1),
    ],
)
def test_the_exit_code_is_the_runs_own(
    status: str, code: int | None, expected: int
) -> None:
    jobs = Jobs()
    jobs.answers = [(status, code)]
    assert follow(jobs, "first-1", every_s=0) == expected


def test_the_log_goes_on_after_a_lost_connection(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = Jobs()
    lost = ConnectionError("no route")
    jobs.answers = [("RUNNING", None), lost, lost, ("RUNNING", None), ("SUCCEEDED", 0)]
    assert follow(jobs, "first-1", every_s=0) == 0
    assert capsys.readouterr().out == "line 0\nline 1\nline 2\n"


def test_a_cluster_that_is_gone_is_tried_again_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = Jobs()
    jobs.answers = [ConnectionError("no route")]
    assert follow(jobs, "first-1", every_s=0, silent_s=0.01) == 75
    assert "has not answered" in capsys.readouterr().err
