"""What a node keeps: made once, mapped, made again where it is damaged, and not needed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from raypipe.stores.kept import kept, path_of, table_bytes, table_of

NUMBERS = pa.array([1, 2, 3])


def numbers(made: list[int]) -> list[int]:
    """Read the numbers, or make them, which adds to `made`."""

    def make() -> list[int]:
        made.append(1)
        return NUMBERS.to_pylist()

    def read(content: pa.Buffer) -> list[int]:
        columns, facts = table_of(content)
        assert facts == {"a": "ü\udc80"}
        return columns["n"].tolist()

    def pack(values: list[int]) -> bytes:
        return table_bytes({"n": pa.array(values)}, {"a": "ü\udc80"})

    return kept(path_of("things", "a fact", 3), read, make, pack)


def test_it_is_made_once_and_again_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    made: list[int] = []
    assert [numbers(made) for _ in range(3)] == [[1, 2, 3]] * 3 and len(made) == 1
    (path,) = (tmp_path / "things").glob("*.arrow")
    whole = path.read_bytes()
    damaged = [b"", b"junk", whole[:50], whole[:-40], whole.replace(b'"a"', b"[a]")]
    for number, content in enumerate(damaged, 2):
        path.write_bytes(content)
        assert numbers(made) == [1, 2, 3] and len(made) == number
        assert path.read_bytes() == whole


def test_it_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "file"))
    made: list[int] = []
    assert numbers(made) == numbers(made) == [1, 2, 3] and len(made) == 2
