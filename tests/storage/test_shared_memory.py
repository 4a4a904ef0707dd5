"""Memory that processes share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from raypipe.errors import ConfigError
from raypipe.storage import shared_memory
from raypipe.storage.shared_memory import Arena, open_arena

KEY = "ab" * 16
CELLS = np.arange(4)

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="only Linux shares memory by descriptors"
)


@pytest.fixture(autouse=True)
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    monkeypatch.setenv("RAYPIPE_MEMORY_BYTES", str(1 << 20))
    return tmp_path / "memory"


def fill(arena: Arena, size: int = 100) -> bool:
    return arena.write(CELLS, [[b"%d" % number, bytes(size)] for number in range(4)])


def as_another_process() -> Arena:
    """An arena as a process has it that opens it now."""
    shared_memory._arenas.clear()
    return open_arena(KEY, 10)


def num_entries(entries: Path) -> int:
    return len(
        [path for path in entries.iterdir() if not path.name.startswith(".lock")]
    )


def test_cells_are_written_once_and_seen_by_all() -> None:
    one = open_arena(KEY, 10)
    assert one.values(CELLS) == [None] * 4 and fill(one)
    other = as_another_process()
    expected = [b"%d" % number + bytes(100) for number in range(4)]
    assert other is not one and other.values(CELLS) == expected
    used = one.used_bytes
    assert other.write(CELLS, [[b"other"]] * 4) and one.values(CELLS) == expected
    assert other.used_bytes == used
    assert other.write(np.array([9]), [[b""]]) and one.values(np.array([9, 8])) == [
        b"",
        None,
    ]


def test_the_memory_and_its_entry_go_with_the_last_user(entries: Path) -> None:
    one = open_arena(KEY, 10)
    fill(one)
    other = as_another_process()
    view = other.values(CELLS[:1])[0]
    del one
    assert num_entries(entries) == 1
    third = as_another_process()
    assert third.values(CELLS[:1]) == [view]
    del other, third
    assert num_entries(entries) == 0
    assert view == b"0" + bytes(100)  # as long as somebody looks at it
    assert as_another_process().values(CELLS) == [None] * 4


def test_a_killed_process_leaves_what_others_use_and_nothing_else(
    entries: Path,
) -> None:
    code = f"""
import sys
import numpy as np
from raypipe.storage.shared_memory import open_arena
arena = open_arena({KEY!r}, 10)
arena.write(np.arange(4), [[b"killed"]] * 4)
alone = open_arena("cd" * 16, 10)
alone.write(np.arange(1), [[bytes(500_000)]])
print(flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    mine = open_arena(KEY, 10)
    assert num_entries(entries) == 3
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert mine.values(CELLS) == [b"killed"] * 4
    # The 500,000 bytes of the other arena are free again: the limit has room for twice as much.
    other = open_arena("ef" * 16, 10)
    assert num_entries(entries) == 2
    assert other.write(np.arange(1), [[bytes(900_000)]])


def test_all_arenas_together_stay_within_the_limit() -> None:
    one, other = open_arena(KEY, 10), open_arena("cd" * 16, 10)
    assert one.write(CELLS[:1], [[bytes(600_000)]])
    assert not other.write(CELLS[:1], [[bytes(600_000)]])
    assert other.values(CELLS[:1]) == [None]
    assert other.write(CELLS[:1], [[bytes(300_000)]])
    assert not one.write(CELLS[1:2], [[bytes(300_000)]])
    del one
    shared_memory._arenas.pop(KEY, None)
    assert other.write(CELLS[1:2], [[bytes(600_000)]])


def test_a_table_beyond_the_limit_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError,
        match=r"room for 1,048,576 bytes, and .* 1,000,000 values .* RAYPIPE_",
    ):
        open_arena(KEY, 1_000_000)
    monkeypatch.setenv("RAYPIPE_MEMORY_BYTES", "much")
    with pytest.raises(ConfigError, match="must be a whole number of bytes"):
        open_arena(KEY, 10)


def test_the_limit_is_half_of_what_is_free_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAYPIPE_MEMORY_BYTES")
    limit = shared_memory._limit_bytes(0)
    assert 0 < limit < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 + 1
    assert fill(open_arena(KEY, 10))
