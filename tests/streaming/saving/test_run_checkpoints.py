from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import without_ray
from patience import until
from small_runs import small_run

from raypipe.errors import ConfigError
from raypipe.plan.places import Cursor
from raypipe.storage.filesystem import open_filesystem
from raypipe.streaming.run_log import RunLog
from raypipe.streaming.saving import run_checkpoints
from raypipe.streaming.saving.checkpoints import write_checkpoint
from raypipe.streaming.saving.run_checkpoints import RunCheckpoints
from raypipe.streaming.stop_file import request_stop, stop_requested


def states(folder: Path) -> dict[str, dict[str, Any]]:
    """Of the checkpoints of a run, by their places."""
    return {
        path.name[11:23]: torch.load(path / "state.pt", weights_only=True)
        for path in folder.glob("checkpoint_*")
    }


# The writer


def save(
    checkpoints: RunCheckpoints, step: int, state: dict[str, Any], **hooks: Any
) -> None:
    checkpoints.save(state, Cursor(0, step, "f" * 16), {}, {}, **hooks)


def test_one_state_at_a_time_is_written_and_the_caller_goes_on_meanwhile(
    tmp_path: Path,
) -> None:
    writer = RunCheckpoints(tmp_path.as_uri())
    gate = threading.Event()
    value = torch.zeros(3)
    save(writer, 1, {"value": value}, before=gate.wait)
    value += 1
    writer.check()
    assert writer.is_writing and not list(tmp_path.glob("checkpoint_*"))
    threading.Timer(0.1, gate.set).start()
    save(writer, 2, {"value": value})  # waits for the first
    assert list(tmp_path.glob("checkpoint_0000_0000001_*/state.pt"))
    writer.wait()
    found = {
        place: state["value"].tolist() for place, state in states(tmp_path).items()
    }
    assert found == {"0000_0000001": [0, 0, 0], "0000_0000002": [1, 1, 1]}


@pytest.mark.parametrize("way", ["check", "wait", "save"])
def test_an_error_of_the_writer_is_raised_once_by_what_is_called_next(
    way: str, tmp_path: Path
) -> None:
    writer = RunCheckpoints(tmp_path.as_uri())

    def fail() -> None:
        raise ConfigError("no space left")

    save(writer, 1, {}, before=fail)
    until(lambda: not writer.is_writing)
    with pytest.raises(ConfigError, match="no space left"):
        save(writer, 2, {}) if way == "save" else getattr(writer, way)()
    writer.check()
    save(writer, 3, {})
    writer.wait()


# The request to stop


def test_a_request_to_stop_is_seen_though_storage_fails_at_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypipe.streaming.run_log._LOOK_S", 0.01)
    looks = list[str]()

    def look() -> bool:
        looks.append(threading.current_thread().name)
        if len(looks) in (2, 3):
            raise OSError("connection reset")
        return stop_requested(tmp_path.as_uri())

    run_log = RunLog(1, 0, open_filesystem(tmp_path.as_uri()))
    run_log.stop_requested = look
    run_log.begin(False, lambda: {"settings": {"to_step": 1}}, None)
    until(lambda: len(looks) > 4)
    assert not run_log.stops and set(looks) == {"raypipe-waiting"}
    request_stop(tmp_path.as_uri())
    until(lambda: run_log.stops)
    run_log.closed()
    assert "raypipe-waiting" not in {thread.name for thread in threading.enumerate()}


# In the loop


def test_a_failed_checkpoint_ends_the_run_and_leaves_the_ones_before(
    stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = small_run(
        tmp_path, stores["train"], stores["val"], 2, 4, checkpoint_interval=1
    )
    written = list[str]()

    def write(*args: Any, **options: Any) -> str:
        time.sleep(0.15)  # longer than some steps
        if len(written) == 2:
            raise ConfigError("checkpoint 3 cannot be written: no space left")
        written.append(write_checkpoint(*args, **options))
        return written[-1]

    monkeypatch.setattr(run_checkpoints, "write_checkpoint", write)
    # of other tests' runs, which follow a stream a while longer
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="checkpoint 3 cannot be written"):
        without_ray.train(dataclasses.replace(run, name="full"))
    assert sorted(states(tmp_path / "full")) == ["0000_0000001", "0000_0000002"]

    def left() -> list[str]:
        names = [thread.name for thread in set(threading.enumerate()) - before]
        return [name for name in names if name.startswith("raypipe-")]

    until(lambda: not left(), left)
