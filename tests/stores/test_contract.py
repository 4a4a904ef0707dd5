"""One contract that every store keeps."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from foreign_lmdbs import DUMPS, write_folders, write_lsun, write_values
from rewritten import rewrite
from tars import write_tar

from raypipe.errors import OutageError, StoreError
from raypipe.storage import retries
from raypipe.stores import SimpleStore, Store, open_store, open_writer
from raypipe.stores.base import name_of
from raypipe.stores.facts import facts_of, written_of
from raypipe.stores.filter import matching
from raypipe.stores.memory import MemoryStore

CLASSES = ("ant", "bee", "cat")
LABELS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 2]
# No store looks into an image; sizes around LMDB's page size matter more than pixels do.
IMAGES = [b"\x89PNG\r\n\x1a\n" + bytes([i]) * (700 * i) for i in range(len(LABELS))]


class JsonStore(SimpleStore):
    """A store of one's own: images as hexadecimal digits, and labels."""

    schema = pa.schema({"image": pa.binary(), "label": pa.int64()})
    classes = CLASSES

    def open(self) -> dict[str, Any]:
        return json.loads(Path(self.address).read_text())

    def count(self) -> int:
        return len(self.opened["labels"])

    def sample(self, index: int) -> dict[str, Any]:
        image = bytes.fromhex(self.opened["images"][index])
        return {"image": image, "label": self.opened["labels"][index]}

    def facts(self) -> dict[str, Any]:
        return self.opened


def _write(
    path: Path, images: list[bytes], labels: list[int], **options: object
) -> None:
    with open_writer(path, classes=CLASSES, **options) as writer:
        for image, label in zip(images, labels, strict=True):
            writer.append({"image": image, "label": label})


def make_lmdb(folder: Path, images: list[bytes]) -> Store:
    _write(folder / "data.lmdb", images, LABELS)
    return open_store(folder / "data.lmdb")


def make_lmdb_shards(folder: Path, images: list[bytes]) -> Store:
    for number, (start, end) in enumerate([(0, 4), (4, 5), (5, 10)]):
        _write(folder / f"{number:05d}.lmdb", images[start:end], LABELS[start:end])
    return open_store(folder)


def make_lmdb_of_folders(folder: Path, images: list[bytes]) -> Store:
    return open_store(write_folders(folder / "data.lmdb", images, LABELS, CLASSES))


def make_lmdb_of_lsun(folder: Path, images: list[bytes]) -> Store:
    return open_store(write_lsun(folder, images, LABELS, CLASSES))


def make_lmdb_of_pickles(folder: Path, images: list[bytes]) -> Store:
    return open_store(
        write_values(folder / "data", images, LABELS, DUMPS["pickle"]),
        trust_pickles=True,
    )


def make_lmdb_of_msgpack(folder: Path, images: list[bytes]) -> Store:
    return open_store(write_values(folder / "data", images, LABELS, DUMPS["msgpack"]))


def make_parquet(folder: Path, images: list[bytes]) -> Store:
    _write(folder / "data.parquet", images, LABELS, row_group_size=3)
    return open_store(folder / "data.parquet")


def make_parquet_hf(folder: Path, images: list[bytes]) -> Store:
    names = ",".join(f'"{name}"' for name in CLASSES)
    metadata = {
        "huggingface": '{"info": {"features": {"image": {"_type": "Image"}, '
        f'"label": {{"names": [{names}], "_type": "ClassLabel"}}}}}}}}'
    }
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("image", kind), ("label", pa.int64())], metadata=metadata)
    for number, (start, end) in enumerate([(0, 6), (6, 10)]):
        column = [
            {"bytes": image, "path": f"{i}.png"}
            for i, image in enumerate(images[start:end])
        ]
        table = pa.table({"image": column, "label": LABELS[start:end]}, schema=schema)
        pq.write_table(table, folder / f"train-{number}.parquet", row_group_size=4)
    return open_store(folder)


def make_folder(folder: Path, images: list[bytes]) -> Store:
    for number, (image, label) in enumerate(zip(images, LABELS, strict=True)):
        file = folder / CLASSES[label] / f"{number:03d}.PNG"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(image)
    return open_store(folder)


def make_table(folder: Path, images: list[bytes]) -> Store:
    rows = ["path,label"]
    for number, (image, label) in enumerate(zip(images, LABELS, strict=True)):
        (folder / f"{number:03d}.png").write_bytes(image)
        rows.append(f"{number:03d}.png,{CLASSES[label]}")
    (folder / "data.csv").write_text("\n".join(rows))
    return open_store(folder / "data.csv")


def make_webdataset(folder: Path, images: list[bytes]) -> Store:
    write_tar(folder / "data.tar", [*zip(images, LABELS, strict=True)])
    return open_store(folder / "data.tar")


def make_webdataset_shards(folder: Path, images: list[bytes]) -> Store:
    for number, (start, end) in enumerate([(0, 4), (4, 5), (5, 10)]):
        pairs = [*zip(images[start:end], LABELS[start:end], strict=True)]
        write_tar(folder / f"{number:05d}.tar", pairs, start)
    return open_store(folder)


def make_memory(folder: Path, images: list[bytes]) -> Store:
    return MemoryStore(images, LABELS, CLASSES)


def make_memory_groups(folder: Path, images: list[bytes]) -> Store:
    return MemoryStore(images, LABELS, CLASSES, group_size=4)


def make_simple(folder: Path, images: list[bytes]) -> Store:
    content = {"images": [image.hex() for image in images], "labels": LABELS}
    (folder / "data.json").write_text(json.dumps(content))
    return JsonStore(folder / "data.json")


MAKERS: dict[str, Callable[[Path, list[bytes]], Store]] = {
    "lmdb": make_lmdb,
    "lmdb_shards": make_lmdb_shards,
    "lmdb_of_folders": make_lmdb_of_folders,
    "lmdb_of_lsun": make_lmdb_of_lsun,
    "lmdb_of_pickles": make_lmdb_of_pickles,
    "lmdb_of_msgpack": make_lmdb_of_msgpack,
    "parquet": make_parquet,
    "parquet_hf": make_parquet_hf,
    "folder": make_folder,
    "table": make_table,
    "webdataset": make_webdataset,
    "webdataset_shards": make_webdataset_shards,
    "simple": make_simple,
    "memory": make_memory,
    "memory_groups": make_memory_groups,
}
OF_VALUES = ("lmdb_of_pickles", "lmdb_of_msgpack")
WITHOUT_CLASSES = ("webdataset", "webdataset_shards", *OF_VALUES)
GROUPS = {
    "parquet": [0, 3, 6, 9, 10],
    "parquet_hf": [0, 4, 6, 10],
    "memory_groups": [0, 4, 8, 10],
}


@pytest.fixture(params=MAKERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Store:
    return MAKERS[kind](tmp_path, IMAGES)


@pytest.mark.parametrize(
    "indices", [range(10), range(9, -1, -1), [7], [9, 0, 4, 4, 3, 9, 1], [5, 5, 5], []]
)
def test_reads_in_the_order_asked_for(store: Store, indices: Sequence[int]) -> None:
    assert len(store) == len(IMAGES)
    batch = store.read(np.array(indices, np.int64))
    assert list(batch) == ["image", "label"]
    assert list(batch["image"]) == [IMAGES[i] for i in indices]
    for image in batch["image"]:  # a view is of uint8, and so equals its bytes
        assert type(image) is bytes or (
            type(image) is memoryview and image.format == "B" and image.readonly
        )
    assert isinstance(batch["label"], np.ndarray)
    assert batch["label"].dtype == np.int64
    assert batch["label"].tolist() == [LABELS[i] for i in indices]


def test_reads_the_columns_asked_for(store: Store) -> None:
    assert list(store.read(np.array([1]), columns=("label",))) == ["label"]
    both = store.read(np.array([1]), columns=("label", "image"))
    assert set(both) == {"image", "label"}


def test_result_belongs_to_the_reader(store: Store) -> None:
    store.read(np.arange(4))["label"][:] = 77
    assert store.read(np.arange(4))["label"].tolist() == LABELS[:4]


def test_columns_and_classes(store: Store, kind: str) -> None:
    assert tuple(store.schema.names) == (
        "image",
        "label",
        *(["key"] if kind.startswith("lmdb_of") else []),
        *(["path"] if kind == "table" else []),
        *(["name"] if kind != "simple" else []),
    )
    assert store.classes == (CLASSES if kind not in WITHOUT_CLASSES else None)


NAMES = {
    "lmdb": "/data.lmdb, key 9",
    "lmdb_shards": "/00002.lmdb, key 4",
    "lmdb_of_folders": "/data.lmdb, key cat/000009.jpg",
    "lmdb_of_lsun": f"/cat_train_lmdb, key {9 * 0x9E3779B97F4A7C15:040x}",
    "lmdb_of_pickles": "/data, key 9",
    "lmdb_of_msgpack": "/data, key 9",
    "parquet": "/data.parquet, row group 3, row 0",
    "parquet_hf": "/train-1.parquet, row group 0, row 3, 3.png",
    "folder": "/cat/009.PNG",
    "table": "/009.png",
    "webdataset": "/data.tar, 000009",
    "webdataset_shards": "/00002.tar, 000009",
}


def test_names_its_samples(store: Store, kind: str, tmp_path: Path) -> None:
    assert name_of(store, 9) == (f"{tmp_path}{NAMES[kind]}" if kind in NAMES else "")
    assert name_of(store, len(IMAGES) + 7) == ""


# in the column `name`; without one in the files, the number of the row
NAMED = {
    "lmdb_of_folders": "cat/000009.jpg",
    "lmdb_of_lsun": f"{9 * 0x9E3779B97F4A7C15:040x}",
    "parquet_hf": "3.png",
    "folder": "cat/009.PNG",
    "table": "009.png",
    "webdataset": "000009",
    "webdataset_shards": "000009",
}


def test_has_a_column_of_names(store: Store, kind: str) -> None:
    if kind == "simple":
        pytest.skip("it has the columns of its class")
    name = NAMED.get(kind, "9")
    assert store.read(np.array([9, 0, 9]), ("name",))["name"][::2] == [name] * 2
    assert matching(store, f"name == {name!r}")[9]


def test_groups(store: Store, kind: str) -> None:
    if kind not in GROUPS:
        assert store.groups is None
        return
    assert store.groups is not None
    assert store.groups.dtype == np.int64
    assert store.groups.tolist() == GROUPS[kind]


@pytest.mark.parametrize("index", [-1, 10, 1 << 40])
def test_index_outside(store: Store, index: int) -> None:
    with pytest.raises(IndexError, match=rf"{index} is outside \[0, 10\)"):
        store.read(np.array([0, index]))


def test_unknown_column(store: Store) -> None:
    with pytest.raises(
        StoreError, match=r"no column 'caption'; its columns are image, label"
    ):
        store.read(np.array([0]), columns=("image", "caption"))


@pytest.mark.parametrize("opened", [False, True])
def test_pickles_without_its_contents(store: Store, kind: str, opened: bool) -> None:
    if opened:
        store.read(np.arange(10))
    pickled = pickle.dumps(store)
    assert len(pickled) < 500 or kind.startswith("memory")
    copy = pickle.loads(pickled)
    assert copy.address == store.address
    assert copy.fingerprint == store.fingerprint
    assert copy.read(np.array([8, 2]))["image"] == [IMAGES[8], IMAGES[2]]
    # Both are open now, in one process.
    assert store.read(np.array([8]))["image"] == [IMAGES[8]]


def test_files_that_were_written_in_place_are_told_from_others(
    store: Store, kind: str, tmp_path: Path
) -> None:
    before = store.fingerprint, written_of(store), facts_of(store)
    store.close()
    assert (store.fingerprint, written_of(store), facts_of(store)) == before
    store.close()
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        rewrite(file)
    fingerprint, written, facts = before
    is_in_memory = kind.startswith("memory")
    assert store.fingerprint == fingerprint
    assert (written_of(store) == written) == is_in_memory
    # nobody else knows the code of a user's store
    assert (facts_of(store) == facts) == (is_in_memory or kind == "simple")


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_copy_waits_for_a_store_that_has_vanished_for_a_moment(
    store: Store, kind: str, comes_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(store.address)
    if not path.exists() or kind == "simple":
        pytest.skip("it is not raypipe's, or not on disk")
    expected = store.read(np.arange(3))["image"]
    copy = pickle.loads(pickle.dumps(store))
    away = path.rename(path.with_name(f"{path.name}-{comes_back}"))
    clock = SimpleNamespace(
        monotonic=time.monotonic,
        sleep=lambda _: comes_back and away.exists() and away.rename(path),
    )
    monkeypatch.setattr(retries, "time", clock)
    if comes_back:
        assert list(copy.read(np.arange(3))["image"]) == list(expected)
    else:
        monkeypatch.setenv("RAYPIPE_STORAGE_PATIENCE_S", "0")
        with pytest.raises(OutageError, match="has vanished"):
            copy.read(np.arange(3))
        away.rename(path)


def test_a_node_with_other_contents_is_found_out(
    store: Store, kind: str, tmp_path: Path
) -> None:
    if kind.startswith("memory"):
        pytest.skip("it is sent with its contents")
    closed = pickle.dumps(store)
    assert len(store) == 10
    opened = pickle.dumps(store)
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    MAKERS[kind](tmp_path, [image + b"more" for image in IMAGES])
    if kind == "folder":  # of which the paths are compared, and no sizes
        (tmp_path / "ant" / "000.PNG").rename(tmp_path / "ant" / "00.PNG")
    if kind == "table":
        (tmp_path / "data.csv").write_text("path,label" + "\nother.png,ant" * 10)
    assert len(pickle.loads(closed)) == 10
    with pytest.raises(
        StoreError, match=r"has other contents on this machine \(.+\), or by now"
    ):
        pickle.loads(opened).read(np.array([0]))
    with pytest.raises(StoreError, match="has other contents"):
        len(pickle.loads(pickle.dumps(pickle.loads(opened))))


def test_fingerprint_is_that_of_the_contents(
    store: Store, kind: str, tmp_path: Path
) -> None:
    def fingerprint(name: str, images: list[bytes]) -> str:
        (tmp_path / name).mkdir()
        return MAKERS[kind](tmp_path / name, images).fingerprint

    assert re.fullmatch("[0-9a-f]{32}", store.fingerprint)
    assert fingerprint("again", IMAGES) == store.fingerprint
    assert fingerprint("other", [*IMAGES[:-1], IMAGES[-1] + b"!"]) != store.fingerprint
    store.close()
    assert pickle.loads(pickle.dumps(store)).fingerprint == store.fingerprint


def test_reads_after_close(store: Store) -> None:
    store.read(np.array([0]))
    store.close()
    store.close()
    assert store.read(np.array([3]))["image"] == [IMAGES[3]]
