"""A store of one's own that reads samples one by one; tests/stores/test_contract.py has what every store keeps."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raypipe.errors import StoreError
from raypipe.stores import SimpleStore


class Lines(SimpleStore):
    """The lines of a file, repeated in a column of arrays."""

    schema = pa.schema(
        {"image": pa.binary(), "text": pa.string(), "pair": pa.list_(pa.int64(), 2)}
    )

    def open(self) -> list[bytes]:
        return Path(self.address).read_bytes().splitlines()

    def count(self) -> int:
        return len(self.opened)

    def sample(self, index: int) -> dict[str, Any]:
        line = self.opened[index]
        return {"image": line or None, "text": line.decode(), "pair": [index, 1]}

    def facts(self) -> list[bytes]:
        return self.opened


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    (tmp_path / "a.txt").write_bytes(b"a\n\n\xff\n")
    return Lines(tmp_path / "a.txt")


def test_columns_have_the_types_of_the_schema(lines: Lines) -> None:
    read = lines.read(np.array([1, 0]), ("pair", "image", "text"))
    assert read.images == [None, b"a"] and read["text"] == ["", "a"]
    assert read["pair"].tolist() == [[1, 1], [0, 1]]
    empty = lines.read(np.empty(0, np.int64), ("pair",))
    assert empty.table.schema.field("pair").type == lines.schema.field("pair").type


def test_an_error_of_its_library_names_the_store(lines: Lines) -> None:
    with pytest.raises(StoreError, match=r"a\.txt cannot be read: UnicodeDecodeError"):
        lines.read(np.array([2]), ("text",))
    with pytest.raises(StoreError, match=r"none cannot be read: FileNotFoundError"):
        len(Lines(Path(lines.address).with_name("none")))


def test_it_is_opened_once_and_again_after_its_close(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_lines = Lines.open

    def counted(store: Lines) -> list[bytes]:
        opened.append(store.address)
        return open_lines(store)

    monkeypatch.setattr(Lines, "open", counted)
    assert not opened and len(lines) == 3
    lines.read(np.array([0]), ("image",))
    assert lines.fingerprint and len(opened) == 1
    lines.close()
    assert len(lines) == 3 and len(opened) == 2
    copy = pickle.loads(pickle.dumps(lines))
    assert len(copy) == 3 and len(opened) == 3


def test_a_relative_path_is_that_of_its_first_process(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(lines.address).parent)
    store = pickle.dumps(Lines("a.txt"))
    monkeypatch.chdir("/")
    assert len(pickle.loads(store)) == 3
    assert Lines("s3://bucket/a.txt").address == "s3://bucket/a.txt"
