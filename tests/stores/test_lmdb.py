"""LMDB stores: damage, forks, and the writer's map."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import numpy as np
import pytest

from raypipe.errors import StoreError
from raypipe.stores.lmdb import LMDBStore
from raypipe.stores.record import KEY
from raypipe.stores.writers import LMDBWriter

pytestmark = pytest.mark.usefixtures("in_own_folder")

METADATA = {
    "version": 1,
    "count": 1,
    "columns": [
        {"name": "image", "type": "binary"},
        {"name": "label", "type": "int64"},
    ],
    "classes": None,
    "fingerprint": "0" * 32,
}


def write(
    path: str, num_samples: int = 20, num_bytes: int = 9_000, **options: object
) -> str:
    with LMDBWriter(path, **options) as writer:
        for i in range(num_samples):
            writer.append({"image": bytes([i % 256]) * num_bytes, "label": i})
    return path


def edit(path: str, change: Callable[[lmdb.Transaction], object]) -> None:
    with (
        lmdb.open(path, subdir=False, lock=False) as env,
        env.begin(write=True) as txn,
    ):
        change(txn)


def record(image: bytes, label: int) -> bytes:
    return struct.pack("<qI", label, len(image)) + image


def test_layout_is_as_documented() -> None:
    with LMDBWriter("a.lmdb", classes=["x", "y"]) as writer:
        writer.append({"image": b"abc", "label": 1})
    with (
        lmdb.open("a.lmdb", subdir=False, readonly=True, lock=False) as env,
        env.begin() as txn,
    ):
        entries = dict(txn.cursor())
    metadata = json.loads(entries.pop(b"__raypipe__"))
    assert entries == {bytes(8): bytes([1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0]) + b"abc"}
    fingerprint = hashlib.blake2b(digest_size=16)
    for part in (
        b'[[["image", "binary"], ["label", "int64"]], ["x", "y"]]',
        record(b"abc", 1),
    ):
        fingerprint.update(len(part).to_bytes(8, "little") + part)
    assert metadata == METADATA | {
        "classes": ["x", "y"],
        "fingerprint": fingerprint.hexdigest(),
    }


def test_damaged_values_are_missing_samples() -> None:
    path = write("a.lmdb", num_samples=6)

    def damage(txn: lmdb.Transaction) -> None:
        txn.put(KEY.pack(1), b"")
        txn.put(KEY.pack(2), b"\x07\x00\x00")
        txn.put(KEY.pack(3), struct.pack("<q", 33))
        txn.put(KEY.pack(4), struct.pack("<qI", 44, 100) + b"short")
        txn.put(KEY.pack(5), record(b"", 55))

    edit(path, damage)
    batch = LMDBStore(path).read(np.array([5, 4, 3, 2, 1, 0]))
    assert batch["image"] == [b"", None, None, None, None, bytes(9_000)]
    assert batch["label"] == [55, 44, 33, None, None, 0]


def test_missing_key_is_a_missing_sample() -> None:
    path = write("a.lmdb", num_samples=3)
    edit(path, lambda txn: (txn.delete(KEY.pack(1)), txn.put(b"other", b"")))
    batch = LMDBStore(path).read(np.arange(3))
    assert [image is None for image in batch["image"]] == [False, True, False]
    assert batch["label"] == [0, None, 2]


def test_count_mismatch() -> None:
    path = write("a.lmdb", num_samples=3)
    edit(path, lambda txn: txn.delete(KEY.pack(1)))
    with pytest.raises(
        StoreError, match=r"a\.lmdb has 2 samples, but was written with 3"
    ):
        len(LMDBStore(path))


def test_shards_must_agree() -> None:
    write("0.lmdb", classes=["a"])
    write("1.lmdb", classes=["b"])
    with pytest.raises(
        StoreError, match=r"1\.lmdb and .*0\.lmdb differ in schema or classes"
    ):
        len(LMDBStore("."))


def test_empty_shards() -> None:
    for name, num_samples in (("0", 0), ("1", 2), ("2", 0), ("3", 1)):
        write(f"{name}.lmdb", num_samples)
    store = LMDBStore(".")
    assert store.read(np.array([2, 0, 1]))["label"].tolist() == [0, 0, 1]


def test_threads() -> None:
    store = LMDBStore(write("a.lmdb"))
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(store.read, [np.arange(20)] * 400):
            assert found["label"].tolist() == list(range(20))


def test_writer_writes_equal_files() -> None:
    first, second = write("a.lmdb"), write("b.lmdb")
    assert Path(first).read_bytes() == Path(second).read_bytes()
