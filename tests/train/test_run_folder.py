from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pyarrow.fs
import pytest
from full_disk import fill, make_room

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.metrics.records import SAMPLES, read_records
from raypipe.plan.cursor import Cursor
from raypipe.plan.places import MicroBatchId
from raypipe.storage import files
from raypipe.storage.filesystem import as_uri, open_filesystem
from raypipe.train import run_folder
from raypipe.train.checkpoints import write_checkpoint
from raypipe.train.run_folder import (
    RunLog,
    check_run_folder,
    located,
    remove_stop,
    request_stop,
    stop_requested,
    store_config,
)


def steps(run: Path | str, kind: str = "train") -> list[int]:
    found = read_records(run if isinstance(run, str) else run.as_uri())
    assert found is not None and not found.unreadable
    return [record["step"] for record in found.kept if record.get("kind") == kind]


def written(run: Path, numbers: range, at: int = 0) -> None:
    log = RunLog(run.as_uri(), at)
    for step in numbers:
        log.write("train", step, loss=step / 2)
    log.close()


# The run's folder


def test_a_new_run_wants_no_run_and_a_resume_wants_one(tmp_path: Path) -> None:
    uri = (tmp_path / "mine").as_uri()
    check_run_folder(uri, resume=False)
    with pytest.raises(ConfigError, match=r"no run at .*/mine: expected is the folder"):
        check_run_folder(uri, resume=True)
    store_config(RunConfig(), uri)
    check_run_folder(uri, resume=True)
    with pytest.raises(ConfigError, match=r"a run at .*/mine already: .*--resume, or choose --name"):
        check_run_folder(uri, resume=False)


def test_a_folder_that_holds_no_run_may_become_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    check_run_folder(tmp_path.as_uri(), resume=False)


def test_checkpoints_make_a_run_even_where_its_configuration_was_lost(tmp_path: Path) -> None:
    write_checkpoint(tmp_path.as_uri(), Cursor(0, 1, "f" * 16), b"x", {})
    check_run_folder(tmp_path.as_uri(), resume=True)
    with pytest.raises(ConfigError, match=r"a run at .* already"):
        check_run_folder(tmp_path.as_uri(), resume=False)


def test_starts_of_one_second_get_names_of_their_own_and_a_given_name_is_had_once(tmp_path: Path) -> None:
    run = RunConfig(storage_path=str(tmp_path / "runs"))
    with located(run) as (first, first_uri, _), located(run) as (second, second_uri, _):
        assert first_uri != second_uri and first.name != second.name
        assert all((tmp_path / "runs" / each.name / "lease").is_dir() for each in (first, second))
        with (
            pytest.raises(ConfigError, match=rf"{second.name} is in use by process {os.getpid()} on"),
            located(dataclasses.replace(run, name=second.name)),
        ):
            pass
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("command", ["train", "search"])
def test_a_run_in_rays_copy_of_a_jobs_folder_is_refused_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    with (
        pytest.raises(
            ConfigError, match=r"storage_path leads to .*temporary copy .* set storage_path to .*s3://bucket/runs"
        ),
        located(RunConfig(), "tune-" if command == "search" else ""),
    ):
        pass
    assert not list(copy.iterdir())


# The record


def test_records_hold_kind_step_and_values_in_order(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    log = RunLog(run.as_uri(), 0, workers=2)
    log.write("train", 4, loss=0.5, epoch=0)
    log.write("val", 5, accuracy=None)  # no scalar, no event
    log.close()
    assert [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] == [
        {"kind": "start", "step": 0, "workers": 2, "validates": False},
        {"kind": "train", "step": 4, "loss": 0.5, "epoch": 0},
        {"kind": "val", "step": 5, "accuracy": None},
    ]


def test_tensorboard_reads_the_events_and_hides_those_that_were_done_again(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    written(tmp_path, range(1, 4))
    written(tmp_path, range(3, 5), at=2)
    found = []
    for path in sorted((tmp_path / "tensorboard").glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            length = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    values = [(event.step, v.tag, v.simple_value) for event in found for v in event.summary.value]
    assert values == [(step, "train/loss", step / 2) for step in (1, 2, 3, 3, 4)]
    assert [e.step for e in found if e.session_log.status == SessionLog.START] == [1, 3]


def test_records_are_readable_before_the_run_ends(tmp_path: Path) -> None:
    log = RunLog(tmp_path.as_uri(), 0)
    log.write("train", 1, loss=1.0)
    assert steps(tmp_path) == [1]
    log.close()


def test_a_resume_records_each_step_once_and_loses_no_line(tmp_path: Path) -> None:
    written(tmp_path, range(1, 7))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    written(tmp_path, range(4, 9), at=3)
    assert steps(tmp_path) == list(range(1, 9))
    written(tmp_path, range(0), at=0)  # a resume that found no checkpoint
    assert steps(tmp_path) == [] and steps(tmp_path, "start") == [0, 3, 0]
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)


def test_a_line_that_a_crash_cut_short_or_that_is_foreign_does_not_stop_a_resume(tmp_path: Path) -> None:
    written(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'null\n\xff\n{"kind": "train", "st')
    written(tmp_path, range(4, 6), at=9)
    found = read_records(tmp_path.as_uri())
    assert found is not None and found.unreadable == 3
    assert [record["step"] for record in found.kept if record["kind"] == "train"] == [1, 2, 3, 4, 5]


def test_samples_are_recorded_step_by_step_and_once(tmp_path: Path) -> None:
    def log_samples(log: RunLog, step: int) -> None:
        log.write_samples([(MicroBatchId("train", 0, step - 1, micro), [step, micro]) for micro in (0, 1)], step)

    for start, end in ((0, 4), (2, 5)):
        log = RunLog(tmp_path.as_uri(), start)
        for step in range(start + 1, end):
            log_samples(log, step)
        log.close()
    found = read_records(tmp_path.as_uri(), SAMPLES)
    assert found is not None
    assert [r["indices"] for r in found.kept if "indices" in r] == [[s, m] for s in range(1, 5) for m in (0, 1)]


def test_a_full_disk_neither_ends_the_run_nor_holds_it_up_and_what_was_recorded_stays(
    full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(full_disk, range(1, 4))
    fill(full_disk)
    log = RunLog(full_disk.as_uri(), 3)  # a resume
    for step in range(4, 60):
        log.write("train", step, loss=0.5, text="x" * 300)
        log.sync()
    log.close()
    (warning,) = [record.message for record in caplog.records]
    assert "No space left on device; the run goes on, and its record has gaps" in warning
    make_room(full_disk)
    written(full_disk, range(60, 62), at=59)
    found = read_records(full_disk.as_uri())
    assert found is not None
    kept = [record["step"] for record in found.kept if record["kind"] == "train"]
    assert kept[:3] == [1, 2, 3] and kept[-2:] == [60, 61]


def test_a_remote_run_is_copied_at_each_sync_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())

    def from_uri(uri: str) -> tuple[pyarrow.fs.FileSystem, str]:
        return (remote, uri.removeprefix("bucket://")) if uri.startswith("bucket:") else open_filesystem(uri)

    for module in (run_folder, files):
        monkeypatch.setattr(module, "open_filesystem", from_uri)
    run = tmp_path / "runs" / "mine"
    log = RunLog("bucket://runs/mine", 0)
    log.write("train", 1, loss=1.0)
    assert not run.exists()
    log.sync()
    assert steps(run) == [1]
    log.write("train", 2, loss=1.0)
    log.close()
    assert steps(run) == [1, 2]
    log = RunLog("bucket://runs/mine", 1)
    log.write("train", 2, loss=0.5)
    log.close()
    assert steps(run) == [1, 2] and json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["loss"] == 0.5


def test_the_records_of_a_run_in_a_bucket_that_is_gone_are_kept_on_this_machine(
    bucket: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(f"{bucket}/runs/mine", 0)
    log.write("train", 1, loss=1.0)
    log._filesystem = open_filesystem(f"{bucket}-gone")[0]
    log._remote = f"{bucket[5:]}-gone/runs/mine"
    log.close()
    (warning,) = [record.message for record in caplog.records]
    folder = Path(warning.split("which is left in ")[1].split(",")[0])
    assert steps(folder) == [1]


def test_a_run_folder_with_a_space_is_read_back(tmp_path: Path) -> None:
    run = tmp_path / "my runs"
    log = RunLog(as_uri(str(run)), 0)
    log.write("train", 1, loss=1.0)
    log.close()
    assert steps(run) == [1]


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
