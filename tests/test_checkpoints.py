from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.checkpoints import newest_cursor, remove_unfinished
from raypipe.cursor import Cursor
from raypipe.errors import ConfigError, CursorError

OLD, NEW, CUT = (f"checkpoint_2026-11-21_20-40-{second}.378751" for second in ("04", "11", "59"))


def make_run(folder: Path, complete: list[str] | None) -> list[str]:
    for name in (OLD, NEW, CUT, "tensorboard", "checkpoint_mine"):
        (folder / name).mkdir()
        (folder / name / "state.pt").write_bytes(b"x")
    if complete is not None:
        results = [{"checkpoint_dir_name": name, "metrics": {}} for name in complete]
        (folder / "checkpoint_manager_snapshot.json").write_text(json.dumps({"checkpoint_results": results}))
    return remove_unfinished(folder.as_uri())


def test_only_a_checkpoint_that_is_not_on_record_is_removed(tmp_path: Path) -> None:
    assert make_run(tmp_path, [OLD, NEW]) == [CUT]
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {OLD, NEW, "tensorboard", "checkpoint_mine"}


def test_without_a_record_none_is_complete(tmp_path: Path) -> None:
    assert make_run(tmp_path, None) == [OLD, NEW, CUT]


def test_a_run_without_a_folder_has_none(tmp_path: Path) -> None:
    assert remove_unfinished((tmp_path / "nowhere").as_uri()) == []


def test_the_cursor_is_that_of_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    make_run(tmp_path, [OLD, NEW])
    with pytest.raises(ConfigError, match=f"checkpoint {NEW} of file://.* cannot be read"):
        newest_cursor(tmp_path.as_uri())
    for step, name in enumerate((OLD, NEW)):
        (tmp_path / name / "cursor.json").write_text(Cursor(1, step, "0123456789abcdef").to_json())
    assert newest_cursor(tmp_path.as_uri()) == Cursor(1, 1, "0123456789abcdef")
    (tmp_path / NEW / "cursor.json").write_bytes(b"\xff")
    with pytest.raises(CursorError, match="not a cursor"):
        newest_cursor(tmp_path.as_uri())


def test_a_run_without_a_complete_checkpoint_has_no_cursor(tmp_path: Path) -> None:
    make_run(tmp_path, None)
    assert newest_cursor(tmp_path.as_uri()) is None
