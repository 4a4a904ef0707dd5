"""What is kept of a scan of a local tar."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from tars import write_members

from raypipe.stores import tar as tar_module
from raypipe.stores.tar import TarStore
from raypipe.stores.tar_index import Tar
from raypipe.stores.webdataset import Scan


def make(path: Path, *names: str) -> TarStore:
    images = [(name, name.encode()) for name in names]
    labels = [(name.replace(".jpg", ".cls"), b"1") for name in names]
    return TarStore(write_members(path, [*images, *labels]))


@pytest.fixture
def scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tars that were scanned; all are large."""
    monkeypatch.setattr(tar_module, "_SMALL_BYTES", 0)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    names: list[str] = []
    scan = tar_module._scan

    def counted(tar: Tar, *options: str) -> Scan:
        names.append(Path(tar.address).name)
        return scan(tar, *options)

    monkeypatch.setattr(tar_module, "_scan", counted)
    return names


def test_a_large_one_is_scanned_once_by_all_processes_of_a_node(
    tmp_path: Path, scans: list[str]
) -> None:
    store = make(tmp_path / "a.tar", "x/1.jpg", "y/2.jpg")
    assert len(store) == 2 and scans == ["a.tar"]
    for other in (TarStore(tmp_path / "a.tar"), pickle.loads(pickle.dumps(store))):
        assert other.fingerprint == store.fingerprint
        assert other.read(np.array([1]))["image"] == [b"y/2.jpg"]
    assert scans == ["a.tar"]


def test_one_that_has_changed_is_scanned_anew(tmp_path: Path, scans: list[str]) -> None:
    path = tmp_path / "a.tar"
    make(path, "x/1.jpg").close()
    before = TarStore(path).fingerprint
    make(path, "x/3.jpg")  # of the same size
    os.utime(path, ns=(1, 1))
    assert TarStore(path).fingerprint != before and len(scans) == 2
    assert (
        TarStore(path).read(np.array([0]))["image"] == [b"x/3.jpg"] and len(scans) == 2
    )


def test_a_small_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    assert len(make(tmp_path / "a.tar", "x/1.jpg")) == 1
    assert not (tmp_path / "cache").exists()
