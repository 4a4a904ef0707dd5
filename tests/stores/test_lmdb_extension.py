"""Many records in one call of the extension (csrc/lmdb.c) are those of one call each, of damaged files too.

fuzz/fuzz_lmdb.py, .ci/sanitize: the same of files that are damaged in other ways, by a build under sanitizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fuzz_lmdb import fuzz_lmdb
from lmdb_extension import needs_extension

from raypipe.stores import lmdb_file
from raypipe.stores.lmdb import LMDBStore
from raypipe.stores.writers import LMDBWriter

pytestmark = needs_extension

TYPES = {
    "image": "binary",
    "label": "int64",
    "weight": "float64",
    "note": "string",
    "box": "float32[4]",
}
NUM = 700


def write(path: Path) -> Path:
    rng = np.random.default_rng(0)
    with LMDBWriter(path, TYPES) as writer:
        for index in range(NUM):
            long = 30_000 if index % 50 == 7 else 300
            writer.append(
                {
                    "image": None
                    if index % 13 == 5
                    else rng.bytes(int(rng.integers(0, long))),
                    "label": index - 20,
                    "weight": index / 7,
                    "note": None if index % 11 == 3 else f"note {index}",
                    "box": rng.random(4, np.float32),
                }
            )
    return path


def contents(path: Path, indices: np.ndarray, columns: tuple[str, ...]) -> Any:
    """What a store gives, with the type of each column."""
    table = LMDBStore(path).read(indices, columns)
    return table.images, table.table.to_pylist(), table.table.schema


def test_all_columns_are_those_that_the_lmdb_library_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.lmdb")
    indices = np.random.default_rng(1).integers(0, NUM, 300)
    asked = [("image", "label"), ("label",), ("note", "image"), ("box",), tuple(TYPES)]
    found = [contents(path, indices, columns) for columns in asked]
    assert contents(path, indices[:0], ("image", "label"))[0] == []
    read = LMDBStore(path).read(np.arange(NUM))
    assert read["label"].tolist() == list(range(-20, NUM - 20))
    assert read["image"][5] is None
    monkeypatch.setattr(lmdb_file, "extension", lambda: None)
    assert [contents(path, indices, columns) for columns in asked] == found


def test_damaged_records_are_those_of_one_call_each() -> None:
    accepted, refused, wrong = fuzz_lmdb(0, 100)
    assert accepted > 60 and refused > 5 and not wrong


@pytest.mark.parametrize(
    ("kind", "num"), [("string", 63), ("string", 64), ("string", 70), ("int64", 1030)]
)
def test_a_store_may_have_any_number_of_columns(
    kind: str, num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {f"c{number}": number for number in range(num)}
    if kind == "string":
        others = {name: str(number) for name, number in others.items()}
    types = {"image": "binary", "label": "int64", **dict.fromkeys(others, kind)}
    with LMDBWriter(tmp_path / "a.lmdb", types) as writer:
        writer.append({"image": b"x", "label": 3, **others})
    store = LMDBStore(tmp_path / "a.lmdb")
    names = ("c0", f"c{num - 1}", "label", "image")
    assert len(store) == 1
    monkeypatch.setattr(
        lmdb_file.LMDBFile, "get", lambda self, key: pytest.fail("it was asked")
    )
    read = store.read(np.arange(1), names)
    expected = {**others, "label": 3, "image": b"x"}
    assert {name: read[name][0] for name in names} == {
        name: expected[name] for name in names
    }


def test_the_memory_of_a_large_record_is_given_back(tmp_path: Path) -> None:
    with LMDBWriter(
        tmp_path / "a.lmdb", {"image": "binary", "label": "int64"}
    ) as writer:
        for row in range(3):
            writer.append({"image": bytes(64 << 20 if row == 1 else 9), "label": row})
    store = LMDBStore(tmp_path / "a.lmdb")
    store.read(np.array([0]), ("image",))
    before = resident_mib()
    assert len(store.read(np.array([1]), ("image",))["image"][0]) == 64 << 20
    assert resident_mib() < before + 32


def resident_mib() -> int:
    return psutil.Process().memory_info().rss >> 20
