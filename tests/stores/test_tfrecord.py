"""TFRecord files: TensorFlow's own, those of others, and damaged ones.

data/tensorflow-train.tfrecord was written by TensorFlow, tests/stores/data/README.md has how.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tfrecord
import tfrecords

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.base import name_of
from raypipe.stores.tfrecord import TFRecordStore, is_tfrecord

DATA = Path(__file__).with_name("data")
IMAGES = [b"\xff\xd8\xff" + bytes([i]) * (30 * i + 1) for i in range(20)]
LABELS = [i % 5 + 1 for i in range(20)]


def slim(i: int) -> dict[str, Any]:
    """As TF-Slim's build_imagenet_data.py has it, in part."""
    return {
        "image/height": 40,
        "image/colorspace": b"RGB",
        "image/class/label": LABELS[i],
        "image/class/text": b"tench",
        "image/object/bbox/xmin": 0.25,
        "image/object/bbox/label": [1, 2, 3],
        "image/encoded": IMAGES[i],
    }


def write(path: Path, indices: range = range(20)) -> Path:
    return tfrecords.write(path, (slim(i) for i in indices))


def test_what_tensorflow_wrote_is_read() -> None:
    expected = json.loads((DATA / "tensorflow-train.json").read_text())
    store = open_store(DATA / "tensorflow-train.tfrecord")
    assert len(store) == len(expected) and store.columns == ("image", "label")
    batch = store.read(np.arange(len(store)))
    assert [hashlib.sha256(image).hexdigest() for image in batch["image"]] == [one["sha256"] for one in expected]
    assert batch["label"].tolist() == [one["label"] for one in expected]
    assert min(batch["label"]) == 1  # not shifted


def test_what_the_tfrecord_package_wrote_is_read(tmp_path: Path) -> None:
    writer = tfrecord.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    for image, label in zip(IMAGES, LABELS, strict=True):
        writer.write({"image/encoded": (image, "byte"), "image/class/label": (label, "int")})
    writer.close()
    batch = open_store(tmp_path / "a.tfrecord").read(np.arange(20))
    assert batch["image"] == IMAGES and batch["label"].tolist() == LABELS


def test_files_of_a_split_are_one_store(tmp_path: Path) -> None:
    for number, rows in enumerate((range(0, 7), range(7, 8), range(8, 20))):
        write(tmp_path / f"train-{number:05d}-of-00003", rows)
    order = np.random.default_rng(1).permutation(20)
    assert name_of(open_store(tmp_path), 9) == f"{tmp_path}/train-00002-of-00003, record 1"
    stores = [
        open_store(tmp_path),
        open_store(tmp_path / "train-*"),
        open_store(tmp_path / "train-{00000..00002}-of-00003"),
    ]
    for store in stores:
        batch = store.read(order)
        assert batch["image"] == [IMAGES[i] for i in order] and batch["label"].tolist() == [
            LABELS[i] for i in order
        ]
        assert store.fingerprint == stores[0].fingerprint
    assert len(open_store(tmp_path / "train-00001-of-00003")) == 1
    write(tmp_path / "validation-00000-of-00001")
    with pytest.raises(StoreError, match=r"several splits: train \(3\), validation \(1\)"):
        len(open_store(tmp_path))
    assert len(open_store(tmp_path / "train-*")) == 20


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("a.tfrecord", True),
        ("a.tfrecords", True),
        ("a.TFREC", True),
        ("a.tfrecord.gz", True),
        ("train-00000-of-01024", True),
        ("a.tfrecord-00000-of-00010", True),
        ("train-00000-of-00002.parquet", False),
        ("tfrecord", False),
        ("notes.txt", False),
    ],
)
def test_names(name: str, is_one: bool) -> None:
    assert is_tfrecord(name) == is_one


def test_features_of_other_names(tmp_path: Path) -> None:
    path = tfrecords.write(
        tmp_path / "a.tfrecord", ({"jpg": IMAGES[i], "cls": i, "label": i % 2} for i in range(3))
    )
    with pytest.raises(
        StoreError,
        match=r"record 0 has no feature of bytes 'image/encoded or .* only: cls \(int64\), jpg \(bytes\)",
    ):
        len(open_store(path))
    store = open_store(path, image_column="jpg")
    assert store.read(np.arange(3))["label"].tolist() == [0, 1, 0]
    store = open_store(path, image_column="jpg", label_column="cls")
    assert store.read(np.array([2, 1]))["label"].tolist() == [2, 1]
    assert store.fingerprint != open_store(path, image_column="jpg").fingerprint
    with pytest.raises(StoreError, match="no feature of int64 'jpg' for label"):
        len(open_store(path, image_column="jpg", label_column="jpg"))


def test_without_labels(tmp_path: Path) -> None:
    store = open_store(tfrecords.write(tmp_path / "a.tfrecord", ({"image": image} for image in IMAGES)))
    assert store.columns == ("image",)
    assert store.read(np.arange(20), ("image",))["image"] == IMAGES


def test_a_label_that_is_missing_is_loud(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [slim(0), slim(1), slim(2)]
    rows[1]["image/class/label"] = [1, 2]
    del rows[2]["image/class/label"]
    store = open_store(tfrecords.write(tmp_path / "a.tfrecord", rows))
    assert store.read(np.array([0]))["label"].tolist() == [1]
    for row in (1, 2):
        with pytest.raises(StoreError, match=rf"a\.tfrecord, record {row}, has no label in 'image/class/label'"):
            store.read(np.array([row]))


def test_labels_of_any_coding(tmp_path: Path) -> None:
    """Below zero, not packed, beside fields of numbers that no one knows."""
    image = tfrecords.field(1, b"image") + tfrecords.field(2, tfrecords.feature(b"x"))
    data = b""
    for label in (-1, 1 << 62, -(1 << 63)):
        unpacked = tfrecords.field(3, b"\x08" + tfrecords.varint(label))
        entry = tfrecords.field(1, b"label") + tfrecords.field(
            2, b"\x79" + bytes(8) + unpacked + b"\x7d" + bytes(4)
        )
        data += tfrecords.record(tfrecords.field(1, tfrecords.field(1, image) + tfrecords.field(1, entry)))
    (tmp_path / "a.tfrecord").write_bytes(data)
    labels = open_store(tmp_path / "a.tfrecord").read(np.arange(3))["label"]
    assert labels.tolist() == [-1, 1 << 62, -(1 << 63)]


def test_damage_is_a_bad_sample_and_shows_in_no_other(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord")
    data = bytearray(path.read_bytes())
    data[data.find(IMAGES[7])] ^= 1
    data[data.find(IMAGES[19]) - 30] ^= 1
    path.write_bytes(data)
    batch = open_store(path).read(np.arange(20))
    assert [i for i, image in enumerate(batch["image"]) if image != IMAGES[i]] == [7, 19]
    assert batch["image"][7] is None and batch["image"][19] is None and batch["label"][7] == 0
    assert open_store(path).columns == ("image", "label")


def cut(num: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:-num]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut(1), "is truncated: a record of"),
        (cut(5), "is truncated"),
        (lambda data: data + data[:7], "is truncated within a header at byte"),
        (
            lambda data: data[:8] + b"\0\0\0\0" + data[12:],
            "is no TFRecord file: the checksum of the length at byte 0",
        ),
        (lambda data: data + bytes(40), "is damaged: the checksum of the length at byte [1-9]"),
        (lambda data: gzip.compress(data), "is compressed by GZIP, .* gunzip"),
        (lambda data: zlib.compress(data), "is compressed by ZLIB"),
        (lambda _: b"", "has no records"),
        (lambda _: b"no record" * 99, "is no TFRecord file"),
        (lambda _: tfrecords.record(b""), "has no tf.train.Example with features among"),
        (lambda _: tfrecords.record(b"\xff" * 20), "has no tf.train.Example"),
        (lambda _: struct.pack("<Q", 1 << 63) + tfrecords.checksum(struct.pack("<Q", 1 << 63)), "truncated"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    path = write(tmp_path / "a.tfrecord")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=rf"a\.tfrecord.*{message}"):
        len(open_store(path))


def test_messages_that_would_take_for_ever_are_bad_samples(tmp_path: Path) -> None:
    """With right checksums: a million empty fields, and a million empty features."""
    many = tfrecords.field(1, b"\x0a\x00" * 1_000_000)
    rows = [tfrecords.example(slim(0)), many, b"\x12\x00" * 1_000_000, tfrecords.example(slim(1))]
    (tmp_path / "a.tfrecord").write_bytes(b"".join(map(tfrecords.record, rows)))
    images = open_store(tmp_path / "a.tfrecord").read(np.arange(4))["image"]
    assert images == [IMAGES[0], None, None, IMAGES[1]]


def test_the_fingerprint_is_of_the_records(tmp_path: Path) -> None:
    store = TFRecordStore(write(tmp_path / "a.tfrecord"))
    again = pickle.loads(pickle.dumps(store))
    assert store.fingerprint == again.fingerprint == TFRecordStore(write(tmp_path / "b.tfrecord")).fingerprint
    rows = [slim(i) for i in range(20)]
    rows[11]["image/encoded"] = IMAGES[11][:-1] + b"!"  # as long, and another checksum
    assert TFRecordStore(tfrecords.write(tmp_path / "c.tfrecord", rows)).fingerprint != store.fingerprint


def test_without_its_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(StoreError, match=r"pip install 'raypipe\[tfrecord\]'"):
        len(TFRecordStore(DATA / "tensorflow-train.tfrecord"))
