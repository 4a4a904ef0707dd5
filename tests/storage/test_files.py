from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.storage.files import (
    read_json,
    read_text,
    write_json,
    write_text,
)


def test_what_cannot_be_written_leaves_the_old_and_nothing_new(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert read_json(tmp_path / "x.json") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_text_is_read_up_to_its_bound(tmp_path: Path) -> None:
    write_text(tmp_path / "x.txt", "ü 1234")
    assert (
        read_text(tmp_path / "x.txt", 7)
        == read_text((tmp_path / "x.txt").as_uri(), 100)
        == "ü 1234"
    )
    with pytest.raises(
        ConfigError, match=r"x\.txt cannot be read: it has more than 6 bytes"
    ):
        read_text(tmp_path / "x.txt", 6)
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"x\.txt is not text"):
        read_text(tmp_path / "x.txt", 100)
    with pytest.raises(ConfigError, match="nowhere cannot be read"):
        read_text("nowhere", 100)
