"""Compressed tars: one group per file, unpacked into the node's cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from pictures import picture
from refused import store_refused
from tars import put, write_tar

from raypipe.stores import open_store
from raypipe.stores.tar import TarStore

SAMPLES = [(picture(number), number % 3) for number in range(9)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def write_three(folder: Path, kind: str) -> Path:
    folder.mkdir()
    for number in range(3):
        part = SAMPLES[3 * number : 3 * number + 3]
        write_tar(folder / f"t-{number}.tar.{kind}", part, 3 * number, f"w:{kind}")
    return folder


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_folder_of_them_has_a_group_for_each(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(write_three(tmp_path / "a", kind))
    assert (
        len(store) == 9
        and store.groups is not None
        and store.groups.tolist() == [0, 3, 6, 9]
    )
    values = store.read(np.array([8, 0, 4]))
    assert values["image"] == [SAMPLES[i][0] for i in (8, 0, 4)] and values[
        "label"
    ].tolist() == [2, 0, 1]
    assert (
        "3 compressed tars of 0.0 GB cannot be entered: each is unpacked whole"
        in caplog.text
    )
    plain = write_tar(tmp_path / "plain.tar", SAMPLES)
    one = write_tar(tmp_path / f"one.tar.{kind}", SAMPLES, mode=f"w:{kind}")
    assert open_store(one).fingerprint == open_store(plain).fingerprint
    assert TarStore(one).adapted("global").groups is None


def test_one_that_has_changed_is_unpacked_anew(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tgz", SAMPLES[:4], mode="w:gz")
    before = open_store(path)
    assert len(before) == 4
    write_tar(path, SAMPLES[4:], mode="w:gz")
    os.utime(path, ns=(1, 1))
    assert open_store(path).read(np.array([0]))["image"] == [SAMPLES[4][0]]


def test_one_in_a_bucket_is_the_local_one(bucket: str, tmp_path: Path) -> None:
    local = write_three(tmp_path / "a", "gz")
    for path in local.iterdir():
        put(path, f"{bucket}/a/{path.name}")
    store = open_store(f"{bucket}/a")
    assert store.fingerprint == open_store(local).fingerprint
    assert store.groups is not None and store.groups.tolist() == [0, 3, 6, 9]
    assert store.read(np.arange(9))["image"] == [image for image, _ in SAMPLES]


def test_a_folder_with_plain_tars_ignores_compressed_ones(tmp_path: Path) -> None:
    folder = write_three(tmp_path / "a", "gz")
    write_tar(folder / "b.tar", SAMPLES[:2])
    assert len(open_store(folder)) == 2


def test_damage_is_one_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar.gz", SAMPLES, mode="w:gz")
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    store_refused(r"a\.tar\.gz cannot be unpacked: .*truncated; copy it again", path)
    path.write_bytes(b"plain")
    store_refused(r"a\.tar\.gz is not gzip, bzip2 or xz", path)
