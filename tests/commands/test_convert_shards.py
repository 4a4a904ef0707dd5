"""The copy of one shard: columns, digests, and that it stops when it is told to."""

from __future__ import annotations

import json
from datetime import date, time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from copied import written
from pictures import picture

from raypipe.commands import copies
from raypipe.commands.copied_samples import with_later
from raypipe.commands.copies import (
    CopySettings,
    shard_fingerprint,
)
from raypipe.errors import ConfigError, StoreError
from raypipe.stores import open_store
from raypipe.stores.memory import MemoryStore
from raypipe.stores.plain_columns import column_types, plain
from raypipe.stores.record import Fingerprint, RecordLayout

TYPES = {
    "image": "binary",
    "label": "int64",
    "name": "string",
    "score": "float64",
    "mask": "binary",
}
SAMPLES: list[dict[str, Any]] = [
    {"image": b"abc", "label": 1, "name": "x", "score": 0.5, "mask": b"12"},
    {"image": b"de", "label": 2, "name": "y", "score": -1.0, "mask": None},
]


def digest(samples: list[dict[str, Any]]) -> str:
    found, layout = Fingerprint(TYPES, None), RecordLayout(TYPES)
    for sample in samples:
        found.add(layout.pack(sample))
    return found.hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"image": b"abd"},
        {"image": b"ab"},
        {"image": b""},
        {"image": None},
        {"label": 2},
        {"label": -1},
        {"name": "X"},
        {"name": None},
        {"name": "None"},
        {"score": 0.5 + 2**-53},
        {"score": -0.5},
        {"mask": b"1"},
        {"mask": None},
        {"mask": b""},
        {"mask": b"None"},
        {"image": b"abc1", "label": 1},
        {"image": b"ab", "name": "cx"},
        {"name": "x1", "mask": b"2"},
    ],
)
def test_any_change_of_one_sample_changes_the_digest(change: dict[str, Any]) -> None:
    assert digest([SAMPLES[0] | change, SAMPLES[1]]) != digest(SAMPLES)


def test_column_types_are_those_of_the_first_value_that_is_there() -> None:
    columns = {
        "name": [None, "b"],
        "good": [True, False],
        "score": [0.5, 1.0],
        "mask": [b"", None],
    }
    found = column_types(
        {"image": [b"a", b"b"], "label": [0, 1], "weight": [1, 0.5], **columns}, "x"
    )
    assert found == {
        "image": "binary",
        "label": "int64",
        "weight": "float64",
        "name": "string",
        "good": "int64",
        "score": "float64",
        "mask": "binary",
    }


@pytest.mark.parametrize(
    ("values", "kind"), [([[b"1"], [b"2"]], "list"), ([{"a": b"1"}], "dict")]
)
def test_a_column_that_cannot_be_copied_is_named(values: list[Any], kind: str) -> None:
    with pytest.raises(StoreError, match=f"column 'boxes' has values of type {kind}"):
        column_types({"image": [b"a", b"b"], "boxes": values}, "x")


def test_a_value_beyond_the_first_samples_decides_the_type() -> None:
    later = {
        "year": [1] * 99 + [None],
        "note": [None] * 99 + ["a"],
        "score": [None] * 99 + [2],
        "none": [None] * 100,
    }
    store = MemoryStore([b"x"] * 100, [0] * 100, columns=later)
    first = store.read(np.arange(64), tuple(store.schema.names[:-1]))
    types = column_types(with_later(store, first), "x")
    assert list(types.items())[2:] == [
        ("year", "float64"),
        ("note", "string"),
        ("score", "float64"),
        ("none", "string"),
    ]


def test_arrays_of_one_shape_stay_arrays_if_some_have_no_value(tmp_path: Path) -> None:
    box = [0.5, 1.0]
    for values in ([None] + [box] * 69, [box] * 69 + [None], [None] * 69 + [box]):
        table = {"image": [b"x"] * len(values), "label": [0] * len(values)}
        boxes = pa.array(values, pa.list_(pa.float32(), 2))
        pq.write_table(pa.table({**table, "box": boxes}), tmp_path / "a.parquet")
        store = open_store(tmp_path / "a.parquet")
        first = store.read(np.arange(min(64, len(store))), ("image", "label", "box"))
        assert column_types(with_later(store, first), "x")["box"] == "float32[2]"


def test_dates_are_copied_as_text() -> None:
    first = {"image": [b"a"], "day": [date(2024, 5, 1)], "at": [time(12, 30)]}
    types = column_types(first, "x")
    assert types == {"image": "binary", "day": "string", "at": "string"}
    row = {name: values[0] for name, values in first.items()}
    assert plain(row, types) == {"image": b"a", "day": "2024-05-01", "at": "12:30:00"}


def test_structs_are_copied_as_json() -> None:
    first = {"image": [b"a"], "meta": [{"author": "é", "sizes": [1, np.float32(2)]}]}
    assert column_types(first, "x")["meta"] == "string"
    meta = plain({"meta": first["meta"][0]}, {"meta": "string"})["meta"]
    assert json.loads(meta) == {"author": "é", "sizes": [1, 2]}
    with pytest.raises(
        StoreError, match="column 'meta' has a value that cannot be copied as JSON"
    ):
        plain({"meta": [b"bytes"]}, {"meta": "string"})


def test_labels_that_cannot_be_copied_say_what_labels_are() -> None:
    for labels, kind in (
        (["cat", "dog"], "str"),
        ([[1], [1, 2]], "list"),
        ([None, None], "NoneType"),
    ):
        with pytest.raises(
            StoreError,
            match=f"x: column 'label' has values of type {kind}.*number the classes",
        ):
            column_types({"image": [b"a", b"b"], "label": labels}, "x")
    assert (
        column_types({"image": [b"a"], "label": [[0, 1, 1]]}, "x")["label"]
        == "int64[3]"
    )


def test_a_missing_label_is_not_copied_as_nan() -> None:
    row = {"label": None, "score": None}
    copied = plain(row, {"label": "float64", "score": "float64"})
    # None is rejected where it is written
    assert copied["label"] is None and np.isnan(copied["score"])


def test_lists_that_may_be_boxes_do_not_go_with_smaller_images() -> None:
    first = {"image": [b"x"], "boxes": [[1, 2, 3, 4, 5]]}
    assert column_types(first, "x")["boxes"] == "string"
    with pytest.raises(ConfigError, match=r"column 'boxes' has lists.*--short-side"):
        column_types(first, "x", short_side=256)


@pytest.mark.parametrize("suffix", [".lmdb", ".parquet"])
def test_one_byte_that_changes_on_the_disk_is_found(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [picture(i) for i in range(100)]

    def damaged(file: Path, columns: dict[str, str]) -> str:
        content = bytearray(file.read_bytes())
        content[content.index(images[90]) + len(images[90]) // 2] ^= 1
        file.write_bytes(content)
        return shard_fingerprint(file, columns)

    monkeypatch.setattr(copies, "shard_fingerprint", damaged)
    settings = CopySettings(suffix=suffix, columns={"image": "binary"})
    with pytest.raises(
        StoreError, match=f"00000{suffix} does not read back as it was written"
    ):
        written(MemoryStore(images, None), tmp_path, settings)
