"""Room in a folder of files; the cache of shards and the folder of finished micro-batches use it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from raypipe.storage import limited_folder
from raypipe.storage.limited_folder import Room


def put(folder: Path, name: str, num_bytes: int, used_s: float) -> Path:
    path = folder / name
    path.write_bytes(bytes(num_bytes))
    os.utime(path, (used_s, used_s))
    return path


def test_what_a_killed_process_was_writing_goes_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = put(tmp_path, ".killed", 100, time.time())
    hidden = put(tmp_path, ".new", 0, time.time())
    assert not Room(tmp_path, 150, 0.5).take(hidden, 100) and killed.exists()
    monkeypatch.setattr(limited_folder, "_WRITTEN_S", -60.0)
    (tmp_path / ".room").unlink()
    Room(tmp_path, 150, 0.5).take(put(tmp_path, "new", 0, 1), 100)
    assert not killed.exists()
