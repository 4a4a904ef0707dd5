from __future__ import annotations

from pathlib import Path

import pyarrow.fs
import pytest
from full_disk import fill, make_room

from raypipe.metrics.records import RecordWriter, read_records
from raypipe.storage.filesystem import open_filesystem


def steps(run: Path, kind: str = "train") -> list[int]:
    found = read_records(run.as_uri())
    return [record["step"] for record in found if record.get("kind") == kind]


def written(run: Path, numbers: range, at: int = 0) -> None:
    log = RecordWriter(open_filesystem(run.as_uri()), step=at)
    for step in numbers:
        log.write("train", step, loss=step / 2)
    log.close()


def test_records_hold_kind_step_and_values_in_order(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    log = RecordWriter(open_filesystem(run.as_uri()), step=0, workers=2)
    log.write("train", 4, loss=0.5, epoch=0)
    log.write("val", 5, accuracy=None)
    log.close()
    assert read_records(run.as_uri()) == [
        {"kind": "start", "step": 0, "workers": 2},
        {"kind": "train", "step": 4, "loss": 0.5, "epoch": 0},
        {"kind": "val", "step": 5, "accuracy": None},
    ]


def test_a_resume_records_each_step_once_and_loses_no_line(tmp_path: Path) -> None:
    written(tmp_path, range(1, 7))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    written(tmp_path, range(4, 9), at=3)
    assert steps(tmp_path) == list(range(1, 9))
    written(tmp_path, range(0), at=0)  # a resume that found no checkpoint
    assert steps(tmp_path) == [] and steps(tmp_path, "start") == [0, 3, 0]
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)


def test_a_full_disk_neither_ends_nor_delays_a_run_and_records_stay(
    full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(full_disk, range(1, 4))
    fill(full_disk)
    log = RecordWriter(open_filesystem(full_disk.as_uri()), step=3)  # a resume
    for step in range(4, 60):
        log.write("train", step, loss=0.5, text="x" * 300)
        log.sync()
    log.close()
    (warning,) = caplog.messages
    assert (
        "No space left on device; the run goes on, and its record has gaps" in warning
    )
    make_room(full_disk)
    written(full_disk, range(60, 62), at=59)
    found = read_records(full_disk.as_uri())
    kept = [record["step"] for record in found if record["kind"] == "train"]
    assert kept[:3] == [1, 2, 3] and kept[-2:] == [60, 61]


def test_a_remote_run_is_copied_at_each_sync_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    run = tmp_path / "runs" / "mine"
    log = RecordWriter((remote, "runs/mine"), step=0)
    log.write("train", 1, loss=1.0)
    assert not run.exists()
    log.sync()
    assert steps(run) == [1]
    log.write("train", 2, loss=1.0)
    log.close()
    assert steps(run) == [1, 2]
    log = RecordWriter((remote, "runs/mine"), step=1)
    log.write("train", 2, loss=0.5)
    log.close()
    assert steps(run) == [1, 2]
    assert read_records(run.as_uri())[-1]["loss"] == 0.5


def test_records_are_kept_here_if_their_bucket_is_gone(
    bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = RecordWriter(open_filesystem(f"{bucket}/runs/mine"), step=0)
    log.write("train", 1, loss=1.0)
    log._filesystem = open_filesystem(f"{bucket}-gone")[0]
    log._remote = f"{bucket[5:]}-gone/runs/mine"
    log.close()
    (warning,) = caplog.messages
    folder = Path(warning.split("which is left in ")[1].split(",")[0])
    assert steps(folder) == [1]
