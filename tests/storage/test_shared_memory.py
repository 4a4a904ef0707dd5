"""Files in the node's memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from raypipe.errors import ConfigError
from raypipe.storage import shared_memory
from raypipe.storage.shared_memory import (
    open_shared,
    remove_unused,
    reserve,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "_MEMORY", tmp_path)
    monkeypatch.setenv("RAYPIPE_MEMORY_BYTES", str(1 << 20))
    return tmp_path / f"raypipe-{os.getuid()}"


def make(file: BinaryIO) -> None:
    reserve(file, 1000, "a store")
    file.write(b"content")


def never(file: BinaryIO) -> None:
    raise AssertionError("it is there")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def other_process(code: str, folder: Path) -> subprocess.Popen[str]:
    """A process that runs code, prints a line, and waits."""
    begin = (
        "import os, sys\nfrom pathlib import Path\n"
        "from raypipe.storage import shared_memory\n"
        f"shared_memory._MEMORY = Path({str(folder.parent)!r})\n"
    )
    program = begin + code + "\nprint(flush=True)\nsys.stdin.read()"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


USES = "file = shared_memory.open_shared('key', lambda file: file.write(b'content'))"
IS_KILLED_IN_THE_MIDDLE = """
def make(file):
    file.write(b'half')
    file.flush()
    print(flush=True)
    sys.stdin.read()
shared_memory.open_shared('key', make)
"""


def leave_a_user_killed(folder: Path) -> None:
    process = other_process(USES, folder)
    process.kill()
    process.communicate()


def test_a_file_is_made_once_and_removed_after_its_last_user(folder: Path) -> None:
    one = open_shared("key", make)
    other = open_shared("key", never)
    assert one.content == other.content == b"content" and names(folder) == ["key"]
    view = one.content
    del one
    gc.collect()
    assert names(folder) == ["key"]
    del other
    gc.collect()
    assert names(folder) == []
    assert view == b"content"  # as long as somebody looks at it
    with pytest.raises(TypeError):
        view[0] = 0


def test_a_file_whose_users_were_killed_is_used_again_or_removed(folder: Path) -> None:
    process = other_process(USES, folder)
    remove_unused()
    assert names(folder) == ["key"]
    process.kill()
    process.communicate()
    assert names(folder) == ["key"]
    again = open_shared("key", never)
    assert again.content == b"content"
    leave_a_user_killed(folder)
    assert names(folder) == ["key"]
    del again
    gc.collect()
    assert names(folder) == []


def test_a_file_that_a_killed_process_left_goes_at_the_next_start(folder: Path) -> None:
    leave_a_user_killed(folder)
    other = open_shared("other", make)
    assert names(folder) == ["other"]
    leave_a_user_killed(folder)
    remove_unused()
    assert names(folder) == ["other"] and other.content == b"content"


def test_a_file_whose_maker_was_killed_is_made_by_the_next(folder: Path) -> None:
    process = other_process(IS_KILLED_IN_THE_MIDDLE, folder)
    found = []
    waits = threading.Thread(target=lambda: found.append(open_shared("key", make)))
    waits.start()
    remove_unused()
    assert names(folder) == ["key"] and not found
    process.kill()
    process.communicate()
    waits.join(60)
    assert found[0].content == b"content"


def test_an_error_of_the_maker_leaves_nothing(folder: Path) -> None:
    with pytest.raises(AssertionError):
        open_shared("key", never)
    assert names(folder) == []
    assert open_shared("key", make).content == b"content"


def test_a_forked_child_leaves_the_file_to_its_parent(folder: Path) -> None:
    file = open_shared("key", make)
    if not (child := os.fork()):
        del file
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert names(folder) == ["key"] and file.content == b"content"


def large(file: BinaryIO) -> None:
    reserve(file, 600_000, "a store")
    file.write(bytes(600_000))


def test_all_files_together_stay_within_the_limit(folder: Path) -> None:
    refused = pytest.raises(
        ConfigError, match=r"a store takes about 600,000 .*: raise RAYPIPE_MEMORY_BYTES"
    )

    def with_another(file: BinaryIO) -> None:
        reserve(file, 600_000, "the first")
        with refused:  # before anything of the first is written
            open_shared("other", large)
        file.write(b"x")

    open_shared("key", with_another)
    one = open_shared("key", large)
    with refused:
        open_shared("other", large)
    assert names(folder) == ["key"]
    del one
    gc.collect()
    assert len(open_shared("other", large).content) == 600_000


def test_the_limit_is_half_of_what_is_free_by_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYPIPE_MEMORY_BYTES")
    limit = shared_memory._limit_bytes(0)
    assert 0 < limit < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 + 1
    assert open_shared("key", make).content == b"content"
    monkeypatch.setenv("RAYPIPE_MEMORY_BYTES", "much")
    with pytest.raises(ConfigError, match="must be a whole number of bytes"):
        open_shared("other", make)


def test_a_folder_of_others_is_refused_and_without_one_the_cache_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"can be written to by other users"):
        open_shared("key", make)
    monkeypatch.setattr(shared_memory, "_MEMORY", folder / "missing")
    monkeypatch.setenv("RAYPIPE_CACHE", str(folder.parent / "cache"))
    file = open_shared("key", make)
    assert (
        names(folder.parent / "cache" / "memory") == ["key"]
        and file.content == b"content"
    )
