"""Stores in object storage: the same as on a disk, and opened without a download."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
import tars
from foreign_lmdbs import DUMPS, write_entries, write_values
from lmdb_extension import needs_extension
from refused import store_refused
from s3_server import FaultyProxy, first
from tars import put

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import RemoteFile, read_whole
from raypipe.storage.filesystem import join_address, open_filesystem
from raypipe.storage.local_cache import shared_cache
from raypipe.stores import Store, destination, open_store, open_writer
from raypipe.stores.addresses import MANIFEST, list_files
from raypipe.stores.destination import new_remote, put_shard

CLASSES = ("ant", "bee", "cat")
IMAGES = [b"\x89PNG\r\n\x1a\n" + bytes([i]) * (9000 * i) for i in range(12)]
LABELS = [0, 0, 0, 1, 1, 2, 2, 0, 1, 2, 2, 2]
SHARDS = [(0, 4), (4, 5), (5, 12)]


def write(
    path: Path, start: int = 0, end: int = len(IMAGES), first: bytes = b""
) -> None:
    with open_writer(path, classes=CLASSES) as writer:
        for image, label in zip(IMAGES[start:end], LABELS[start:end], strict=True):
            writer.append({"image": first + image, "label": label})


def write_tar(path: Path, start: int, end: int) -> None:
    pairs = [*zip(IMAGES[start:end], LABELS[start:end], strict=True)]
    tars.write_tar(path, pairs, start)


def lmdb_files(address: str) -> list[RemoteFile]:
    return list_files(address, lambda name: name.endswith(".lmdb"), "*.lmdb")


def one_lmdb(folder: Path, bucket: str) -> tuple[Path, str]:
    write(folder / "a.lmdb")
    put(folder / "a.lmdb", f"{bucket}/x/a.lmdb")
    return folder / "a.lmdb", f"{bucket}/x/a.lmdb"


def shards(suffix: str) -> Callable[[Path, str], tuple[Path, str]]:
    def make(folder: Path, bucket: str) -> tuple[Path, str]:
        (folder / "local").mkdir()
        for number, (start, end) in enumerate(SHARDS):
            file = folder / "local" / f"{number:03d} %41.{suffix}"
            write(file, start, end)
            put(file, join_address(f"{bucket}/train", file.name))
        put(file, f"{bucket}/train/_hidden.{suffix}")
        return folder / "local", f"{bucket}/train"

    return make


def one_tar(folder: Path, bucket: str) -> tuple[Path, str]:
    write_tar(folder / "a.tar", 0, len(IMAGES))
    put(folder / "a.tar", f"{bucket}/a.tar")
    return folder / "a.tar", f"{bucket}/a.tar"


def several_tars(folder: Path, bucket: str) -> tuple[Path, str]:
    for number, (start, end) in enumerate(SHARDS):
        write_tar(folder / f"t-{number:02d}.tar", start, end)
        put(folder / f"t-{number:02d}.tar", f"{bucket}/t-{number:02d}.tar")
    return folder / "t-{00..02}.tar", f"{bucket}/t-{{00..02}}.tar"


MAKERS = {
    "one_lmdb": one_lmdb,
    "lmdb_shards": shards("lmdb"),
    "parquet_shards": shards("parquet"),
    "one_tar": one_tar,
    "several_tars": several_tars,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_remote_store_is_the_local_one(
    kind: str, bucket: str, tmp_path: Path
) -> None:
    path, address = MAKERS[kind](tmp_path, bucket)
    local, remote = open_store(path), open_store(address)
    assert remote.address == address
    for _ in range(2):
        assert len(remote) == len(local) == len(IMAGES)
        assert remote.fingerprint == local.fingerprint
        assert (tuple(remote.schema.names), remote.classes) == (
            tuple(local.schema.names),
            local.classes,
        )
        for wanted in (np.arange(len(IMAGES)), np.array([11, 0, 5, 5, 3])):
            expected, found = local.read(wanted), remote.read(wanted)
            assert (
                found["image"] == expected["image"]
                and found["label"].tolist() == expected["label"].tolist()
            )
        remote.close()
        remote = pickle.loads(pickle.dumps(remote))


def test_an_outage_while_a_store_is_read_is_waited_for(
    bucket: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    path, address = several_tars(tmp_path, bucket)
    store, wanted = open_store(address), np.arange(len(IMAGES))
    num = len(store)
    for file in (tmp_path / "cache").glob("shards/[!.]*"):
        # of tars, which were read when they were opened
        file.unlink()
    shared_cache().close_evicted()
    store = pickle.loads(pickle.dumps(store))
    proxy.outage = first(9)
    assert (
        len(store) == num
        and store.read(wanted)["image"] == open_store(path).read(wanted)["image"]
    )
    assert proxy.faults["SlowDown"] == 9


def test_a_tar_that_is_missing_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "t-0.tar", 0, 3)
    store_refused(
        r"t-1\.tar cannot be read as tar: .*No such", tmp_path / "t-{0..1}.tar"
    )


@needs_extension  # the library reads no ranges
def test_what_a_driver_asks_of_an_lmdb_store_downloads_nothing(
    bucket: str, proxy: FaultyProxy, tmp_path: Path
) -> None:
    _, address = MAKERS["lmdb_shards"](tmp_path, bucket)
    store = open_store(address)
    assert (
        len(store) == len(IMAGES)
        and store.classes
        and tuple(store.schema.names)
        and store.fingerprint
    )
    assert sum(proxy.sent.values()) < 40_000  # of 600,000
    assert not (tmp_path / "cache").exists()
    # Other processes are told what this one has found: a read costs them the shard and nothing else.
    store = pickle.loads(pickle.dumps(store))
    with proxy.lock:
        proxy.requests.clear()
        proxy.sent.clear()
    assert len(store) == len(IMAGES) and not proxy.requests
    assert store.read(np.array([4]))["image"] == [IMAGES[4]]
    assert [path for path in proxy.sent if ".lmdb" in path] == [
        f"/{bucket[5:]}/train/001%20%2541.lmdb"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.lmdb", r"none\.lmdb or its bucket does not exist"),
        ("none.parquet", r"none\.parquet or its bucket does not exist"),
        ("none-{00..01}.tar", r"none-00\.tar or its bucket does not exist"),
        ("none", r"none or its bucket does not exist"),
        ("junk.lmdb", r"junk\.lmdb cannot be opened as LMDB: "),
        ("junk.tar", r"junk\.tar cannot be read as tar: "),
        ("junk.7z", r"junk\.7z is not a store; raypipe reads"),
        ("folder.lmdb", r"folder\.lmdb has no \*\.lmdb files"),
        ("x-{9..1}.tar", r"stands for 0 shards"),
    ],
)
def test_what_is_no_store(name: str, message: str, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"junk" * 5000)
    for there in ("junk.lmdb", "junk.tar", "junk.7z", "folder.lmdb/x.txt"):
        put(tmp_path / "junk", f"{bucket}/{there}")
    store_refused(message, f"{bucket}/{name}")


# Writing


def upload(
    folder: Path, address: str, first: bytes = b"", overwrite: bool = False
) -> Store:
    file = folder / f"shard{Path(address).suffix}"
    with new_remote(address, overwrite) as shards:
        for number, (start, end) in enumerate(SHARDS):
            file.unlink(missing_ok=True)
            write(file, start, end, first)
            shards.append(put_shard(file, address, number))
    return open_store(address)


def test_a_store_is_written_over_as_a_whole(bucket: str, tmp_path: Path) -> None:
    address = f"{bucket}/x.lmdb"
    old = upload(tmp_path, address)
    assert len(old) == len(IMAGES)
    with pytest.raises(ZeroDivisionError), new_remote(address, overwrite=True):
        raise ZeroDivisionError
    assert open_store(address).fingerprint == old.fingerprint
    new = upload(tmp_path, address, b"new", overwrite=True)
    assert new.read(np.array([3]))["image"] == [b"new" + IMAGES[3]]
    assert len(lmdb_files(address)) == 3
    filesystem, path = open_filesystem(address)
    assert len(filesystem.get_file_info(pyarrow.fs.FileSelector(path))) == 4
    with pytest.raises(StoreError, match="does not exist"):
        # it read the old one, and none of it is cached
        old.read(np.array([3]))


def test_an_upload_that_fails_leaves_the_old_store_or_none(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, copied = destination.upload, []

    def fail_at_the_second(*arguments: Any) -> None:
        copied.append(arguments)
        if len(copied) == 2:
            raise OSError("the network is gone")
        copy(*arguments)

    upload(tmp_path, f"{bucket}/old.lmdb")
    monkeypatch.setattr(destination, "upload", fail_at_the_second)
    for name, overwrite in (("new.lmdb", False), ("old.lmdb", True)):
        copied.clear()
        with pytest.raises(
            StoreError, match=rf"{name} cannot be written: the network is gone"
        ):
            upload(tmp_path, f"{bucket}/{name}", b"new", overwrite)
    store_refused(r"new\.lmdb has no \*\.lmdb files", f"{bucket}/new.lmdb")
    store = open_store(f"{bucket}/old.lmdb")
    assert store.read(np.arange(len(IMAGES)))["image"] == IMAGES


def test_an_incomplete_store_is_neither_read_nor_overwritten_unasked(
    bucket: str, tmp_path: Path
) -> None:
    address = f"{bucket}/x.lmdb"
    write(tmp_path / "a.lmdb")
    put(tmp_path / "a.lmdb", f"{address}/00000-0123abcd.lmdb")
    store_refused(
        r"x\.lmdb is not complete: a conversion is still running or was", address
    )
    with pytest.raises(StoreError, match=r"x\.lmdb exists: choose another destination"):
        upload(tmp_path, address)
    assert len(upload(tmp_path, address, overwrite=True)) == len(IMAGES)
    assert len(lmdb_files(address)) == 3


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"version": 2},
        {"version": 1, "shards": [{}]},
        {"version": 1, "shards": []},
        [],
    ],
)
def test_a_manifest_that_is_none(content: object, bucket: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    put(tmp_path / MANIFEST, f"{bucket}/x.lmdb/{MANIFEST}")
    store_refused(
        r"_raypipe\.json (is not a manifest|has version 2)", f"{bucket}/x.lmdb"
    )


def test_lmdb_that_others_wrote_is_read_by_way_of_the_cache(
    bucket: str, tmp_path: Path
) -> None:
    labels = [number % 3 for number in range(len(IMAGES))]
    local = write_values(tmp_path / "local", IMAGES, labels, DUMPS["msgpack"])
    put(local / "data.mdb", f"{bucket}/train/data.mdb")
    for address in (f"{bucket}/train", f"{bucket}/train/data.mdb"):
        store = pickle.loads(pickle.dumps(open_store(address)))
        read = store.read(np.arange(len(IMAGES)))
        assert read["image"] == IMAGES and read["label"].tolist() == labels
        assert store.fingerprint == open_store(local).fingerprint
    for name in "ab":
        written = write_entries(tmp_path / name, {b"0": IMAGES[1]})
        put(written, f"{bucket}/lsun/{name}_train_lmdb/data.mdb")
    for address in (f"{bucket}/lsun", f"{bucket}/lsun/*_train_lmdb"):
        assert open_store(address).classes == ("a", "b")


def test_a_bucket_that_is_not_there_is_told_before_anything_is_written(
    bucket: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(ConfigError, match="bucket no-such does not exist"),
        new_remote("s3://no-such/x.lmdb", False),
    ):
        raise AssertionError


def test_a_shard_that_is_not_the_one_that_was_written(
    bucket: str, tmp_path: Path
) -> None:
    address = f"{bucket}/x.lmdb"
    upload(tmp_path, address)
    shard = lmdb_files(address)[0]
    content = bytearray(read_whole(shard.address) or b"")
    content[content.index(IMAGES[1]) + 100] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    put(tmp_path / "damaged", shard.address)
    with pytest.raises(
        StoreError,
        match=rf"is damaged: its checksum is \w+, but it was written with {shard.digest}",
    ):
        open_store(address).read(np.arange(2))
    (tmp_path / "damaged").write_bytes(content[:-1])
    put(tmp_path / "damaged", shard.address)
    store_refused(rf"has \d+ bytes, but was written with {shard.num_bytes}", address)
