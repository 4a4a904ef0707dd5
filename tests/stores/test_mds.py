"""MDS, as MosaicML's library has written it, and as it may be damaged."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.errors import ConfigError, StoreError
from raypipe.stores import mds, open_store
from raypipe.stores.mds import MDSStore

from damaged import assert_read_or_named  # isort: skip
from shard_writers import CODECS, edit, write_mds  # isort: skip

DATA = Path(__file__).parent / "data"
COLUMNS = {"image": ("bytes", None), "label": ("int", 8)}
SAMPLES = [(b"\xff\xd8" + bytes([i]) * 50 * i, struct.pack("<q", i % 3)) for i in range(6)]


def make(folder: Path, codec: str = "") -> MDSStore:
    write_mds(folder, COLUMNS, [SAMPLES[:4], SAMPLES[4:]], codec)
    store = open_store(folder)
    assert isinstance(store, MDSStore)
    return store


@pytest.mark.parametrize("name", ["mds", "mds-zstd"])
def test_what_the_streaming_library_wrote_is_read_as_it_was(name: str) -> None:
    store = open_store(DATA / name)
    assert store.columns[:2] == ("image", "label") and "secret" not in store.columns and store.classes is None
    assert (None if store.groups is None else store.groups.tolist()) == ([0, 5, 8] if "zstd" in name else None)
    order = np.array([7, 0, 3, 3, 1, 2, 4, 5, 6])
    found = store.read(order, store.columns)
    hashes = json.loads((DATA / "jpegs.json").read_text())
    assert [hashlib.sha256(image).hexdigest() for image in found["image"]] == [hashes[i] for i in order]
    assert found["label"].dtype == np.int64 and found["label"].tolist() == [i % 4 for i in order]
    assert found["name"] == [f"ä{i}" for i in order] and found["meta"] == [{"i": i} for i in order]
    assert found["score"].dtype == np.float32 and found["score"].tolist() == [i / 4 for i in order]
    assert found["size"].dtype == np.uint16 and found["size"].tolist() == [1000 * i for i in order]
    assert found["big"].tolist() == [10**i for i in order]
    assert "grid" not in store.columns  # arrays are not read


@pytest.mark.parametrize("codec", ["", *CODECS])
def test_each_compression_is_read_and_a_shard_of_it_is_a_group(tmp_path: Path, codec: str) -> None:
    store = make(tmp_path / "a", codec)
    found = store.read(np.array([5, 0, 4, 5]))
    assert found["image"] == [SAMPLES[i][0] for i in (5, 0, 4, 5)] and found["label"].tolist() == [2, 0, 1, 2]
    assert (store.groups is None) == (not codec)
    assert store.sample_name(4).endswith(f"shard.00001.mds{codec and '.' + codec}, sample 0")


def test_only_some_unpacked_shards_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mds, "_MAX_UNPACKED_BYTES", 300)
    write_mds(tmp_path / "a", COLUMNS, [[sample] for sample in SAMPLES], "zstd")
    store = MDSStore(tmp_path / "a")
    assert store.read(np.arange(6))["image"] == [image for image, _ in SAMPLES]
    held = store._contents._open
    assert list(held) == [5] and held[5].num_bytes > 250


def test_pickled_columns_are_left_out() -> None:
    store = open_store(DATA / "mds")
    with pytest.raises(StoreError, match=r"mds has no column 'secret'"):
        store.read(np.array([0]), ("image", "secret"))
    with pytest.raises(StoreError, match=r"column 'secret' has the encoding 'pkl'; label must be a number"):
        len(open_store(DATA / "mds", target_column="secret"))
    assert store.read(np.array([1]))["label"].tolist() == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_column": "x"}, r"no column 'x' for image_column; its columns are big \(str_int\), "),
        ({"target_column": "y"}, "no column 'y' for target_column"),
        ({"image_column": "name"}, "'name' has the encoding 'str'; image must be jpeg, png or bytes"),
        ({"target_column": "name"}, "'name' has the encoding 'str'; label must be a number"),
    ],
)
def test_columns_that_are_no_images_or_labels_are_named(options: dict[str, str], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        len(open_store(DATA / "mds", **options))


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(ConfigError, match="mds, which has no option 'colour'"):
        open_store(DATA / "mds", colour="red")


# Damage


@pytest.mark.parametrize("name", ["../x.mds", "/etc/passwd", "a/../../x.mds", "..", "", "a\0b", "..\\x.mds"])
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    make(tmp_path / "a")
    edit(tmp_path / "a", lambda index: index["shards"][0]["raw_data"].update(basename=name))
    with pytest.raises(
        StoreError, match=r"a/index\.json cannot be understood: ValueError: the shard .* is not below"
    ):
        len(open_store(tmp_path / "a"))


def test_a_merged_data_set_has_its_shards_in_folders(tmp_path: Path) -> None:
    make(tmp_path / "a")
    (tmp_path / "a" / "0").mkdir()
    (tmp_path / "a" / "shard.00000.mds").rename(tmp_path / "a" / "0" / "x.mds")
    edit(tmp_path / "a", lambda index: index["shards"][0]["raw_data"].update(basename="0/x.mds"))
    assert open_store(tmp_path / "a").read(np.arange(6))["image"] == [image for image, _ in SAMPLES]


def drop(*names: str) -> Callable[[Any], None]:
    def change(index: Any) -> None:
        for name in names:
            del index["shards"][0][name]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda index: index.update(version=3),
            "index.json has version 3 of mds: raypipe reads only version 2 of mds",
        ),
        (lambda index: index["shards"][1].update(format="csv"), "has version 2 of csv, mds"),
        (drop("samples"), "cannot be understood: KeyError: 'samples'"),
        (
            lambda index: index["shards"][1].update(column_names=["a", "b"]),
            "shards 0 and 1 differ in their columns",
        ),
        (lambda index: index["shards"][0].update(samples=-1), "-1 samples"),
        (lambda index: index["shards"][0].update(raw_data=7), "cannot be understood: TypeError"),
        (
            lambda index: index["shards"][0]["raw_data"].update(bytes=1 << 40),
            "truncated, or damaged: .* needs 1099",
        ),
        (lambda index: index["shards"][0].update(samples=3), "shard.00000.mds is damaged, or not the shard"),
        (lambda index: index["shards"][0].update(samples=1 << 31), "shard.00000.mds is truncated, or damaged"),
    ],
)
def test_a_damaged_index_is_one_error_that_names_the_file(tmp_path: Path, change: Any, message: str) -> None:
    make(tmp_path / "a")
    edit(tmp_path / "a", change)
    with pytest.raises(StoreError, match=message):
        open_store(tmp_path / "a").read(np.array([0]))


@pytest.mark.parametrize("text", ["", "{", '{"shards": [{"format"'])
def test_an_index_that_is_no_json_is_named(tmp_path: Path, text: str) -> None:
    make(tmp_path / "a")
    (tmp_path / "a" / "index.json").write_text(text)
    with pytest.raises(StoreError, match=r"a/index\.json is not JSON"):
        len(open_store(tmp_path / "a"))


@pytest.mark.parametrize("codec", ["", *CODECS])
def test_a_truncated_or_missing_shard_is_one_error(tmp_path: Path, codec: str) -> None:
    store = make(tmp_path / "a", codec)
    path = next((tmp_path / "a").glob("shard.00000*"))
    content = path.read_bytes()
    for length in (0, 3, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        store.close()
        with pytest.raises(StoreError, match=r"shard\.00000\.mds.* is truncated, or damaged"):
            store.read(np.array([0]))
    # The same where the index agrees with what is left.
    which = "zip_data" if codec else "raw_data"
    edit(tmp_path / "a", lambda index: index["shards"][0][which].update(bytes=len(content) - 1))
    store.close()
    with pytest.raises(StoreError, match=r"shard\.00000\.mds.* (is truncated, or damaged|cannot be unpacked)"):
        store.read(np.array([0]))
    path.unlink()
    store.close()
    with pytest.raises(StoreError, match=r"shard\.00000\.mds.* cannot be opened: .*No such file"):
        store.read(np.array([0]))


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_a_compressed_shard_with_wrong_bytes_is_an_error_or_a_bad_sample(tmp_path: Path, codec: str) -> None:
    store = make(tmp_path / "a", codec)
    path = next((tmp_path / "a").glob("shard.00000*"))
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content)
        damaged[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        store.close()
        try:
            assert len(store.read(np.arange(6))["image"]) == 6
        except StoreError as error:
            assert "shard.00000.mds" in str(error)


def test_a_bomb_is_unpacked_no_further_than_the_index_says(tmp_path: Path) -> None:
    store = make(tmp_path / "a", "zstd")
    edit(tmp_path / "a", lambda index: index["shards"][0]["raw_data"].update(bytes=20))
    with pytest.raises(StoreError, match=r"cannot be unpacked with zstd: more than 20 bytes"):
        store.read(np.array([0]))
    edit(tmp_path / "a", lambda index: index["shards"][0]["raw_data"].update(bytes=1 << 31))
    with pytest.raises(StoreError, match=r"unpacks to 2,147,483,648 bytes; the limit is 1,073,741,824"):
        len(open_store(tmp_path / "a"))


def test_a_sample_whose_sizes_do_not_add_up_is_a_bad_one(tmp_path: Path) -> None:
    store = make(tmp_path / "a")
    path = tmp_path / "a" / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    start = struct.unpack_from("<I", content, 4 + 4 * 2)[0]
    content[start : start + 4] = struct.pack("<I", 1 << 30)
    path.write_bytes(content)
    found = store.read(np.arange(4))
    assert found["image"] == [SAMPLES[0][0], SAMPLES[1][0], None, SAMPLES[3][0]]
    assert found["label"] == [0, 1, None, 0]


def test_offsets_in_no_order_are_one_error(tmp_path: Path) -> None:
    write_mds(tmp_path / "a", COLUMNS, [SAMPLES])
    path = tmp_path / "a" / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    content[8:12] = struct.pack("<I", len(content) + 1)
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"shard\.00000\.mds is damaged, or not the shard"):
        open_store(tmp_path / "a").read(np.array([0]))


@pytest.mark.parametrize("name", ["mds", "mds-zstd"])
def test_a_flipped_bit_anywhere_is_an_error_or_a_bad_sample(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(1)
    shutil.copytree(DATA / name, tmp_path / "a")
    paths = sorted((tmp_path / "a").iterdir())
    for _ in range(60):
        path = paths[rng.integers(len(paths))]
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        assert_read_or_named(tmp_path / "a")
        path.write_bytes(content)


def test_labels_over_63_bits_have_no_value(tmp_path: Path) -> None:
    samples = [(b"x", b"\xff" * 8), (b"x", struct.pack("<Q", 3))]
    write_mds(tmp_path / "a", {"image": ("bytes", None), "label": ("uint64", 8)}, [samples])
    assert open_store(tmp_path / "a").read(np.array([0, 1]))["label"] == [None, 3]


@pytest.mark.parametrize(("encoding", "good", "bad"), [("str_int", b"2", b"\xb2"), ("str_float", b"2", b"2x")])
def test_a_damaged_text_has_no_value_and_its_neighbors_keep_theirs(
    tmp_path: Path, encoding: str, good: bytes, bad: bytes
) -> None:
    columns = {"image": ("bytes", None), "label": ("int", 8), "number": (encoding, None)}
    label = struct.pack("<q", 1)
    write_mds(tmp_path / "a", columns, [[(b"x", label, good), (b"y", label, bad)]])
    assert open_store(tmp_path / "a").read(np.arange(2), ("number",))["number"] == [2, None]
    as_label = open_store(tmp_path / "a", target_column="number").read(np.arange(2))
    assert as_label == {"image": [b"x", b"y"], "label": [2, None]}


def test_a_store_is_sent_without_its_shards(tmp_path: Path) -> None:
    store = make(tmp_path / "a", "zstd")
    store.read(np.arange(6))
    assert len(pickle.dumps(store)) < 500
    assert pickle.loads(pickle.dumps(store)).fingerprint == store.fingerprint
