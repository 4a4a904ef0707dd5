"""Arrow files, as the datasets library has written them, and as they may be damaged."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.arrow import ArrowStore

from damaged import assert_read_or_named  # isort: skip

DATA = Path(__file__).parent / "data"
COLUMNS = {"image": pa.array([b"x", b"yy", None], pa.binary()), "label": pa.array([1, 0, 2])}


def write(path: Path, columns: dict[str, Any] = COLUMNS, **options: Any) -> Path:
    table = pa.table(columns)
    with pa.ipc.new_stream(path, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("address", ["arrow", "arrow/data-*.arrow", "arrow/data-{00000..00001}-of-00002.arrow"])
def test_what_the_datasets_library_wrote_is_read_as_it_was(address: str) -> None:
    store = open_store(DATA / address)
    assert isinstance(store, ArrowStore) and store.groups is None
    assert store.columns == ("image", "label", "name") and store.classes == ("cat", "dog", "owl", "yak")
    order = np.array([7, 0, 3, 3, 1, 2, 4, 5, 6])
    found = store.read(order, store.columns)
    hashes = json.loads((DATA / "jpegs.json").read_text())
    assert [hashlib.sha256(image).hexdigest() for image in found["image"]] == [hashes[i] for i in order]
    assert found["label"].dtype == np.int64 and found["label"].tolist() == [i % 4 for i in order]
    assert found["name"] == [f"ä{i}" for i in order]


def test_one_file_is_a_store_in_either_of_arrows_formats(tmp_path: Path) -> None:
    stream = open_store(write(tmp_path / "a.arrow"))
    with pa.ipc.new_file(tmp_path / "b.arrow", pa.table(COLUMNS).schema) as writer:
        writer.write_table(pa.table(COLUMNS))
    for store in (stream, open_store(tmp_path / "b.arrow")):
        found = store.read(np.array([2, 0, 1]))
        assert found["image"] == [None, b"x", b"yy"] and found["label"].tolist() == [2, 1, 0]


def test_columns_are_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", {"img": COLUMNS["image"], "fine": COLUMNS["label"]})
    assert open_store(path, image_column="img", target_column="fine").columns == ("image", "label")
    with pytest.raises(
        StoreError, match=r"no column 'image' for image_column; did you mean img\? .* are img, fine"
    ):
        len(open_store(path))


def test_several_splits_are_refused_with_the_address_of_one(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "train").mkdir()
    with pytest.raises(StoreError, match=rf"choose one, such as {tmp_path}/train"):
        open_store(tmp_path)


def test_files_of_two_schemas_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow")
    write(tmp_path / "b.arrow", {"image": COLUMNS["image"]})
    with pytest.raises(StoreError, match=r"b\.arrow and .*a\.arrow differ in schema or classes"):
        len(open_store(tmp_path))


def test_paths_in_place_of_images_are_one_error(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": None, "path": "/etc/passwd"}] * 2, kind)
    store = open_store(write(tmp_path / "a.arrow", {"image": images}))
    with pytest.raises(StoreError, match=r"a\.arrow has only the paths of images: .*to_parquet"):
        store.read(np.array([0]), ("image",))


def test_null_labels_are_an_error(tmp_path: Path) -> None:
    store = open_store(write(tmp_path / "a.arrow", {**COLUMNS, "label": pa.array([1, None, 2])}))
    with pytest.raises(StoreError, match="has a null label"):
        store.read(np.array([1]))


@pytest.mark.parametrize(
    "state",
    ["{", "[]", "{}", '{"_data_files": []}']
    + [json.dumps({"_data_files": [{"filename": name}]}) for name in ("../x.arrow", "/x", "..", "", 7)],
)
def test_a_state_that_names_no_file_of_the_folder_is_one_error(tmp_path: Path, state: str) -> None:
    write(tmp_path / "a.arrow")
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(StoreError, match=r"state\.json (cannot be understood|names)"):
        len(open_store(tmp_path))


def test_a_name_that_is_no_utf8_is_one_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow")
    path.write_bytes(path.read_bytes().replace(b"label", b"l\xffbel"))
    with pytest.raises(StoreError, match=r"a\.arrow cannot be read as Arrow: .*copy it again"):
        len(open_store(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    shutil.copytree(DATA / "arrow", tmp_path / "a")
    (tmp_path / "a" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(StoreError, match=r"data-00001-of-00002\.arrow cannot be read as Arrow: .*No such file"):
        len(open_store(tmp_path / "a"))


def test_compressed_files_are_refused(tmp_path: Path) -> None:
    values = {"image": pa.array([bytes(1 << 20)] * 4, pa.binary())}
    path = write(tmp_path / "a.arrow", values, options=pa.ipc.IpcWriteOptions(compression="zstd"))
    with pytest.raises(StoreError, match=r"a\.arrow is compressed, which allows no random access"):
        len(open_store(path))


def test_a_truncated_file_is_one_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow")
    content = path.read_bytes()
    # Also where a batch ends, which pyarrow takes for the end of the file.
    for length in range(0, len(content), 8):
        path.write_bytes(content[:length])
        with pytest.raises(StoreError, match=r"a\.arrow cannot be read as Arrow: .*copy it again"):
            len(open_store(path))


def test_a_flipped_bit_anywhere_is_an_error_or_other_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    shutil.copytree(DATA / "arrow", tmp_path / "a")
    paths = sorted((tmp_path / "a").iterdir())
    for number in range(200):
        path = paths[number % len(paths)]
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[rng.integers(min(len(content), 1800))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        assert_read_or_named(tmp_path / "a")
        path.write_bytes(content)
