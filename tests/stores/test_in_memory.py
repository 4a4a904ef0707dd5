"""Stores whose values are kept in shared memory."""

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
from raypipe.stores.in_memory import InMemoryStore
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="only Linux shares memory by descriptors"
)

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


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


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
    store = InMemoryStore(inner)
    assert (len(store), tuple(store.schema.names), store.fingerprint) == (
        NUM,
        tuple(plain.schema.names),
        plain.fingerprint,
    )
    rng = np.random.default_rng(0)
    for _ in range(30):
        wanted = rng.integers(0, NUM, 7)
        assert_same(
            store.read(wanted, tuple(store.schema.names)),
            plain.read(wanted, tuple(plain.schema.names)),
        )
    assert inner.num_read["words"] > 200  # of a kind that is not kept
    kept = {name: num for name, num in inner.num_read.items() if name != "words"}
    # The first read of all was made twice, to find that.
    assert max(kept.values()) <= NUM + 2 * 7
    assert store.read(np.array([], int), tuple(store.schema.names))["box"].shape == (
        0,
        4,
    )


def test_processes_share_one_copy_by_content() -> None:
    first, inner = InMemoryStore(make()), make()
    everything = first.read(np.arange(NUM))
    second = pickle.loads(pickle.dumps(InMemoryStore(inner)))
    assert_same(second.read(np.arange(NUM)), everything)
    assert second.inner.num_read["image"] == 0
    # A process that gets a task's copy keeps the memory for the next task.
    del first, second
    gc.collect()
    third = pickle.loads(pickle.dumps(InMemoryStore(inner)))
    assert_same(third.read(np.arange(NUM)), everything)
    assert third.inner.num_read["image"] == 0
    third.close()
    other = MemoryStore([b"other"] * NUM, np.arange(NUM))
    assert InMemoryStore(other).read(np.arange(NUM))["image"] == [b"other"] * NUM


def test_a_store_that_was_written_in_place_is_read_again(tmp_path: Path) -> None:
    images = tmp_path / "images"
    (images / "a").mkdir(parents=True)
    file = images / "a" / "0.png"
    file.write_bytes(b"before")
    old, new = (InMemoryStore(raypipe.open_store(images)) for _ in range(2))
    assert old.read(np.array([0]))["image"] == [b"before"]
    rewrite(file, b"before", b"behind")
    assert new.read(np.array([0]))["image"] == [b"behind"]


def test_beyond_the_limit_the_rest_is_read_from_the_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAYPIPE_MEMORY_BYTES", str(14_000))
    inner = make()
    store = InMemoryStore(inner)
    for _ in range(3):
        assert_same(store.read(np.arange(NUM)), make().read(np.arange(NUM)))
    assert NUM < inner.num_read["image"] < 3 * NUM
    told = [record.getMessage() for record in caplog.records]
    assert (
        len(told) == 1
        and "RAYPIPE_MEMORY_BYTES" in told[0]
        and "there is no room for more" in told[0]
    )


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
    assert without_ray.digests(spec) == expected
    assert inner.num_read["image"] - before <= NUM
    mixture = raypipe.open_stream({"a": inner, "b": make()}, **options, in_memory=True)
    assert isinstance(mixture.stores["train"], JoinedStore)
    assert without_ray.digests(mixture) == without_ray.digests(
        raypipe.open_stream({"a": make(), "b": make()}, **options)
    )


def test_close_gives_the_memory_back(tmp_path: Path) -> None:
    # that no other test keeps
    store = InMemoryStore(MemoryStore([picture(1)] * 2, [0, 1]))
    store.read(np.arange(2))
    folder = tmp_path / "cache" / "memory"
    assert len([path for path in folder.iterdir() if path.name != ".lock"]) == 1
    store.close()
    assert [path.name for path in folder.iterdir()] == [".lock"]
    assert store.read(np.array([1]))["image"] == [picture(1)]
