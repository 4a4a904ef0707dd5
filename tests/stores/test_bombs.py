"""Small files that declare, or unpack to, far more than they are: one for each kind of store and source.

Each is read by a process of its own, of which the peak of memory is measured.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from draw_bombs import (
    BOMBS,
    FOUND,
    LIMIT,
    MOST_MIB,
    OWN_CODE,
    READ,
    REFUSED,
    VALUES,
)

from raypipe.environment import VARIABLES
from raypipe.errors import ConfigError, StoreError
from raypipe.storage.read_limit import check_read
from raypipe.stores.kinds import SOURCES, STORES
from raypipe.stores.lmdb_values import READERS


def test_each_kind_of_store_and_source_has_a_bomb() -> None:
    assert BOMBS.keys() == (STORES.keys() | SOURCES.keys()) - OWN_CODE


@pytest.mark.system
def test_a_bomb_is_refused_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    kind_of = {}
    for number, (kind, make) in enumerate(BOMBS.items()):
        (tmp_path / str(number)).mkdir()
        kind_of[str(make(tmp_path / str(number)))] = kind
    printed = subprocess.check_output(
        [sys.executable, "-c", READ, *kind_of],
        env={**os.environ, "RAYPIPE_READ_BYTES": str(LIMIT)},
        text=True,
        timeout=300,
    )
    read = list(map(json.loads, printed.splitlines()))
    assert [path for path, _, _ in read] == list(kind_of)
    for path, found, mib in read:
        kind = kind_of[path]
        assert mib < MOST_MIB, kind
        if kind in FOUND:
            assert found == FOUND[kind]
        else:
            assert str(tmp_path) in found and re.search(REFUSED, found), kind


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_lmdb_that_makes_many_objects_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_READ_BYTES", str(LIMIT))
    kind, value = VALUES[name]
    with pytest.raises(
        StoreError, match=r"would unpack to .* raise RAYPIPE_READ_BYTES"
    ):
        READERS[kind](memoryview(value))


def test_a_variable_sets_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "RAYPIPE_READ_BYTES" in VARIABLES
    check_read("a", 1 << 29)
    check_read("a", 6 << 29, 2 << 29)
    with pytest.raises(StoreError, match="a would unpack to 536,870,913 bytes; the li"):
        check_read("a", (1 << 29) + 1, 1000)
    with pytest.raises(StoreError, match="the limit is 4,294,967,296"):
        check_read("a", 5 << 30, 5 << 30)
    monkeypatch.setenv("RAYPIPE_READ_BYTES", str(6 << 30))
    check_read("a", 5 << 30, 0)
    monkeypatch.setenv("RAYPIPE_READ_BYTES", "4G")
    with pytest.raises(ConfigError, match="must be a whole number of bytes, got '4G'"):
        check_read("a", 1)
