"""Lance datasets, as their own library writes them, changes and damages them."""

from __future__ import annotations

import pickle
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.arrow import EncodedImageType

from raypipe.errors import ConfigError, StoreError
from raypipe.stores import Store, open_store
from raypipe.stores.filter import matching
from raypipe.stores.lance import LanceStore, _options, _uri

IMAGES = [b"\x89PNG" + bytes([i]) * (300 * i) for i in range(10)]
COLUMNS: dict[str, Any] = {
    "image": pa.array(IMAGES, pa.binary()),
    "label": pa.array([i % 3 for i in range(10)], pa.int32()),
    "name": [None if i == 4 else f"ä{i}" for i in range(10)],
    "score": pa.array([i / 4 for i in range(10)], pa.float32()),
}


def write(address: str | Path, columns: dict[str, Any] = COLUMNS, **options: Any) -> str:
    table = pa.table(columns, schema=options.pop("schema", None))
    lance.write_dataset(table, str(address), max_rows_per_file=4, **options)
    return str(address)


def test_what_the_library_wrote_is_read_as_it_was(tmp_path: Path) -> None:
    store = open_store(write(tmp_path / "a.lance"))
    assert isinstance(store, LanceStore) and store.groups is None and len(store) == 10
    assert store.columns == ("image", "label", "name", "score") and store.classes is None
    order = np.array([7, 0, 3, 3, 9, 1, 4])
    found = store.read(order, store.columns)
    assert found["image"] == [IMAGES[i] for i in order]
    assert found["label"].dtype == np.int64 and found["label"].tolist() == [i % 3 for i in order]
    assert found["name"] == [None if i == 4 else f"ä{i}" for i in order]
    assert found["score"].dtype == np.float32 and found["score"].tolist() == [i / 4 for i in order]
    assert store.sample_name(9) == f"{tmp_path}/a.lance, version 1, row 9"
    assert matching(store, "score >= 2 and label != 0").tolist() == [i == 8 for i in range(10)]


@pytest.mark.parametrize("version", ["2.0", "2.1", "stable"])
def test_images_may_be_blobs_extensions_or_structs(version: str, tmp_path: Path) -> None:
    images: list[bytes | None] = [*IMAGES[:5], None, *IMAGES[6:]]
    blob = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    struct = pa.field("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    of_struct = [{"bytes": image, "path": "x.png"} for image in images]
    labels = pa.field("label", pa.int64())
    encoded = pa.ExtensionArray.from_storage(EncodedImageType(pa.binary()), pa.array(images, pa.binary()))
    for number, (columns, schema) in enumerate(
        [
            ({"image": images, "label": range(10)}, pa.schema([blob, labels])),
            ({"image": of_struct, "label": range(10)}, pa.schema([struct, labels])),
            ({"image": encoded, "label": range(10)}, None),
        ]
    ):
        address = tmp_path / f"{number}.lance"
        store = open_store(write(address, columns, schema=schema, data_storage_version=version))
        found = store.read(np.array([9, 5, 1, 1, 0]))
        assert found["image"] == [IMAGES[9], None, IMAGES[1], IMAGES[1], IMAGES[0]]
        assert found["label"].tolist() == [9, 5, 1, 1, 0]
        assert store.read(np.empty(0, np.int64))["image"] == []


def test_a_store_is_the_version_that_was_opened(tmp_path: Path) -> None:
    address = write(tmp_path / "a.lance")
    store = open_store(address)
    fingerprint, copy = store.fingerprint, pickle.loads(pickle.dumps(store))
    lance.dataset(address).delete("label = 0")
    write(address, mode="append")
    for same in (store, copy, pickle.loads(pickle.dumps(store))):
        same.close()
        assert len(same) == 10 and same.fingerprint == fingerprint
        assert same.read(np.arange(10))["image"] == IMAGES
    newest = open_store(address)
    left = [i for i in range(10) if i % 3]
    assert len(newest) == 16 and newest.fingerprint != fingerprint
    assert newest.read(np.arange(16))["image"] == [IMAGES[i] for i in left] + IMAGES
    lance.dataset(address).cleanup_old_versions(older_than=timedelta(0))
    store.close()
    with pytest.raises(StoreError, match=r"a\.lance cannot be opened as a Lance dataset: .*versions/.* not found"):
        len(store)


def test_a_link_to_a_file_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    column = lance.blob_array([IMAGES[1], (tmp_path / "secret").as_uri(), None])
    table = pa.table([column, [0, 1, 2]], schema=pa.schema([lance.blob_field("image"), ("label", pa.int64())]))
    options = {"data_storage_version": "2.2", "allow_external_blob_outside_bases": True}
    data = lance.write_dataset(table, str(tmp_path / "a.lance"), **options)
    assert data.take_blobs("image", indices=[1])[0].readall() == b"secret"
    assert open_store(tmp_path / "a.lance").read(np.arange(3))["image"] == [IMAGES[1], None, None]


def test_the_fingerprint_is_that_of_the_files(tmp_path: Path) -> None:
    first = open_store(write(tmp_path / "a.lance"))
    shutil.copytree(tmp_path / "a.lance", tmp_path / "copy.lance")
    assert open_store(tmp_path / "copy.lance").fingerprint == first.fingerprint
    assert open_store(write(tmp_path / "b.lance")).fingerprint != first.fingerprint
    lance.dataset(str(tmp_path / "copy.lance")).create_scalar_index("label", "BTREE")
    assert open_store(tmp_path / "copy.lance").fingerprint == first.fingerprint
    lance.dataset(str(tmp_path / "copy.lance")).delete("label = 2")
    assert open_store(tmp_path / "copy.lance").fingerprint != first.fingerprint


def test_columns_are_renamed_and_checked(tmp_path: Path) -> None:
    address = write(tmp_path / "a.lance", {"img": IMAGES, "fine": list(range(10))})
    assert open_store(address, image_column="img", target_column="fine").columns == ("image", "label")
    with pytest.raises(
        StoreError, match=r"no column 'image' for image_column; did you mean img\? .* are img, fine"
    ):
        len(open_store(address))
    null = open_store(write(tmp_path / "b.lance", {"image": IMAGES[:2], "label": [1, None]}))
    with pytest.raises(StoreError, match="has a null label"):
        null.read(np.arange(2))


def test_float_and_list_labels_are_no_classes_and_63_bits_the_limit(tmp_path: Path) -> None:
    for name, labels, is_class, expected in (
        ("float", pa.array([0.5, 2, 3], pa.float32()), False, [0.5, 2, 3]),
        ("list", pa.array([[1], [2], [3]], pa.list_(pa.int64(), 1)), False, [[1], [2], [3]]),
        ("large", pa.array([1, 1 << 63, 3], pa.uint64()), True, [1, None, 3]),
    ):
        store = open_store(write(tmp_path / f"{name}.lance", {"image": [b"x"] * 3, "label": labels}))
        assert store.label_is_class is is_class
        assert np.array(store.read(np.arange(3))["label"]).tolist() == expected


def test_what_is_not_there_or_damaged_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        open_store(tmp_path / "none.lance")
    (tmp_path / "empty.lance").mkdir()
    with pytest.raises(
        StoreError, match=r"empty\.lance cannot be opened as a Lance dataset: .*not found.*; check"
    ):
        len(open_store(tmp_path / "empty.lance"))
    for number, (pattern, cut) in enumerate(
        [("*.manifest", 0.5), ("*.manifest", 0.0), ("data/*", 0.9), ("data/*", 0.0)]
    ):
        address = Path(write(tmp_path / f"{number}.lance"))
        (victim, *_) = sorted(address.rglob(pattern))
        content = victim.read_bytes()
        victim.write_bytes(content[: int(len(content) * cut)])
        with pytest.raises(StoreError, match=rf"{number}\.lance.* cannot be ") as caught:
            open_store(address).read(np.arange(10))
        assert ".rs:" not in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(write(tmp_path / "a.lance"))
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(
        ConfigError, match=r"a\.lance needs the library .*pip install 'raypipe-data\[lance\]', on every"
    ):
        len(store)


def test_in_a_bucket_it_is_the_same_store(bucket: str, tmp_path: Path) -> None:
    local = write(tmp_path / "a.lance")
    options = {"allow_http": "true"}
    lance.write_dataset(lance.dataset(local).to_table(), f"{bucket}/d x/a.lance", storage_options=options)
    store: Store = open_store(f"{bucket}/d%20x/a.lance")
    everything = open_store(local).read(np.arange(10), store.columns)
    for each in (store, pickle.loads(pickle.dumps(store))):
        found = each.read(np.arange(10), store.columns)
        assert {name: list(values) for name, values in found.items()} == {
            name: list(values) for name, values in everything.items()
        }
    with pytest.raises(StoreError, match=rf"{bucket}/none\.lance cannot be opened"):
        len(open_store(f"{bucket}/none.lance"))


def test_addresses_and_credentials_are_those_of_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio.local:9000")
    monkeypatch.setenv("RAYPIPE_STORAGE_PATIENCE_S", "90")
    for name, value in {"ACCOUNT": "acc", "KEY": "secret"}.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    monkeypatch.delenv("AZURE_STORAGE_SAS_TOKEN", raising=False)
    assert _uri("s3://anonymous@b/x.lance") == "s3://b/x.lance"
    assert _options("s3://anonymous@b/x.lance") == {
        "aws_endpoint": "https://minio.local:9000",
        "allow_http": "false",
        "client_max_retries": "1000",
        "client_retry_timeout": "90",
        "aws_skip_signature": "true",
    }
    assert _uri("abfs://c@acc.dfs.core.windows.net/x.lance") == "abfss://c@acc.dfs.core.windows.net/x.lance"
    assert _options("az://c/x.lance") == {
        "azure_storage_account_name": "acc",
        "azure_storage_account_key": "secret",
    }
    assert _options("/data/x.lance") == {} and _uri("/data/x%20.lance") == "/data/x%20.lance"
