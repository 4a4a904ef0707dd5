"""Which files an address means."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import StoreError
from raypipe.stores.addresses import list_files


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def listed(address: Path) -> list[str]:
    return [Path(path).name for path in list_files(str(address), lambda name: name.endswith(".x"), "*.x")]


def test_a_file_a_folder_a_pattern_and_a_range(tmp_path: Path) -> None:
    folder = make(tmp_path / "f", "b.x", "a.x", ".hidden.x", "_x.x", "c.y")
    (folder / "d.x").mkdir()
    assert listed(folder / "b.x") == ["b.x"]
    assert listed(folder) == ["a.x", "b.x"]
    assert listed(folder / "*.x") == ["a.x", "b.x"]
    assert listed(folder / "b*") == ["b.x"]
    assert listed(folder / "s-{08..11}.x") == ["s-08.x", "s-09.x", "s-10.x", "s-11.x"]
    make(folder, "odd*name.x")
    assert listed(folder / "odd*name.x") == ["odd*name.x"]


def test_nothing_is_an_error_that_names_the_address(tmp_path: Path) -> None:
    for address in (tmp_path, tmp_path / "*.x"):
        with pytest.raises(StoreError, match=r"has no \*\.x files"):
            listed(address)
    with pytest.raises(StoreError, match="absent cannot be listed"):
        listed(tmp_path / "absent" / "*.x")
    with pytest.raises(StoreError, match="stands for 0 shards"):
        listed(tmp_path / "{9..1}.x")
