"""Columns of a whole store, such as the sizes of its images."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.stores import Store, open_store, open_writer
from raypipe.stores.base import MemoryStore
from raypipe.stores.filter import matching
from raypipe.stores.joined import JoinedStore
from raypipe.stores.scan import numbers_of


def write(path: Path, num: int = 4, **columns: list[int]) -> Store:
    with open_writer(path, {"image": "binary", "label": "int64", **dict.fromkeys(columns, "int64")}) as writer:
        for i in range(num):
            extra = {name: values[i] for name, values in columns.items()}
            writer.append({"image": b"x", "label": i, **extra})
    return open_store(path)


def test_a_mixture_has_the_sizes_of_its_stores(tmp_path: Path) -> None:
    a = write(tmp_path / "a.lmdb", 2, width=[640, -1], height=[480, -1])
    b = write(tmp_path / "b.lmdb", 2, width=[5, 6], height=[7, 8])
    joined = JoinedStore({"a": a, "b": b})
    assert numbers_of(joined, "width", "plan.weights").tolist() == [640, -1, 5, 6]
    assert matching(joined, "width == 6 and height == 8").tolist() == [False, False, False, True]


def test_without_sizes_the_error_says_how_to_make_them(tmp_path: Path) -> None:
    store = write(tmp_path / "a.lmdb")
    with pytest.raises(
        ConfigError,
        match=r"'width' .* are label; `raypipe convert` adds it",
    ):
        matching(store, "width > 1")
    with pytest.raises(ConfigError, match=r"no column 'size' for store.filter; its columns are $"):
        matching(MemoryStore([b""], None), "size > 1")
