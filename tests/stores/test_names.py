"""Names of samples: every store at an address has the column `name`, and a copy keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tars import write_members

from raypipe.errors import ConfigError
from raypipe.history.drawn_at import index_of
from raypipe.stores import MemoryStore, Store, open_store, open_writer
from raypipe.stores.bad_list import read_bad_list
from raypipe.stores.filter import matching
from raypipe.stores.in_memory import InMemoryStore
from raypipe.stores.joined import JoinedStore

PATHS = ["a/0.png", "a/2.png", "b/1.png"]
LONG = "k" * 150


def tar_of(path: Path, *names: str) -> Path:
    return write_members(path, ((name, b"1") for name in names))


def folder(root: Path) -> Store:
    for name in PATHS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"1")
    return open_store(root)


def table(root: Path) -> Store:
    (root / "a.csv").write_text("\n".join(["path", *PATHS]))
    return open_store(root / "a.csv")


def webdataset(root: Path) -> Store:
    tar_of(root / "0.tar", "k0.png", "k0.cls", f"x/{LONG}.png", f"x/{LONG}.cls")
    tar_of(root / "1.tar", "k1.png", "k1.cls")
    return open_store(root)


def hugging_face(root: Path) -> Store:
    rows = [{"bytes": b"1", "path": name} for name in PATHS]
    pq.write_table(pa.table({"image": rows}), root / "a.parquet")
    return open_store(root)


def of_writer(root: Path, *names: str) -> Store:
    columns = {"image": "binary", **({"name": "string"} if names else {})}
    with open_writer(root / "a.lmdb", columns) as writer:
        for number in range(3):
            named = {"name": names[number]} if names else {}
            writer.append({"image": b"1", **named})
    return open_store(root / "a.lmdb")


def foreign(root: Path) -> Store:
    with lmdb.open(str(root / "db"), subdir=False) as env, env.begin(write=True) as txn:
        for name in PATHS:
            txn.put(name.encode(), b"\xff\xd8\xff\xe0 a JPEG" * 20)
    return open_store(root / "db", target_column="")


STORES: dict[str, tuple[Callable[[Path], Store], list[str]]] = {
    "folder": (folder, PATHS),
    "table": (table, PATHS),
    "tar of a folder": (
        lambda root: open_store(tar_of(root / "a.tar", *PATHS)),
        PATHS,
    ),
    "webdataset": (webdataset, ["k0", f"x/{LONG}", "k1"]),
    "hugging face": (hugging_face, PATHS),
    "lmdb with names": (lambda root: of_writer(root, "c", "b", "a"), ["c", "b", "a"]),
    "lmdb without": (of_writer, ["0", "1", "2"]),
    "lmdb of others": (foreign, PATHS),
    "memory": (lambda root: MemoryStore([b"1"] * 3, None), ["0", "1", "2"]),
    "kept in memory": (lambda root: InMemoryStore(folder(root)), PATHS),
    "joined": (
        lambda root: JoinedStore({"x": folder(root), "y": folder(root)}),
        [*PATHS, *PATHS],
    ),
}


@pytest.mark.parametrize("kind", STORES)
def test_every_store_has_names(kind: str, tmp_path: Path) -> None:
    make, expected = STORES[kind]
    store = make(tmp_path)
    before = store.fingerprint
    order = np.array([2, 0, 2])
    read = store.read(order, ("image", "name"))
    assert "name" in store.schema.names
    assert read["name"] == [expected[index] for index in order]
    assert len(read["image"]) == 3
    kept = matching(store, f"name == {expected[1]!r}")
    assert kept.tolist() == [name == expected[1] for name in expected]
    assert store.fingerprint == before


def test_names_of_tars_survive_their_index(tmp_path: Path) -> None:
    store = webdataset(tmp_path)
    store.write_index()  # type: ignore[attr-defined]
    again = open_store(tmp_path)
    assert again.read(np.arange(3), ("name",))["name"] == ["k0", f"x/{LONG}", "k1"]


def test_a_sample_is_found_by_its_stored_name(tmp_path: Path) -> None:
    store = of_writer(tmp_path, "a/0.png", "a/4.png", "b/1.png")
    assert store.sample_name(1).endswith("a.lmdb, key 1, a/4.png")  # type: ignore[attr-defined]
    for name in ("a/4.png", "4.png", f"{tmp_path}/a.lmdb, key 1, a/4.png"):
        assert index_of(store, name) == 1


def test_a_list_of_bad_samples_may_have_names(tmp_path: Path) -> None:
    store = folder(tmp_path / "root")
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({"bad": [{"name": "b/1.png"}, {"name": "a/0.png"}]}))
    assert read_bad_list(file, store, "store.exclude").tolist() == [0, 2]
    file.write_text(json.dumps({"bad": [{"name": "c.png"}]}))
    with pytest.raises(ConfigError, match=r"the store has no sample 'c\.png'"):
        read_bad_list(file, store, "store.exclude")
