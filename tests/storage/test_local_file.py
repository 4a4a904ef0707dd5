"""Things that are no regular files, in every place where one is named: each is one error, at once."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raypipe.errors import StoreError
from raypipe.storage.local_cache import shared_cache
from raypipe.storage.local_file import (
    locked,
    make_cache_folder,
    open_lock,
    open_regular,
    try_lock,
)

KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, "a FIFO"),
    "link to a FIFO": (lambda path: _linked(path, os.mkfifo), "a FIFO"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "socket": (lambda path: os.mknod(path, stat.S_IFSOCK | 0o600), "a socket"),
    "folder": (lambda path: path.mkdir(), "a folder"),
}


def _linked(path: Path, make: Callable[[Path], object]) -> None:
    make(path.with_name(".elsewhere"))
    path.symlink_to(".elsewhere")


# Each request is tried in a child: a read that waits ends with it, and so does one that takes all memory.
SERVER = """
import json, os, resource, signal, sys
import numpy as np
from raypipe.commands.settings import parse_command
from raypipe.config import RunConfig
from raypipe.stores.bad_list import read_bad_list
from raypipe.streaming.digest import read_digests
from raypipe.stores import open_store
from raypipe.stores import folder, lmdb, memory, parquet, tar

def store(path):
    opened = open_store(path)
    opened.read(np.arange(len(opened)), ("image",))

def job(run: RunConfig): ...

empty = memory.MemoryStore([b"x"], [0])
READERS = {
    "store": store,
    "bad list": lambda path: read_bad_list(path, empty, "store.exclude"),
    "digests": read_digests,
    "settings": lambda path: parse_command("", job, ["--config", path], "doc"),
}
for line in sys.stdin:
    reader, path = json.loads(line)
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(5)
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        try:
            READERS[reader](path)
            outcome = "nothing is wrong"
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(sending, outcome.encode()[:4000])
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        outcome = pipe.read()
    _, status = os.waitpid(child, 0)
    print(json.dumps(outcome or f"died of signal {status}"), flush=True)
"""

Read = Callable[[str, Path], str]


@pytest.fixture(scope="module")
def read() -> Iterator[Read]:
    """What becomes of a reader at a path, in a process of its own with a limit on time and memory."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin and server.stdout
        requests, answers = server.stdin, server.stdout

        def ask(reader: str, path: Path) -> str:
            print(json.dumps([reader, str(path)]), file=requests, flush=True)
            return json.loads(answers.readline())

        yield ask
        requests.close()


def check_refused(outcome: str, name: str, kind: str) -> None:
    error, _, text = outcome.partition(": ")
    assert error in ("error", "StoreError", "ConfigError") and name in text, outcome
    assert f"{KINDS[kind][1]}, not a regular file" in text and text.count("\n") == 0, (
        outcome
    )


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("reader", "name"),
    [
        ("store", "train.tar"),
        ("store", "train.parquet"),
        ("store", "train.lmdb"),
        ("bad list", "a.json"),
        ("digests", "a.json"),
        ("settings", "run.yaml"),
    ],
)
def test_a_file_that_is_named(
    reader: str, name: str, kind: str, read: Read, tmp_path: Path
) -> None:
    path = tmp_path / name
    KINDS[kind][0](path)
    outcome = read(reader, path)
    if reader == "store" and kind == "folder":
        assert outcome.startswith(f"StoreError: {path} contains no store")
    else:
        check_refused(outcome, name, kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])
@pytest.mark.parametrize("name", ["class/a.jpg", "class/within/a.PNG"])
def test_an_image_in_a_class_folder(
    name: str, kind: str, read: Read, tmp_path: Path
) -> None:
    for file in (tmp_path / "class" / "b.jpg", tmp_path / name):
        file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "class" / "b.jpg").write_bytes(b"x")
    KINDS[kind][0](tmp_path / name)
    check_refused(read("store", tmp_path), name, kind)


def test_a_folder_that_is_called_as_an_image(read: Read, tmp_path: Path) -> None:
    (tmp_path / "class" / "a.jpg").mkdir(parents=True)
    (tmp_path / "class" / "a.jpg" / "b.jpg").write_bytes(b"x")
    assert read("store", tmp_path) == "nothing is wrong"


def test_an_endless_file_is_not_read(read: Read, tmp_path: Path) -> None:
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(1 << 40)  # of holes
    assert "it has more than" in read("bad list", tmp_path / "a.json")


def test_a_regular_file_and_a_link_to_one_are_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b").symlink_to("a")
    for name in "ab":
        descriptor = open_regular(tmp_path / name)
        assert os.read(descriptor, 100) == b"content" and not os.get_inheritable(
            descriptor
        )
        os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "c")


def test_what_takes_a_files_place_after_the_first_look_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").touch()
    os.mkfifo(tmp_path / "b")
    found, real = (tmp_path / "a").stat(), os.stat
    monkeypatch.setattr(
        os, "stat", lambda at, **how: found if at == tmp_path / "b" else real(at, **how)
    )
    with pytest.raises(OSError, match="it is a FIFO"):
        open_regular(tmp_path / "b")


def test_a_folder_of_the_cache_is_ones_own_and_others_may_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    assert stat.S_IMODE(make_cache_folder("new").stat().st_mode) == 0o700
    for mode in (0o700, 0o750, 0o755):
        (tmp_path / "new").chmod(mode)
        assert make_cache_folder("new") == tmp_path / "new"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_not_used(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    make_cache_folder("shards").chmod(mode)
    told = rf"shards can be written to by other users \(mode {mode:o}\)"
    with pytest.raises(PermissionError, match=told):
        make_cache_folder("shards")
    with pytest.raises(StoreError, match=f"{told}.* set RAYPIPE_CACHE"):
        shared_cache()


# Locks


def test_a_lock_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        other = open_lock(tmp_path / "lock")
        assert not try_lock(other)
    assert try_lock(other)
    os.close(other)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(
        StoreError, match="cannot be written to: lock: it is a link, not a regular file"
    ):
        open_lock(tmp_path / "lock")
    assert not (tmp_path / "precious").exists()


def test_a_pipe_in_its_place_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with (
        pytest.raises(StoreError, match="it is a FIFO, not a regular file"),
        locked(tmp_path / "lock"),
    ):
        pass
