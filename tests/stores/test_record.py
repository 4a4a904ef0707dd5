from __future__ import annotations

import json

import pytest

from raypipe.errors import StoreError
from raypipe.stores.record import Metadata, RecordLayout

ONE = Metadata(3, {"image": "binary", "label": "int64"}, ("cat", "dog"), "0123")


@pytest.mark.parametrize("metadata", [ONE, Metadata(0, {"image": "binary"}, None, "")])
def test_what_is_written_is_read(metadata: Metadata) -> None:
    assert Metadata.from_json(metadata.to_json(), "x") == metadata


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": 2}, "version 2; this raypipe reads version 1"),
        ({"columns": [{"name": "image", "type": "int8"}]}, "column 'image' has type 'int8'"),
        ({"columns": 3}, "not iterable"),
        ({"count": "many"}, "invalid literal"),
    ],
)
def test_what_does_not_fit_is_one_error_with_its_place(changed: dict[str, object], reason: str) -> None:
    text = json.dumps(json.loads(ONE.to_json()) | changed).encode()
    with pytest.raises(StoreError, match=f"^x.lmdb has a bad record: .*{reason}"):
        Metadata.from_json(text, "x.lmdb has a bad record")


@pytest.mark.parametrize(
    "types",
    [
        {"image": "binary", "label": "int64"},
        {"image": "binary"},
        {"text": "string", "label": "int64"},
        {"image": "binary", "label": "int64", "mask": "binary"},
        {"label": "int64"},
    ],
)
def test_a_record_in_two_parts_is_read_like_a_whole_one_damaged_or_not(types: dict[str, str]) -> None:
    layout = RecordLayout(types)
    samples = {
        "int64": [7, -1],
        "float64": [0.5, 2.0],
        "binary": [b"bytes" * 9, b"", None],
        "string": ["text", None],
    }
    for number in range(6):
        record = layout.pack({name: samples[kind][number % len(samples[kind])] for name, kind in types.items()})
        damaged = [record[:end] for end in range(len(record))] + [record + b"more", b"\xff" * len(record)]
        for each in [record, *damaged]:
            head, rest = memoryview(each)[: layout.head_bytes], each[layout.head_bytes :]
            for wanted in (tuple(types), *((name,) for name in types), ()):
                assert layout.unpack_parts(head, rest, wanted) == layout.unpack(memoryview(each), wanted)
