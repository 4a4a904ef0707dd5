"""Columns of a whole store."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.stores import open_store, open_writer
from raypipe.stores.filter import matching
from raypipe.stores.memory import MemoryStore


def test_without_sizes_the_error_says_how_to_make_them(tmp_path: Path) -> None:
    with open_writer(tmp_path / "a.lmdb") as writer:
        writer.append({"image": b"x", "label": 0})
    with pytest.raises(
        ConfigError, match=r"'width' .* are label, name; `raypipe convert` adds it"
    ):
        matching(open_store(tmp_path / "a.lmdb"), "width > 1")
    with pytest.raises(
        ConfigError, match=r"no column 'size' for store.filter; its columns are name$"
    ):
        matching(MemoryStore([b""], None), "size > 1")
