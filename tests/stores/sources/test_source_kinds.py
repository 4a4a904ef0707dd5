"""Which source is at an address, and what others wrote: each file is of the library that its README names."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refused import source_refused, source_rows

from raypipe.errors import ConfigError
from raypipe.stores import open_store
from raypipe.stores.kinds import kind_of
from raypipe.stores.sources import Asked, open_source
from raypipe.stores.sources.shards import values_of

DATA = Path(__file__).parents[1] / "data"
JPEGS = json.loads((DATA / "jpegs.json").read_text())


def hashes(rows: list[dict[str, Any]]) -> list[str]:
    return [hashlib.sha256(row["image"]).hexdigest() for row in rows]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tensorflow-train.tfrecord", "TFRecord"),
        ("mxnet/one-label.rec", "MXNet RecordIO"),
        ("mds", "MosaicML's MDS"),
        ("mds-zstd", "MosaicML's MDS"),
        ("litdata", "LitData"),
        ("litdata-batch", "LitData"),
        ("litdata-chunk", "LitData"),
        ("arrow", "Arrow of the datasets library"),
    ],
)
def test_files_of_their_own_libraries_give_the_same_images(
    name: str, kind: str
) -> None:
    rows = source_rows(DATA / name)
    assert kind_of(str(DATA / name)) == kind
    assert hashes(rows) == JPEGS
    first_label = 1 if kind == "TFRecord" else 0
    assert [row["label"] for row in rows] == [first_label + i % 4 for i in range(8)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("train-00000-of-01024", "TFRecord"),
        ("mnist-train.tfrecord-00000-of-00001", "TFRecord"),
        ("a.tfrecord.gz", "TFRecord"),
        ("a.TFRec", "TFRecord"),
        ("a.hdf5", "HDF5"),
        ("a.pth", "tensors"),
        ("package.module:samples", "samples of a function"),
        ("train-00000-of-00002.parquet", "parquet"),
        ("a.tfrecord.parquet", "parquet"),
        ("a.tar", "tar"),
        ("a.CSV", "table"),
        ("C:/train.lmdb", "lmdb"),
    ],
)
def test_names_tell_the_kind(name: str, kind: str) -> None:
    is_function = kind == "samples of a function"
    assert kind_of(name if is_function else f"s3://bucket/{name}") == kind


def test_class_folders_stay_a_store_next_to_other_files(tmp_path: Path) -> None:
    (tmp_path / "backup.zip").write_bytes(b"")
    assert kind_of(str(tmp_path)) == "zip"
    (tmp_path / "cat").mkdir()
    assert kind_of(str(tmp_path)) == "folder" and open_source(tmp_path) is None


def test_a_folder_is_known_by_its_files_and_not_by_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "photos.zip"
    (folder / "cat").mkdir(parents=True)
    (folder / "cat" / "a.jpg").write_bytes(b"x")
    assert open_source(folder) is None and len(open_store(folder)) == 1


def test_a_missing_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "a.h5").write_bytes(b"")
    source_refused(
        r"HDF5 needs h5py: pip install 'raypipe-data\[sources\]'", tmp_path / "a.h5"
    )


# A user's own


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_samples.py").write_text(
        "def two():\n"
        "    yield {'image': b'x', 'label': 1}\n"
        "    yield {'image': b'y', 'label': 0}\n"
        "two.classes = ['cat', 'dog']\n"
        "def three():\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("module")
def test_a_function_of_the_user_gives_samples_and_class_names() -> None:
    source = open_source("own_samples:two")
    assert source is not None and source.classes == ("cat", "dog")
    assert source_rows("own_samples:two") == [
        {"image": b"x", "label": 1},
        {"image": b"y", "label": 0},
    ]
    assert source_rows("own_samples:two", label="") == [
        {"image": b"x"},
        {"image": b"y"},
    ]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_samples:three", "gives a int: it must be a generator function"),
        ("own_samples:no", "cannot be imported"),
    ],
)
def test_a_function_that_gives_no_samples(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(name)


# Values of MDS and LitData, and the columns of the datasets library


def test_mds_values_of_all_encodings_but_pickles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = source_rows(DATA / "mds")[3]
    found = {
        name: row[name] for name in ("label", "name", "score", "size", "meta", "big")
    }
    assert found == {
        "label": 3,
        "name": "ä3",
        "score": 0.75,
        "size": 3000,
        "meta": {"i": 3},
        "big": 1000,
    }
    assert row["grid"].tolist() == [[3] * 4] and np.array_equal(
        row["fixed"], np.full((2, 2), -3, np.int16)
    )
    assert row["pixels"].startswith(b"\x89PNG") and "secret" not in row
    assert (
        "'secret' is left out: it is a pickle, which may run a program" in caplog.text
    )


def test_litdata_values_of_all_encodings_but_pickles() -> None:
    row = source_rows(DATA / "litdata")[3]
    assert {name: row[name] for name in ("name", "score", "even")} == {
        "name": "ä3",
        "score": 0.75,
        "even": False,
    }
    assert row["grid"].tolist() == [[3] * 4] and row["row"].tolist() == [0, 1, 2]
    assert row["tensor"].tolist() == [[3.0, 3.0]] * 2 and row["nested.raw"] == b"xxx"
    assert (row["nested.pair.0"], row["nested.pair.1"]) == (
        3,
        -3,
    ) and "secret" not in row


@pytest.mark.parametrize("name", ["mds", "litdata"])
def test_a_pickle_is_no_label(name: str) -> None:
    source_refused(
        r"'secret' is a pickle, which may run a program, which raypipe does not",
        DATA / name,
        "image",
        "secret",
    )


@pytest.mark.parametrize(
    "name", ["mds", "mds-zstd", "litdata", "litdata-batch", "litdata-chunk"]
)
def test_a_damaged_shard_is_named(tmp_path: Path, name: str) -> None:
    for file in (DATA / name).iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(
            content if file.name == "index.json" else content[:-40]
        )
    source_refused(r"(shard\.00000|chunk-0-0)\S* .*copy it again", tmp_path)


@pytest.mark.parametrize("name", ["mds", "litdata"])
def test_an_index_that_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    index = (DATA / name / "index.json").read_text()
    for shard in ("shard.00000.mds", "chunk-0-0.bin"):
        index = index.replace(f'"{shard}"', f'"../{name}/{shard}"')
    (tmp_path / "index.json").write_text(index)
    (tmp_path / "shard.00001.mds").write_bytes(b"")
    source_refused(r"names '\.\./\S+', which is not a file in this folder", tmp_path)


def test_arrow_has_class_names_and_all_columns() -> None:
    source = open_source(DATA / "arrow")
    assert source is not None and source.classes == ("cat", "dog", "owl", "yak")
    assert [row["name"] for row in source.samples] == [f"ä{i}" for i in range(8)]


def test_a_dataset_dict_asks_for_a_split(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("test", "train"):
        (tmp_path / split).mkdir()
    source_refused(rf"has the splits test, train\. .*{tmp_path}/test", tmp_path)


@pytest.mark.parametrize("encoding", ["jpeg_array", "list[jpeg]", "jpeg"])
def test_a_list_of_one_image_is_the_image(encoding: str) -> None:
    decode = values_of("a", {"image": encoding}, Asked())["image"].decode
    image = b"\xff\xd8\xff" + bytes(20)
    assert decode(image) == image
    if encoding != "jpeg":
        assert decode(struct.pack("<II", 1, len(image)) + image) == image
        with pytest.raises(ValueError, match="it has 2 images, and a sample has one"):
            decode(struct.pack("<III", 2, 3, 3) + b"abcdef")
