"""Indexes of tars that somebody else has written: each is as its tar is, or it is not used."""

from __future__ import annotations

import copy
import gzip
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tars
from pictures import picture, samples, write_tar

from raypipe.errors import StoreError
from raypipe.stores import tar as tar_module
from raypipe.stores.kept import table_bytes, table_of
from raypipe.stores.tar import TarStore

WRONG: list[Any] = [
    None,
    -1,
    1 << 70,
    1.5,
    "x",
    [],
    {},
    [[]],
    [1, "x"],
    {"x": []},
    True,
]


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # so that small ones have an index
    monkeypatch.setattr(tar_module, "_SMALL_BYTES", 0)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutated(content: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    changed = copy.deepcopy(content)
    path = rng.choice([path for path in places(content) if path])
    holder: Any = changed
    for key in path[:-1]:
        holder = holder[key]
    if rng.random() < 0.3 and isinstance(holder, dict):
        del holder[path[-1]]
    else:
        holder[path[-1]] = rng.choice(WRONG)
    return changed


def wrong_columns(
    columns: dict[str, pa.Array], rng: random.Random
) -> dict[str, pa.Array]:
    """The columns of an index with another number in one, or one of another type."""
    name = rng.choice(list(columns))
    values = columns[name].to_pylist()
    wrong = rng.choice([-1, -2, 1 << 40, 3, None, b"x"])
    row = rng.randrange(len(values))
    if name == "keys":
        values[row] = wrong
    else:
        values[row][rng.randrange(2)] = wrong
    try:
        return {**columns, name: pa.array(values, columns[name].type)}
    except (pa.ArrowException, TypeError):
        return {**columns, name: pa.array(["x"] * len(values))}


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
    batch, facts = table_of(pa.py_buffer(gzip.decompress(index.read_bytes())))
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    whole = path.read_bytes()
    rng = random.Random(0)
    num_scanned = 0
    for number in range(150):
        monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / f"cache-{number}"))
        stream = table_bytes(
            wrong_columns(columns, rng) if number % 3 else columns,
            facts if number % 3 else mutated(facts, rng),
        )
        index.write_bytes(gzip.compress(stream, 1))
        store = TarStore(path)
        try:
            images = store.read(np.arange(len(store)))["image"]
        except StoreError as error:
            # labels of other kinds, which a tar may have as well
            assert "a.tar" in str(error)
            continue
        num_scanned += images == expected
        assert all(image is None or image in whole for image in images)
    assert num_scanned > 75
