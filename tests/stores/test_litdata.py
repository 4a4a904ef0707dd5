"""LitData, as its library has written it; what it shares with MDS is in test_mds.py."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.litdata import LitDataStore

from shard_writers import edit, write_litdata  # isort: skip

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize("name", ["litdata", "litdata-chunk", "litdata-batch"])
def test_what_litdata_wrote_is_read_as_it_was(name: str) -> None:
    store = open_store(DATA / name)
    assert isinstance(store, LitDataStore) and store.columns[:3] == ("image", "label", "name")
    assert (None if store.groups is None else store.groups.tolist()) == (
        None if name == "litdata" else [0, 3, 6, 8]
    )
    order = np.array([7, 0, 3, 3, 1, 2, 4, 5, 6])
    found = store.read(order, store.columns)
    hashes = json.loads((DATA / "jpegs.json").read_text())
    assert [hashlib.sha256(image).hexdigest() for image in found["image"]] == [hashes[i] for i in order]
    assert found["label"].dtype == np.int64 and found["label"].tolist() == [i % 4 for i in order]
    assert found["name"] == [f"ä{i}" for i in order] and found["score"].tolist() == [i / 4 for i in order]
    assert found["even"].tolist() == [i % 2 == 0 for i in order]
    assert found["grid"] == [[[i] * (i + 1)] for i in order] and found["row"] == [list(range(i)) for i in order]
    assert found["tensor"] == [[[i, i], [i, i]] for i in order]
    assert found["nested.raw"] == [b"x" * i for i in order] and found["nested.pair.1"].tolist() == [
        -i for i in order
    ]


def test_pickled_columns_are_refused() -> None:
    store = open_store(DATA / "litdata")
    assert "secret" not in store.columns
    with pytest.raises(
        StoreError, match="column 'secret' is pickled, and a pickle is a program, which is not run"
    ):
        store.read(np.array([0]), ("secret",))


@pytest.mark.parametrize("order", ["<", ">"])
def test_tensors_of_old_and_of_new_versions_are_read(tmp_path: Path, order: str) -> None:
    tensor = struct.pack(f"{order}IIII", 17, 2, 1, 2) + np.array([5, -6], "<i8").tobytes()
    write_litdata(tmp_path / "a", {"image": "jpeg", "t": "tensor"}, [[(b"x", tensor), (b"y", tensor[:-1])]])
    assert open_store(tmp_path / "a").read(np.arange(2), ("image", "t")) == {
        "image": [b"x", b"y"],
        "t": [[[5, -6]], None],
    }


def test_a_sample_that_is_a_tuple_has_numbers_for_names(tmp_path: Path) -> None:
    write_litdata(tmp_path / "a", {"a": "image:png", "b": "int"}, [[(b"x", struct.pack("<q", 5))]])
    edit(tmp_path / "a", lambda index: index["config"].update(data_spec=_spec("builtins.tuple", None, 2)))
    store = open_store(tmp_path / "a", image_column="0", label_column="1")
    assert store.columns == ("image", "label") and store.read(np.array([0]))["label"].tolist() == [5]
    edit(
        tmp_path / "a", lambda index: index["config"].update(data_spec=_spec(None, None, 0), data_format=["jpeg"])
    )
    assert open_store(tmp_path / "a", image_column="0").columns == ("image",)


def _spec(kind: str | None, context: str | None, num: int) -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf] * num}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encryption": {"level": "chunk"}}, r"a/index\.json is of encrypted shards"),
        ({"item_loader": "TokensLoader"}, "is of the item loader TokensLoader; only that of PyTreeLoader"),
        ({"compression": "zstd", "compression_level": "sample"}, "is of the compression_level 'sample'"),
        ({"compression": "lzma"}, r"index\.json cannot be understood: .* compression 'lzma'; known are zstd"),
        ({"data_format": ["jpeg"]}, "cannot be understood: ValueError"),
        ({"data_spec": "[" * 5000}, "cannot be understood"),
        ({"data_spec": _spec("builtins.dict", '["image", "image"]', 2)}, "two values of one name"),
        ({"data_format": ["json", "int"]}, "'image' has the encoding 'json of LitData', which is not read"),
        (
            {"data_format": ["jpeg", "no_header_numpy:x"]},
            "'label' has the encoding 'no_header_numpy:x', which is not",
        ),
    ],
)
def test_what_is_not_read_is_one_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_litdata(tmp_path / "a", {"image": "jpeg", "label": "int"}, [[(b"x", bytes(8))]])
    edit(tmp_path / "a", lambda index: index["config"].update(change))
    with pytest.raises(StoreError, match=message):
        open_store(tmp_path / "a").read(np.array([0]))


def test_a_shard_of_arrow_rows_is_one_error(tmp_path: Path) -> None:
    write_litdata(tmp_path / "a", {"image": "jpeg", "label": "int"}, [[(b"x", bytes(8))]])
    (tmp_path / "a" / "chunk-0-0.bin").write_bytes(struct.pack("<III", 1, 12, 12) + b"rows")
    with pytest.raises(StoreError, match=r"chunk-0-0\.bin has no samples by position, .* Arrow: write them flat"):
        open_store(tmp_path / "a").read(np.array([0]))


def test_damaged_frames_are_one_error(tmp_path: Path) -> None:
    shutil.copytree(DATA / "litdata-batch", tmp_path / "a")
    path = tmp_path / "a" / "chunk-0-0.bin"
    content = path.read_bytes()
    huge = bytearray(content)
    huge[24 + 4 * 4 + 20 : 24 + 4 * 4 + 24] = b"\xff" * 4
    for damaged in (content[:20], content[:50], content[:-1], b"x" + content[1:], bytes(huge)):
        path.write_bytes(damaged)
        with pytest.raises(StoreError, match=r"chunk-0-0\.bin cannot be unpacked by zstd: .*; copy it again"):
            open_store(tmp_path / "a").read(np.array([0]))


@pytest.mark.parametrize("name", ["../chunk-0-0.bin", "/chunk-0-0.bin"])
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    write_litdata(tmp_path / "a", {"image": "jpeg"}, [[(b"x",)]])
    edit(tmp_path / "a", lambda index: index["chunks"][0].update(filename=name))
    with pytest.raises(StoreError, match="is no file below this folder"):
        len(open_store(tmp_path / "a"))


def test_a_class_folder_with_an_index_of_its_own_stays_one(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(b"x")
    for text in ('{"shards": 1}', "[]", "{"):
        (tmp_path / "index.json").write_text(text)
        assert open_store(tmp_path).classes == ("cat",)


def test_an_array_of_no_values_in_billions_of_rows_takes_no_memory(tmp_path: Path) -> None:
    head = struct.pack("<4I", 17, 2, (1 << 32) - 1, 0)
    write_litdata(tmp_path / "a", {"image": "bytes", "value": "tensor"}, [[(b"x", head)]])
    assert open_store(tmp_path / "a").read(np.array([0]), ("value",))["value"] == [[]]
