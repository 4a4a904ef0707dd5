"""TFRecord: what TensorFlow wrote, and files in its framing, written here."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refused import source_refused, source_rows

from raypipe.stores.sources import open_source, tfrecord
from raypipe.stores.sources.tfrecord import _checksum, _example

pytestmark = pytest.mark.usefixtures("in_own_folder")

DATA = Path(__file__).parents[1] / "data"


def framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def example(**features: Any) -> bytes:
    """An Example; `__` in a name stands for a slash."""
    message = _example()()
    for name, value in features.items():
        entry = message.features.feature.add(key=name.replace("__", "/"))
        values = value if isinstance(value, list) else [value]
        kind = (
            {bytes: "bytes", int: "int64", float: "float"}[type(values[0])]
            if values
            else "int64"
        )
        getattr(entry.value, kind).value.extend(values)
    return message.SerializeToString()


def write(name: str, *records: bytes) -> Path:
    path = Path(name)
    path.write_bytes(b"".join(map(framed, records)))
    return path


def test_imagenet_as_tensorflow_wrote_it(caplog: pytest.LogCaptureFixture) -> None:
    expected = json.loads((DATA / "tensorflow-train.json").read_text())
    rows = source_rows(DATA / "tensorflow-train.tfrecord")
    found = [
        {"sha256": hashlib.sha256(row["image"]).hexdigest(), "label": row["label"]}
        for row in rows
    ]
    assert found == expected
    assert "'image/class/label' begins at 1" in caplog.text
    assert rows[3]["image/filename"] == "3.JPEG" and rows[3]["image/height"] == 32
    assert rows[3]["image/object/bbox/xmin"] == pytest.approx([0.1, 0.2])


def test_gzip_and_several_files_in_the_order_of_names() -> None:
    for number in range(3):
        records = [example(image=b"%d" % (10 * number + i)) for i in range(2)]
        file = write(f"d-train.tfrecord-0000{number}-of-00003", *records)
        file.write_bytes(gzip.compress(file.read_bytes()))
    expected = [b"0", b"1", b"10", b"11", b"20", b"21"]
    for address in (".", "d-train*", "d-train.tfrecord-{00000..00002}-of-00003"):
        assert [row["image"] for row in source_rows(address, label="")] == expected


def test_class_names_of_tensorflow_datasets() -> None:
    write("d-train.tfrecord-00000-of-00001", example(image=b"x", label=1))
    Path("label.labels.txt").write_text("cat\ndog\n")
    source = open_source(".")
    assert source is not None and source.classes == ("cat", "dog")


def test_features_become_columns_by_their_first_values() -> None:
    first = example(
        image=b"\xff",
        label=1,
        text=b"a",
        many=[1.5, 2.5],
        mask=b"\x80",
        masks=[b"\x80", b"\x81"],
    )
    second = example(image=b"\xfe", label=0, text=b"b", many=[], mask=b"\x81")
    rows = source_rows(write("a.tfrecord", first, second))
    assert rows == [
        {
            "image": b"\xff",
            "label": 1,
            "many": [1.5, 2.5],
            "mask": b"\x80",
            "text": "a",
        },
        {"image": b"\xfe", "label": 0, "many": [], "mask": b"\x81", "text": "b"},
    ]


def test_other_names_of_image_and_label() -> None:
    file = write(
        "a.tfrecord",
        example(image=b"x", img__raw=b"y", label=1, fine__label=2),
    )
    assert source_rows(file, "img/raw", "fine/label") == [{"image": b"y", "label": 2}]
    assert source_rows(file, label="")[0].keys() == {"image", "fine/label", "img/raw"}
    source_refused(
        r"a\.tfrecord has no column 'img' for image_column; .*fine/label", file, "img"
    )


def test_a_label_that_is_missing_is_no_number() -> None:
    records = [example(image=b"x", label=1), example(image=b"x")]
    rows = source_rows(write("a.tfrecord", *records))
    assert [row["label"] for row in rows] == [1, None]


def test_a_feature_that_becomes_several_values_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tfrecord, "_PROBED_BYTES", 0)
    records = [example(image=b"x", label=1)] * 64 + [example(image=b"x", label=[1, 2])]
    source_refused(
        r"record 64: the feature 'label' was numbers, one in each .*: 2 values",
        write("a.tfrecord", *records),
    )


def test_a_damaged_record_is_a_sample_without_an_image(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = write("a.tfrecord", *(example(image=b"image", label=i) for i in range(3)))
    content = bytearray(file.read_bytes())
    content[content.index(b"image", len(content) // 3 + 20)] ^= 1
    file.write_bytes(content)
    rows = source_rows(file)
    assert [row.get("label") for row in rows] == [0, None, 2] and rows[1] == {
        "image": None
    }
    assert "a.tfrecord, record 1: its checksum is wrong" in caplog.text


def test_a_length_beyond_the_file_takes_no_memory() -> None:
    length = struct.pack("<Q", 400 << 20)
    header = length + _checksum(length)
    Path("a.tfrecord").write_bytes(framed(example(image=b"x")) + header + b"x" * 100)
    source_refused("is truncated in record 1, of 419430400 bytes", "a.tfrecord")


@pytest.mark.parametrize("name", ["class", "image__label", "target", "cls"])
def test_usual_names_of_labels_are_found(name: str) -> None:
    rows = source_rows(write("a.tfrecord", example(image=b"x", **{name: 3})))
    assert rows == [{"image": b"x", "label": 3}]


def test_a_feature_that_begins_late_is_a_column() -> None:
    late = example(image=b"x", label=1, text=b"a", score=2)
    file = write("a.tfrecord", *[example(image=b"x", label=0)] * 99, late)
    rows = source_rows(file)
    assert [row["text"] for row in rows] == [None] * 99 + ["a"]
    assert math.isnan(rows[0]["score"]) and rows[-1]["score"] == 2.0


def test_a_feature_that_begins_too_late_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tfrecord, "_PROBED_BYTES", 0)
    late = example(image=b"x", label=1, text=b"a")
    rows = source_rows(
        write("a.tfrecord", *[example(image=b"x", label=0)] * 64, late, late)
    )
    assert len(rows) == 66 and "text" not in rows[-1]
    assert caplog.text.count("record 64: left out, as none of the first") == 1


@pytest.mark.parametrize("channels", [1, 3])
def test_raw_pixels_are_images_by_their_height_and_width(channels: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (10, 12, channels), np.uint8)
    record = example(image_raw=pixels.tobytes(), height=10, width=12, label=1)
    (row,) = source_rows(write("a.tfrecord", record))
    assert (row["image"] == pixels).all()


def test_raw_pixels_of_unknown_sides_are_refused() -> None:
    record = example(image_raw=bytes(range(256)) * 12, label=1)
    source_refused(
        "'image_raw' has 3,072 bytes in each record, a",
        write("a.tfrecord", record),
    )
