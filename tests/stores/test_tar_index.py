"""Indexes of tars that somebody else has written: each is as its tar is, or it is not used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tars
from pictures import picture, samples, write_tar

from raypipe.errors import StoreError
from raypipe.stores import tar as tar_module
from raypipe.stores.tar import TarStore

WRONG: list[Any] = [
    None,
    -1,
    1.5,
    "x",
    [],
    {},
    [[]],
    {"x": []},
    {"512": [[0, 1 << 70]]},
]


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # so that small ones have an index
    monkeypatch.setattr(tar_module, "_SMALL_BYTES", 0)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def with_first(values: pa.Array, first: Any) -> pa.Array:
    """A column with another first value, or one of another type if it does not fit."""
    try:
        return pa.array([first, *values.to_pylist()[1:]], values.type)
    except (pa.ArrowException, TypeError):
        return pa.array(["x"] * len(values))


def with_columns(columns: list[pa.Array], about: list[Any]) -> bytes:
    """An index, before its compression."""
    metadata = {b"raypipe": json.dumps(about)}
    batch = pa.record_batch(columns, [""] * len(columns), metadata=metadata)
    target = pa.BufferOutputStream()
    with pa.ipc.new_stream(target, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(target.getvalue())


@pytest.mark.parametrize("layout", ["class folders", "WebDataset"])
def test_a_wrong_index_is_a_scan_or_one_error_and_reads_no_other_bytes(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tar"
    if layout == "WebDataset":
        tars.write_tar(path, [(picture(number), number % 3) for number in range(4)])
    else:
        write_tar(path, samples(4))
    expected = TarStore(path).read(np.arange(4))["image"]
    TarStore(path).write_index()
    (index,) = (tmp_path / "_raypipe_index").iterdir()
    content = pa.py_buffer(gzip.decompress(index.read_bytes()))
    batch = pa.ipc.open_stream(content).read_next_batch()
    places, facts = json.loads(batch.schema.metadata[b"raypipe"])
    mutants = [
        with_columns(batch.columns, [places, facts | {name: wrong}])
        for name in facts
        for wrong in WRONG
    ]
    firsts = [None, b"x", [-1, 7, 0], [-2, 3, 0], [1 << 40, 3, 0], [0, 1 << 40, 0]]
    for number, column in enumerate(batch.columns):
        for first in firsts:
            columns = list(batch.columns)
            columns[number] = with_first(column, first)
            mutants.append(with_columns(columns, [places, facts]))
    indexes = [gzip.compress(mutant, 1) for mutant in mutants]
    indexes += [b"", b"junk", indexes[0][:50], b"\x1f\x8b" + bytes(50)]
    whole = path.read_bytes()
    num_scanned = 0
    for number, content in enumerate(indexes):
        monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / f"cache-{number}"))
        index.write_bytes(content)
        store = TarStore(path)
        try:
            images = store.read(np.arange(len(store)))["image"]
        except StoreError as error:
            # labels of other kinds, which a tar may have as well
            assert "a.tar" in str(error)
            continue
        num_scanned += images == expected
        assert all(image is None or image in whole for image in images)
    assert num_scanned > 50
