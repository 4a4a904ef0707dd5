"""TFRecord files: TensorFlow's own, those of others, and damaged ones.

data/tensorflow-train.tfrecord was written by TensorFlow, tests/stores/data/README.md has how.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tfrecord
import tfrecords

from raypipe.errors import StoreError
from raypipe.stores import open_source, open_store
from raypipe.stores.tfrecord import _library, is_tfrecord

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


def read(address: str | Path, **options: str) -> dict[str, list[Any]]:
    """The columns of a source."""
    samples = list(open_source(address, **options))
    return {name: [sample.get(name) for sample in samples] for name in max(samples, key=len)}


def write(path: Path, indices: range = range(20)) -> Path:
    return tfrecords.write(path, (slim(i) for i in indices))


def test_what_tensorflow_wrote_is_read() -> None:
    expected = json.loads((DATA / "tensorflow-train.json").read_text())
    found = read(DATA / "tensorflow-train.tfrecord")
    assert list(found) == ["image", "label"]
    assert [hashlib.sha256(image).hexdigest() for image in found["image"]] == [one["sha256"] for one in expected]
    assert found["label"] == [one["label"] for one in expected]
    assert min(found["label"]) == 1  # not shifted


def test_what_the_tfrecord_package_wrote_is_read(tmp_path: Path) -> None:
    writer = tfrecord.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    for image, label in zip(IMAGES, LABELS, strict=True):
        writer.write({"image/encoded": (image, "byte"), "image/class/label": (label, "int")})
    writer.close()
    assert read(tmp_path / "a.tfrecord") == {"image": IMAGES, "label": LABELS}


def test_files_of_a_split_are_one_source(tmp_path: Path) -> None:
    for number, rows in enumerate((range(0, 7), range(7, 8), range(8, 20))):
        write(tmp_path / f"train-{number:05d}-of-00003", rows)
    for address in (tmp_path, tmp_path / "train-*", tmp_path / "train-{00000..00002}-of-00003"):
        assert read(address) == {"image": IMAGES, "label": LABELS}
    assert read(tmp_path / "train-00001-of-00003") == {"image": IMAGES[7:8], "label": LABELS[7:8]}
    write(tmp_path / "validation-00000-of-00001")
    with pytest.raises(StoreError, match=r"several splits: train \(3\), validation \(1\)"):
        read(tmp_path)
    assert len(read(tmp_path / "train-*")["image"]) == 20


def test_it_is_no_store_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is read once, in order: copy it by `raypipe convert .*a\.tfrecord NEW"):
        open_store(write(tmp_path / "a.tfrecord"))


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
        match=r"record 0 has no bytes feature 'image/encoded or .* are cls \(int64\), jpg \(bytes\)",
    ):
        read(path)
    assert read(path, image_column="jpg")["label"] == [0, 1, 0]
    assert read(path, image_column="jpg", label_column="cls")["label"] == [0, 1, 2]
    with pytest.raises(StoreError, match="no int64 feature 'jpg' for label_column"):
        read(path, image_column="jpg", label_column="jpg")


def test_without_labels(tmp_path: Path) -> None:
    path = tfrecords.write(tmp_path / "a.tfrecord", ({"image": image} for image in IMAGES))
    assert read(path) == {"image": IMAGES}


def test_a_first_record_without_a_label_does_not_take_those_of_the_others(tmp_path: Path) -> None:
    rows = [{"image/encoded": IMAGES[0]}, {"image/encoded": IMAGES[1], "image/class/label": 1}]
    with pytest.raises(StoreError, match=r"record 1, has a label, and the first record has none"):
        list(open_source(tfrecords.write(tmp_path / "a.tfrecord", rows)))


@pytest.mark.parametrize("labels", [{"image/class/label": [1, 2]}, {}])
def test_a_label_that_is_missing_is_loud(tmp_path: Path, labels: dict[str, Any]) -> None:
    rows = [slim(0), {"image/encoded": IMAGES[1], **labels}]
    samples = iter(open_source(tfrecords.write(tmp_path / "a.tfrecord", rows)))
    assert next(samples)["label"] == 1
    with pytest.raises(StoreError, match=r"a\.tfrecord, record 1, has no label in 'image/class/label'"):
        next(samples)


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
    assert read(tmp_path / "a.tfrecord")["label"] == [-1, 1 << 62, -(1 << 63)]


def test_damage_is_a_bad_sample_with_a_warning_and_shows_in_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.tfrecord")
    data = bytearray(path.read_bytes())
    data[data.find(IMAGES[0])] ^= 1
    data[data.find(IMAGES[7])] ^= 1
    data[data.find(IMAGES[19]) - 30] ^= 1
    path.write_bytes(data)
    found = read(path)
    assert [i for i, image in enumerate(found["image"]) if image != IMAGES[i]] == [0, 7, 19]
    assert [found["image"][i] for i in (0, 7, 19)] == [None] * 3 and found["label"][7] is None
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"{path}, record {i}" for i in (0, 7, 19)
    ]


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
            "is no TFRecord file.*: the checksum of the length at byte 0",
        ),
        (lambda data: data + bytes(40), "is damaged: the checksum of the length at byte [1-9]"),
        (lambda data: gzip.compress(data), "or one that is compressed .gunzip it."),
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
        read(path)


def test_messages_that_would_take_for_ever_are_bad_samples(tmp_path: Path) -> None:
    """With right checksums: a million empty fields, and a million empty features."""
    many = tfrecords.field(1, b"\x0a\x00" * 1_000_000)
    rows = [tfrecords.example(slim(0)), many, b"\x12\x00" * 1_000_000, tfrecords.example(slim(1))]
    (tmp_path / "a.tfrecord").write_bytes(b"".join(map(tfrecords.record, rows)))
    assert read(tmp_path / "a.tfrecord")["image"] == [IMAGES[0], None, None, IMAGES[1]]


def test_without_its_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _library.cache_clear()
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(StoreError, match=r"pip install 'raypipe-data\[tfrecord\]'"):
        read(DATA / "tensorflow-train.tfrecord")
