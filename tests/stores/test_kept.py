"""What a node keeps: made once, mapped, made again where it is damaged, and not needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from raypipe.stores.kept import kept, path_of


class Things(NamedTuple):
    texts: pa.StringArray
    places: dict[str, np.ndarray]
    facts: dict[str, Any]


THINGS = Things(
    pa.array(["x", None, "z"]),
    {"": np.arange(6).reshape(3, 2), "a\udc80": np.array([1.5, 2, 3])},
    {"a": "ü\udc80"},
)


def things(made: list[int]) -> Things:
    """Read the things, or make them, which adds to `made`."""

    def make() -> Things:
        made.append(1)
        return THINGS

    return kept(path_of("things", "a fact", 3), Things, make)


def are_right(read: Things) -> bool:
    """Whether all has come back, with its types."""
    return (
        read.texts.equals(THINGS.texts)
        and read.facts == THINGS.facts
        and list(read.places) == list(THINGS.places)
        and all(map(np.array_equal, read.places.values(), THINGS.places.values()))
    )


def test_it_is_made_once_and_again_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    made: list[int] = []
    assert all(are_right(things(made)) for _ in range(3)) and len(made) == 1
    (path,) = (tmp_path / "things").glob("*.arrow")
    whole = path.read_bytes()
    damaged = [b"", b"junk", whole[:50], whole[:-40], whole.replace(b'"a"', b"[a]")]
    for number, content in enumerate(damaged, 2):
        path.write_bytes(content)
        assert are_right(things(made)) and len(made) == number
        assert path.read_bytes() == whole


def test_it_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "file"))
    made: list[int] = []
    assert are_right(things(made)) and are_right(things(made)) and len(made) == 2
