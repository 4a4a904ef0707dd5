"""Stores whose samples lie in the node's memory."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import without_ray
from pictures import picture
from rewritten import rewrite

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.storage import shared_memory
from raypipe.stores.in_memory import InMemoryStore, hold
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore

NUM = 20
COLUMNS = {
    "caption": [None if i == 3 else f"text ä {i}" for i in range(NUM)],
    "score": [None if i == 4 else i / 3 for i in range(NUM)],
    "box": np.arange(NUM * 4, dtype=np.float32).reshape(NUM, 4),
    "flag": [i % 2 == 0 for i in range(NUM)],
    "mask": [bytes([i]) * i for i in range(NUM)],
    "words": [["a"] * i for i in range(NUM)],
}


class Counting(MemoryStore):
    """A store that counts the samples that are read of each column."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_read: dict[str, int] = dict.fromkeys(tuple(self.schema.names), 0)

    def read(self, indices: Any, columns: Any = ("image", "label")) -> Any:
        for name in columns:
            self.num_read[name] += len(indices)
        return super().read(indices, columns)


def make() -> Counting:
    images = [None if i == 5 else picture(i) for i in range(NUM)]
    return Counting(images, np.arange(NUM) % 3, columns=COLUMNS)


def held(inner: Any) -> InMemoryStore:
    store = InMemoryStore(inner)
    store.hold()
    return store


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "_MEMORY", tmp_path)
    return tmp_path / f"raypipe-{os.getuid()}"


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        if isinstance(values, np.ndarray):
            assert found[name].dtype == values.dtype and np.array_equal(
                found[name], values
            ), name
        else:
            assert found[name] == values, name


def test_what_is_read_is_what_the_store_has_and_is_read_once() -> None:
    inner, plain = make(), make()
    store = held(inner)
    names = tuple(plain.schema.names)
    assert (len(store), tuple(store.schema.names), store.fingerprint) == (
        NUM,
        names,
        plain.fingerprint,
    )
    rng = np.random.default_rng(0)
    for _ in range(30):
        wanted = rng.integers(0, NUM, 7)
        assert_same(store.read(wanted, names), plain.read(wanted, names))
    assert set(inner.num_read.values()) == {NUM}
    found = store.read(np.array([], int), names)
    assert found["box"].shape == (0, 4)
    assert [found.table[name].type for name in names[1:]] == [
        plain.schema.field(name).type for name in names[1:]
    ]


def test_a_store_that_is_only_looked_at_is_not_copied(folder: Path) -> None:
    inner = make()
    InMemoryStore(inner).read(np.arange(3))
    held(inner).read(np.arange(3), ("label", "caption"))
    assert inner.num_read["image"] == 3 and not folder.exists()


def test_processes_share_one_copy_by_content(folder: Path) -> None:
    first, inner = held(make()), make()
    everything = first.read(np.arange(NUM))

    def received() -> InMemoryStore:
        store = pickle.loads(pickle.dumps(InMemoryStore(inner)))
        store.hold()
        return store

    second = received()
    assert_same(second.read(np.arange(NUM)), everything)
    assert second.inner.num_read["image"] == 0
    # A process that gets a task's copy keeps the memory for the next task.
    del first, second
    gc.collect()
    third = received()
    assert_same(third.read(np.arange(NUM)), everything)
    assert third.inner.num_read["image"] == 0
    third.close()
    assert [path.name for path in folder.iterdir()] == [".lock"]
    other = MemoryStore([b"other"] * NUM, np.arange(NUM))
    assert held(other).read(np.arange(NUM))["image"] == [b"other"] * NUM


def test_a_store_that_was_written_in_place_is_read_again(tmp_path: Path) -> None:
    images = tmp_path / "images"
    (images / "a").mkdir(parents=True)
    file = images / "a" / "0.png"
    file.write_bytes(b"before")
    old, new = (held(raypipe.open_store(images)) for _ in range(2))
    assert old.read(np.array([0]))["image"] == [b"before"]
    rewrite(file, b"before", b"behind")
    assert new.read(np.array([0]))["image"] == [b"behind"]


def test_a_store_beyond_the_limit_is_one_error_before_it_is_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_MEMORY_BYTES", "200000")
    inner = Counting([bytes(1000)] * 1000, np.arange(1000))
    with pytest.raises(
        ConfigError, match=r"takes about 1,\d{3},\d{3} bytes.*raise RAYPIPE_MEMORY_"
    ):
        held(inner).read(np.arange(8))
    assert inner.num_read["image"] <= 256  # so many tell it
    assert [path.name for path in folder.iterdir()] == [".lock"]


def test_a_stream_is_the_same_and_reads_each_sample_once(tmp_path: Path) -> None:
    inner = make()
    options: dict[str, Any] = {
        "plan": PlanConfig(epochs=3, micro_batch_size=5, seed=1),
        "transform": TransformConfig(train="small", val="resize", size=16),
        "pool": PoolConfig(engine="inline"),
    }
    expected = without_ray.digests(raypipe.open_stream(make(), make(), **options))
    spec = raypipe.open_stream(inner, make(), **options, in_memory=True)
    before = inner.num_read["image"]
    hold(spec.stores.values())
    assert without_ray.digests(spec) == expected
    assert inner.num_read["image"] - before <= NUM
    mixture = raypipe.open_stream({"a": inner, "b": make()}, **options, in_memory=True)
    hold(mixture.stores.values())
    assert isinstance(mixture.stores["train"], JoinedStore)
    assert without_ray.digests(mixture) == without_ray.digests(
        raypipe.open_stream({"a": make(), "b": make()}, **options)
    )
