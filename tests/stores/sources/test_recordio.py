"""MXNet RecordIO: what MXNet wrote, and damaged copies of it."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import pytest
from refused import source_refused, source_rows

from raypipe.errors import ConfigError
from raypipe.stores.sources import Asked, open_source

pytestmark = pytest.mark.usefixtures("in_own_folder")

DATA = Path(__file__).parents[1] / "data"
MAGIC = struct.pack("<I", 0xCED7230A)


def record(
    flag: int, label: float, number: int, labels: list[float], image: bytes
) -> bytes:
    """A record of one part, as MXNet's recordio.pack and MXRecordIO make it."""
    data = struct.pack(f"<IfQQ{len(labels)}f", flag, label, number, 0, *labels) + image
    return MAGIC + struct.pack("<I", len(data)) + data + bytes(-len(data) % 4)


def test_labels_of_several_numbers_and_records_in_parts() -> None:
    jpegs = [row["image"] for row in source_rows(DATA / "mxnet/one-label.rec")]
    rows = source_rows(DATA / "mxnet/labels.rec")
    assert [row["label"].tolist() for row in rows] == [[i % 4, i / 8] for i in range(8)]
    assert [row["id"] for row in rows] == list(range(8))
    assert [row["image"] for row in rows] == [
        jpeg + MAGIC * i for i, jpeg in enumerate(jpegs)
    ]
    hashes = [hashlib.sha256(jpeg).hexdigest() for jpeg in jpegs]
    assert hashes == json.loads((DATA / "jpegs.json").read_text())


def test_the_index_gives_the_number_and_shows_a_cut_off_file() -> None:
    for suffix in ("idx", "rec"):
        shutil.copy(DATA / f"mxnet/one-label.{suffix}", f"a.{suffix}")
    source = open_source("a.rec")
    assert source is not None and source.num_samples == 8
    last = int(Path("a.idx").read_text().splitlines()[-1].split()[1])
    Path("a.rec").write_bytes(Path("a.rec").read_bytes()[:last])
    source_refused(r"has 7 records, and its \.idx names 8; copy it again", "a.rec")
    Path("a.idx").unlink()
    assert len(source_rows("a.rec")) == 7


def test_records_without_an_image_are_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """InsightFace's data sets have such records before and after their images."""
    records = [
        record(2, 0.0, 0, [3.0, 5.0], b""),
        record(0, 7.0, 1, [], b"a"),
        record(2, 0.0, 3, [1.0, 2.0], b""),
    ]
    Path("a.rec").write_bytes(b"".join(records))
    assert source_rows("a.rec") == [{"image": b"a", "id": 1, "label": 7}]
    assert "passed over 2 records without an image" in caplog.text


def test_labels_of_objects_become_a_list_without_a_target() -> None:
    Path("a.rec").write_bytes(
        record(2, 0, 0, [1, 2], b"a") + record(3, 0, 1, [1, 2, 3], b"b")
    )
    source_refused(
        r"record 1, has 3 labels and others 2, .*set store\.target_column to ''",
        "a.rec",
    )
    assert [row["labels"] for row in source_rows("a.rec", label="")] == [
        [1, 2],
        [1, 2, 3],
    ]


def test_labels_that_are_no_whole_numbers_stay_floats() -> None:
    Path("a.rec").write_bytes(record(0, 1.0, 0, [], b"a") + record(0, 2.5, 1, [], b"b"))
    labels = [row["label"] for row in source_rows("a.rec")]
    assert labels == [1, 2.5] and isinstance(labels[0], int)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(40), "is damaged, or is not MXNet RecordIO, at byte 0"),
        (
            MAGIC + struct.pack("<I", (1 << 29) - 1) + b"x",
            "is truncated, or has a record over 512 MiB, at byte 0",
        ),
        (
            MAGIC + struct.pack("<I", 4) + b"xxxx",
            "record 0, cannot be read: error: unpack_from requires",
        ),
        (
            record(1 << 30, 0, 0, [], b"x"),
            "record 0, cannot be read: ValueError: buffer",
        ),
        (
            MAGIC + struct.pack("<I", 3 << 29 | 4) + b"xxxx",
            "is damaged, or is not MXNet RecordIO",
        ),
    ],
)
def test_what_is_no_recordio(content: bytes, message: str) -> None:
    Path("a.rec").write_bytes(content)
    source_refused(message, "a.rec")


def test_columns_have_no_other_names() -> None:
    with pytest.raises(
        ConfigError,
        match=r"store\.target_column='y': MXNet RecordIO has no columns of other",
    ):
        open_source(DATA / "mxnet/labels.rec", Asked("image", "y"))
    with pytest.raises(ConfigError, match=r"store\.image_column='x'"):
        open_source(DATA / "mxnet/labels.rec", Asked("x"))
