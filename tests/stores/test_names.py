"""Names of samples, by which lists and questions find them; test_contract has the column of each store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.history.drawn_at import index_of
from raypipe.stores import Store, open_store, open_writer
from raypipe.stores.bad_list import read_bad_list


def named(root: Path, *names: str) -> Store:
    columns = {"image": "binary", "name": "string"}
    with open_writer(root / "a.lmdb", columns) as writer:
        for name in names:
            writer.append({"image": b"1", "name": name})
    return open_store(root / "a.lmdb")


def test_a_sample_is_found_by_its_stored_name(tmp_path: Path) -> None:
    store = named(tmp_path, "a/0.png", "a/4.png", "b/1.png")
    assert store.sample_name(1).endswith("a.lmdb, key 1, a/4.png")  # type: ignore[attr-defined]
    for name in ("a/4.png", "4.png", f"{tmp_path}/a.lmdb, key 1, a/4.png"):
        assert index_of(store, name) == 1


def test_a_list_of_bad_samples_may_have_names(tmp_path: Path) -> None:
    store = named(tmp_path, "a/0.png", "a/2.png", "b/1.png")
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({"bad": [{"name": "b/1.png"}, {"name": "a/0.png"}]}))
    assert read_bad_list(file, store, "store.exclude").tolist() == [0, 2]
    file.write_text(json.dumps({"bad": [{"name": "c.png"}]}))
    with pytest.raises(ConfigError, match=r"the store has no sample 'c\.png'"):
        read_bad_list(file, store, "store.exclude")
