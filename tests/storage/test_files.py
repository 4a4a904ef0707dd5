from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.storage.files import (
    check_place,
    read_json,
    read_text,
    write_json,
    write_text,
)


@pytest.mark.parametrize("as_uri", [False, True])
def test_what_is_written_is_read_and_takes_the_place_of_what_was_there(
    tmp_path: Path, as_uri: bool
) -> None:
    file = tmp_path / "a file#1.json"
    address = file.as_uri() if as_uri else str(file)
    for content in ({"a": [1, None, "ü"]}, {}):
        check_place(address)
        write_json(address, content)
        assert read_json(address) == content
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_relative_path_is_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_place("x.json")
    write_json("x.json", {"a": 1})
    assert read_json("x.json") == {"a": 1} and (tmp_path / "x.json").exists()


@pytest.mark.parametrize("place", ["nowhere/x.json", "."])
def test_a_place_where_no_file_can_be(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{place} cannot be written"):
        check_place(place)
    with pytest.raises(ConfigError, match=f"{place} cannot be written"):
        write_json(place, {})
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_leaves_the_old_and_nothing_new(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert read_json(tmp_path / "x.json") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"'a'"])
def test_what_is_no_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.json is not (JSON|text)"):
        read_json(tmp_path / "x.json")


def test_an_address_that_is_not_understood() -> None:
    for use in (check_place, read_json, lambda address: write_json(address, {})):
        with pytest.raises(ConfigError, match="unsupported scheme in x://y"):
            use("x://y")


@pytest.mark.parametrize("place", ["nowhere/x.json", "."])
def test_what_is_not_there(place: str) -> None:
    with pytest.raises(ConfigError, match=f"{place} cannot be read"):
        read_json(place)


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
