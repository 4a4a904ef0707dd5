from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from micro_batches import plain

from raypipe.config import PoolConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.memory import made_folder as module
from raypipe.streaming.memory.made_folder import Folder, memory_bytes, open_folder
from raypipe.streaming.memory.stored import Finished
from raypipe.streaming.memory.streams import Streams
from raypipe.transform.fields import MicroBatch, Ragged

KEYS = [bytes([number]) * 16 for number in range(8)]
FIRST = MicroBatchId("val", 0, 1, 0)
PLACE = MicroBatchId("val", 3, 1, 0)


def finished(number: int = 0, num_bad: int = 0, side: int = 7) -> Finished:
    rng = np.random.default_rng(number)
    fields: dict[str, np.ndarray | Ragged] = {
        "image": rng.integers(0, 256, (2, side, side, 3), np.uint8),
        "label": np.array([1, 2]),
        "column.height": rng.random((2, 1), np.float32),
        "column.caption": Ragged(
            "text", np.frombuffer(b"abc", np.uint8), np.array([0, 1, 3])
        ),
        "column.pages": rng.integers(0, 256, (2, 8192), np.uint8),
    }
    weight = np.array([1, 0], np.float32)
    batch = MicroBatch(FIRST, np.array([4, -1]), weight, fields, num_bad=num_bad)
    bad = [BadSample(FIRST, "s", 3, "é", None, "cut off", "store")] * num_bad
    return batch, bad


def large() -> Finished:
    return finished(side=512)


def same(found: Finished | None, made: Finished) -> bool:
    """Whether it is the same at `PLACE`."""
    assert found is not None
    batch, bad = made
    there = replace(batch, position=PLACE, num_remembered=1)
    assert found[1] == [replace(sample, position=PLACE) for sample in bad]
    return plain(found[0]) == plain(there)


def keys_in(folder: Folder) -> list[bytes]:
    return [key for key in KEYS if folder.get(key, PLACE, lasts=True)]


def test_another_process_finds_all_fields_and_bad_samples(tmp_path: Path) -> None:
    for number, made in enumerate([finished(), finished(num_bad=1), large()]):
        Folder(tmp_path).put(KEYS[number], made, lasts=True)
        assert same(Folder(tmp_path).get(KEYS[number], PLACE, lasts=True), made)
    assert keys_in(Folder(tmp_path)) == KEYS[:3]


@pytest.mark.parametrize(
    "damage", ["flipped", "swapped", "cut", "empty", "another's", "text"]
)
def test_a_damaged_file_is_removed_and_made_again(tmp_path: Path, damage: str) -> None:
    folder = Folder(tmp_path)
    folder.put(KEYS[0], finished(), lasts=True)
    folder.put(KEYS[1], finished(1), lasts=True)
    path = tmp_path / KEYS[0].hex()
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    pages = finished()[0]["column.pages"].tobytes()[:8192]
    damaged = {
        "flipped": flipped,
        "swapped": content.replace(pages, pages[4096:] + pages[:4096]),
        "cut": content[:-70],
        "empty": b"",
        "another's": (tmp_path / KEYS[1].hex()).read_bytes(),
        "text": b"no micro-batch " * 9,
    }[damage]
    assert damaged != content
    path.write_bytes(damaged)
    assert folder.get(KEYS[0], PLACE, lasts=True) is None
    assert not path.exists()
    folder.put(KEYS[0], finished(), lasts=True)
    assert same(folder.get(KEYS[0], PLACE, lasts=True), finished())


def test_what_passes_by_goes_before_a_validation(tmp_path: Path) -> None:
    Folder(tmp_path).put(KEYS[0], finished(), lasts=True)
    size = (tmp_path / KEYS[0].hex()).stat().st_size
    folder = Folder(tmp_path, 3 * size)
    for number in range(1, 6):
        folder.put(KEYS[number], finished(number), lasts=False)
        assert folder.get(KEYS[number], PLACE, lasts=False)
    assert KEYS[0] in keys_in(folder)


def test_a_disk_that_fails_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no space left")

    folder = Folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", fails)
        folder.put(KEYS[0], finished(), lasts=True)
    folder.put(KEYS[0], finished(), lasts=True)
    assert not keys_in(folder)


def hold(path: Path, connection: Connection) -> None:
    """Show a stream, claim a micro-batch, begin to write it, and wait."""
    streams = Streams(path, "content", "killed")
    assert not streams.are_others()
    folder = Folder(path)
    with folder.claim(KEYS[0]) as is_free:
        assert is_free
        (path / f".{KEYS[0].hex()}.0123").write_bytes(bytes(5000))
        connection.send("holds")
        time.sleep(600)


def test_a_kill_between_claim_and_put_does_no_harm(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    assert ours.recv() == "holds"
    folder = Folder(tmp_path)
    streams = Streams(tmp_path, "content", "ours")
    with folder.claim(KEYS[0]) as is_free:
        assert not is_free
    lock = tmp_path / f".{KEYS[0].hex()}.lock"
    os.utime(lock, (0, 0))
    # a holder that may be stopped holds up nobody, and keeps its lock
    for _ in range(2):
        with folder.claim(KEYS[0]) as is_mine:
            assert is_mine
    assert lock.exists()
    assert streams.are_others()
    assert not Streams(tmp_path, "other content", "theirs").are_others()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with folder.claim(KEYS[0]) as is_free:
        assert is_free
        # the age of a claim is its own
        with folder.claim(KEYS[0]) as is_mine:
            assert not is_mine
        folder.put(KEYS[0], finished(), lasts=True)
    assert keys_in(folder) == KEYS[:1]
    assert not Streams(tmp_path, "content", "ours").are_others()


def test_each_setting_has_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path)
    paths = {}
    for remember in ("memory", "disk", str(tmp_path / "shared")):
        folder = open_folder(PoolConfig(remember=remember))
        assert folder is not None and folder.path.stat().st_mode & 0o777 == 0o700
        paths[remember] = folder.path
    assert paths["memory"].parent == tmp_path
    assert paths["disk"] == tmp_path / "cache" / "remembered"
    assert paths[str(tmp_path / "shared")] == tmp_path / "shared" / "remembered"
    paths["memory"].chmod(0o777)
    assert open_folder(PoolConfig()) is None
    assert open_folder(PoolConfig(remember={"disk": 0})) is None
    with pytest.raises(ConfigError, match="whole path"):
        PoolConfig(remember="relative")


def test_memory_leaves_room_for_the_object_store(tmp_path: Path) -> None:
    room = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 1e12
    assert memory_bytes(room / 2) == int(0.1 * (room / 2))
    assert memory_bytes(0.9999 * room) <= 0.0001 * room
