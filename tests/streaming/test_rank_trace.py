"""A rank's trace: its file, its time, and one at a time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import picture
from small_streams import spec_of
from traces import checked_file, processes, slices, ways
from without_ray import every_batch

import raypipe
from raypipe.config import PlanConfig
from raypipe.errors import ConfigError
from raypipe.metrics.tracer import begin_recording, end_recording
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.spec import StreamSpec


def stream(epochs: int = 2) -> StreamSpec:
    store = MemoryStore([picture(i, 9, 9) for i in range(8)], [0] * 8)
    plan = PlanConfig(epochs=epochs, micro_batch_size=2, global_batch_size=4)
    return spec_of(store, store, plan=plan)


def test_a_stream_in_one_process_has_a_trace(tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = tmp_path / "trace.json"
    model = torch.nn.Linear(2, 2)
    with raypipe.loader(stream(), run_dir=run, trace=file) as loader:
        for batch in every_batch(loader):
            if batch.ends_split:
                loader.checkpoint(model=model)
    events = checked_file(file)
    assert processes(events) == {"trainer 0"}
    assert len(slices(events, "make")) == len(slices(events, "read")) == 16
    assert len(slices(events, "first batch")) == 1
    assert len(slices(events, "wait")) == 15
    assert len(slices(events, "wait for a checkpoint")) == 4
    steps = [event["name"] for event in events if event["name"].startswith("step ")]
    assert len(steps) == 8 and "step val-e0001-s000001" in steps
    found = ways(events)
    assert len(found) == 16
    assert {way[-1] for way in found.values()} == {"compute"}
    assert any(event["name"] == "memory MB" for event in events)


def test_after_its_time_a_trace_is_written_and_the_stream_goes_on(
    tmp_path: Path,
) -> None:
    file = tmp_path / "trace.json"
    loader = raypipe.loader(stream(epochs=50), trace=file, trace_s=0.1)
    batches = every_batch(loader)
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        next(batches)
        time.sleep(0.02)
    traced = slices(checked_file(file), "compute")
    remaining = sum(1 for _ in batches)
    assert remaining > 0 and len(traced) < 400
    before = file.stat().st_mtime_ns
    loader.close()
    assert file.stat().st_mtime_ns == before
    # its process may be traced again
    assert begin_recording()
    end_recording()


def test_one_process_makes_one_trace_at_a_time(tmp_path: Path) -> None:
    with (
        raypipe.loader(stream(), trace=tmp_path / "first.json"),
        pytest.raises(ConfigError, match=r"second\.json: this process already"),
    ):
        raypipe.loader(stream(), trace=tmp_path / "second.json")
    with raypipe.loader(stream(), trace=tmp_path / "third.json"):
        pass
    assert (tmp_path / "third.json").exists()


def test_a_trace_without_a_folder_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="existing, writable folder"):
        raypipe.loader(stream(), trace=tmp_path / "none" / "trace.json")


def test_a_full_disk_does_not_end_the_stream(tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "folder" / "trace.json"
    file.parent.mkdir()
    with raypipe.loader(stream(), trace=file) as loader:
        batches = every_batch(loader)
        next(batches)
        file.parent.rmdir()
        assert sum(1 for _ in batches) == 15
    assert "the trace cannot be written" in caplog.text
