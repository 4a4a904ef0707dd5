from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from raypipe import runlog
from raypipe.filesystem import as_uri
from raypipe.runlog import RunLog, remove_stop, request_stop, stop_requested


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def written(run: Path, steps: range, at: int = 0) -> None:
    log = RunLog(run.as_uri(), at)
    for step in steps:
        log.write("train", step, loss=step / 2)
    log.close()


def test_records_hold_kind_step_and_values_in_order(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    log = RunLog(run.as_uri(), 0)
    log.write("train", 4, loss=0.5, epoch=0)
    log.write("val", 5, accuracy=None)  # no scalar, no event
    log.close()
    assert records(run) == [
        {"kind": "train", "step": 4, "loss": 0.5, "epoch": 0},
        {"kind": "val", "step": 5, "accuracy": None},
    ]
    assert list((run / "tensorboard").glob("events.*"))


def test_records_are_readable_before_the_run_ends(tmp_path: Path) -> None:
    log = RunLog(tmp_path.as_uri(), 0)
    log.write("train", 1, loss=1.0)
    assert [record["step"] for record in records(tmp_path)] == [1]
    log.close()


def test_resume_drops_later_steps_and_records_each_once(tmp_path: Path) -> None:
    written(tmp_path, range(1, 7))
    written(tmp_path, range(4, 9), at=3)
    assert [record["step"] for record in records(tmp_path)] == list(range(1, 9))


def test_resume_drops_a_last_line_that_a_crash_cut_short(tmp_path: Path) -> None:
    written(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    written(tmp_path, range(4, 6), at=9)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5]


def test_resume_keeps_what_a_run_recorded_at_the_very_step(tmp_path: Path) -> None:
    written(tmp_path, range(1, 4))
    written(tmp_path, range(0), at=2)
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


def test_a_remote_run_is_copied_at_each_sync_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())

    def from_uri(uri: str) -> tuple[pyarrow.fs.FileSystem, str]:
        return remote, uri.removeprefix("bucket://")

    monkeypatch.setattr(runlog, "open_filesystem", from_uri)
    run = tmp_path / "runs" / "mine"
    log = RunLog("bucket://runs/mine", 0)
    log.write("train", 1, loss=1.0)
    assert not run.exists()
    log.sync()
    assert [record["step"] for record in records(run)] == [1]
    log.write("train", 2, loss=1.0)
    log.close()
    assert [record["step"] for record in records(run)] == [1, 2]
    log = RunLog("bucket://runs/mine", 1)
    log.write("train", 2, loss=0.5)
    log.close()
    assert [(record["step"], record["loss"]) for record in records(run)] == [(1, 1.0), (2, 0.5)]


def test_a_run_folder_with_a_space_is_read_back(tmp_path: Path) -> None:
    run = tmp_path / "my runs"
    log = RunLog(as_uri(str(run)), 0)
    log.write("train", 1, loss=1.0)
    log.close()
    assert [record["step"] for record in records(run)] == [1]


def test_a_run_is_asked_to_stop_until_the_request_is_taken_back(tmp_path: Path) -> None:
    run = tmp_path / "my runs"
    run.mkdir()
    assert not stop_requested(run.as_uri())
    remove_stop(run.as_uri())  # there is none
    for _ in range(2):  # a second request is none too many
        request_stop(run.as_uri())
        assert stop_requested(run.as_uri())
    assert [path.name for path in run.iterdir()] == ["stop"]
    remove_stop(run.as_uri())
    assert not stop_requested(run.as_uri()) and not list(run.iterdir())


def test_no_stop_is_requested_of_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    assert not stop_requested((tmp_path / "later").as_uri())
