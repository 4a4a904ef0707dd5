from __future__ import annotations

import dataclasses
import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import without_ray
from patience import until
from small_runs import small_run

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import Cursor
from raypipe.storage.filesystem import open_filesystem
from raypipe.streaming.run_log import RunLog
from raypipe.streaming.saving import run_checkpoints
from raypipe.streaming.saving.checkpoints import (
    write_checkpoint,
)
from raypipe.streaming.saving.run_checkpoints import RunCheckpoints
from raypipe.streaming.stop_file import request_stop, stop_requested


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


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
    assert any(path.name[16:23] == "0000001" for path in tmp_path.iterdir())
    writer.wait()
    for step, wanted in ((1, torch.zeros(3)), (2, torch.ones(3))):
        (folder,) = tmp_path.glob(f"checkpoint_0000_{step:07d}_*")
        assert (folder / "state.pt").read_bytes() == saved({"value": wanted})


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
    run_log.begin(False, lambda: {"to_step": 1}, None)
    until(lambda: len(looks) > 4)
    assert not run_log.stops and set(looks) == {"raypipe-waiting"}
    request_stop(tmp_path.as_uri())
    until(lambda: run_log.stops)
    run_log.closed()
    assert "raypipe-waiting" not in {thread.name for thread in threading.enumerate()}


# In the loop


@pytest.fixture
def run(stores: dict[str, Path], tmp_path: Path) -> RunConfig:
    optimizer = {"name": "adamw", "ema_decay": 0.9, "max_grad_norm": 1.0}
    config = {"checkpoint_interval": 1, "optimizer": optimizer}
    return small_run(tmp_path, stores["train"], stores["val"], 2, 4, **config)


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of checkpoints that are whole; each takes longer than some steps. Afterwards no thread is left."""
    whole = list[str]()

    def write(*args: Any, **options: Any) -> str:
        time.sleep(0.15)
        whole.append(write_checkpoint(*args, **options))
        return whole[-1]

    monkeypatch.setattr(run_checkpoints, "write_checkpoint", write)
    # of other tests' runs, which follow a stream a while longer
    before = set(threading.enumerate())
    yield whole

    def left() -> list[str]:
        names = [thread.name for thread in set(threading.enumerate()) - before]
        return [name for name in names if name.startswith("raypipe-")]

    until(lambda: not left(), left)


def states(folder: Path) -> dict[str, dict[str, Any]]:
    """Of the checkpoints of a run, by their places."""
    found = {}
    for path in folder.glob("checkpoint_*"):
        state = torch.load(path / "state.pt", weights_only=True)
        found[path.name[:23]] = state
    return found


def test_a_failed_checkpoint_ends_the_run_and_leaves_the_ones_before(
    run: RunConfig, slowly: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = run_checkpoints.write_checkpoint

    def fail(*args: Any, **options: Any) -> str:
        if len(slowly) == 2:
            raise ConfigError("checkpoint 3 cannot be written: no space left")
        return write(*args, **options)

    monkeypatch.setattr(run_checkpoints, "write_checkpoint", fail)
    with pytest.raises(ConfigError, match="checkpoint 3 cannot be written"):
        without_ray.train(dataclasses.replace(run, name="full"))
    assert sorted(states(tmp_path / "full")) == [
        "checkpoint_0000_0000001",
        "checkpoint_0000_0000002",
    ]
