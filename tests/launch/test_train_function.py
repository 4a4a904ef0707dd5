"""The seconds of a run's start, by phase."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from raypipe import progress
from raypipe.launch.train_function import _StartRecord
from raypipe.metrics.records import RecordWriter, read_records
from raypipe.storage.filesystem import open_filesystem


@pytest.fixture
def writer(tmp_path: Path) -> RecordWriter:
    return RecordWriter(open_filesystem(tmp_path.as_uri()), step=0)


def begin_start(writer: RecordWriter, tmp_path: Path) -> _StartRecord:
    def record(kind: str, **values: object) -> None:
        writer.write(kind, 0, **values)

    return _StartRecord(SimpleNamespace(record=record), tmp_path.as_uri())


def test_phases_end_at_the_first_batch_and_are_recorded_once(
    writer: RecordWriter, tmp_path: Path
) -> None:
    now = time.time()
    begun = [progress.Phase("loading", now - 5), progress.Phase("starting", now - 3)]
    progress.begin_phases(begun)
    progress.phase(logging.getLogger("test"), "waiting")
    first = begin_start(writer, tmp_path)
    first.arrived("train")
    first.arrived("train")
    # its trainers were restarted
    begin_start(writer, tmp_path).arrived("train")
    (found,) = [r for r in read_records(tmp_path.as_uri()) if r["kind"] == "phases"]
    assert list(found["seconds"]) == ["loading", "starting", "waiting"]
    assert found["seconds"]["loading"] == pytest.approx(2)
    assert found["seconds"]["starting"] >= 3 and found["seconds"]["waiting"] >= 0
    # the command runs again
    progress.end_phases()
    progress.phase(logging.getLogger("test"), "loading")
    begin_start(writer, tmp_path).arrived("val")
    records = read_records(tmp_path.as_uri())
    assert sum(record["kind"] == "phases" for record in records) == 2
    progress.end_phases()
