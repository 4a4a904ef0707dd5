"""Data sets on the Hugging Face Hub, from a server on this machine that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.filesystem import open_filesystem
from raypipe.stores import open_store
from raypipe.stores.parquet import ParquetStore

from hub_server import HubServer, hub_server  # isort: skip

DATA = Path(__file__).parents[1] / "stores" / "data" / "hugging-face"
ROOT = "hf://datasets/owner/name"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    files = {f"data/{path.name}": path.read_bytes() for path in DATA.iterdir()}
    revisions = {"main": {**files, "README.md": b"#"}, "v1": {"train.parquet": files["data/" + _train()[0]]}}
    with hub_server({**revisions, "refs/convert/parquet": {}}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def _train() -> list[str]:
    return sorted(path.name for path in DATA.glob("train-*"))


def test_a_pattern_of_files_is_the_store_that_they_are_on_a_disk(hub: HubServer) -> None:
    store, local = open_store(f"{ROOT}/data/train-*.parquet"), open_store(f"{DATA}/train-*.parquet")
    assert isinstance(store, ParquetStore) and store.fingerprint == local.fingerprint
    assert (store.columns, store.classes, len(store)) == (local.columns, local.classes, 7)
    order = np.array([6, 0, 3, 3])
    found, expected = (one.read(order, one.columns) for one in (store, local))
    assert found["image"] == expected["image"] and found["label"].tolist() == expected["label"].tolist()
    written = json.loads((DATA.parent / "hugging-face.json").read_text())["train"]
    assert [hashlib.sha256(image).hexdigest() for image in found["image"]] == [written[i]["sha256"] for i in order]
    assert pickle.loads(pickle.dumps(store)).read(order)["image"] == found["image"]


def test_reads_are_ranges_and_of_the_wanted_columns(hub: HubServer) -> None:
    store = open_store(f"{ROOT}/data/train-*.parquet")
    assert len(store) == 7
    sizes = {name: len(content) for name, content in hub.files["main"].items()}
    assert all(first + num_bytes > sizes[name] - 9 for name, first, num_bytes in hub.sent)  # the footers
    hub.sent.clear()
    store.read(np.array([0]), ("label",))
    assert sum(num_bytes for _, _, num_bytes in hub.sent) < 300


def test_a_revision_is_a_part_of_the_address(hub: HubServer) -> None:
    assert len(open_store(f"{ROOT}@v1/train.parquet")) == 4
    for address in (f"{ROOT}@v2/train.parquet", f"{ROOT}/absent.parquet", "hf://datasets/owner/other/a.parquet"):
        with pytest.raises(StoreError, match=rf"{address[5:].split('/')[-1]} cannot be read|does not exist"):
            len(open_store(address))


def test_several_splits_in_a_folder_are_refused(hub: HubServer) -> None:
    with pytest.raises(StoreError, match=r"has files of several splits: test \(1\), train \(2\)"):
        len(open_store(f"{ROOT}/data"))


def test_a_token_is_taken_from_the_environment(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    monkeypatch.setenv("RAYPIPE_STORAGE_PATIENCE_S", "1")
    with pytest.raises(StoreError, match=r"train-\*\.parquet|data"):
        len(open_store(f"{ROOT}/data/train-*.parquet"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert len(open_store(f"{ROOT}/data/train-*.parquet")) == 7


def test_a_file_that_goes_away_is_one_error_that_names_it(hub: HubServer) -> None:
    store = open_store(f"{ROOT}@v1/train.parquet")
    assert len(store) == 4
    del hub.files["v1"]["train.parquet"]
    with pytest.raises(StoreError, match=r"name@v1/train\.parquet, row group 0: cannot be read"):
        store.read(np.array([0]))


def test_other_formats_are_to_be_copied_first(hub: HubServer) -> None:
    for name in ("a.tar", "a.lmdb"):
        with pytest.raises(
            StoreError, match=r"raypipe reads only Parquet from the Hub\. Copy it to a disk with `hf download`"
        ):
            open_store(f"{ROOT}/{name}")


def test_nothing_is_written_to_the_hub(hub: HubServer) -> None:
    filesystem, path = open_filesystem(f"{ROOT}/data/{_train()[0]}")
    with pytest.raises(OSError, match="raypipe cannot write to the Hub"):
        filesystem.open_output_stream(path).close()
    with pytest.raises(OSError, match="raypipe cannot write to the Hub"):
        filesystem.delete_file(path)


def test_without_its_client_one_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # another file system than that of other tests
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'raypipe-data\[huggingface\]'"):
        len(open_store(f"{ROOT}/data/train.parquet"))
