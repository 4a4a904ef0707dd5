"""`raypipe ingest` of what others wrote, by its command."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import pytest

import raypipe
from raypipe.commands import cli
from raypipe.stores import open_store
from raypipe.stores.base import Store
from raypipe.transform.decode import decode

from conftest import picture  # isort: skip

DATA = Path(__file__).parents[1] / "stores" / "data"
IMAGES = [picture(i, 8, 8) for i in range(30)]

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def ingested(capsys: pytest.CaptureFixture[str], src: str | Path, dst: Path, *options: str) -> Store:
    cli.main(["ingest", str(src), str(dst), *options])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    store = open_store(dst)
    assert found["samples"] == len(store)
    return store


def contents(store: Store) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in store.read(np.arange(len(store)), store.columns).items()}


def write_lmdb(path: Path, entries: dict[bytes, bytes]) -> Path:
    with lmdb.open(str(path), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        for key, value in entries.items():
            txn.put(key, value)
    return path


OWN = """
def sample(key: bytes, value: bytes) -> dict:
    return {"image": value[1:], "label": value[0], "key": key.decode()}
"""


@pytest.mark.timeout(180)
def test_lmdb_of_a_function_of_the_user_s_which_tasks_import(tmp_path: Path) -> None:
    """In a process of its own, which starts a cluster that knows of the function's module."""
    (tmp_path / "my_layout.py").write_text(OWN)
    entries = {b"%02d" % i: bytes([i % 7]) + image for i, image in enumerate(IMAGES)}
    src, dst = write_lmdb(tmp_path / "a.lmdb", entries), tmp_path / "b.lmdb"
    command = [
        sys.executable,
        "-m",
        "raypipe.commands.cli",
        "ingest",
        str(src),
        str(dst),
        "--layout",
        "my_layout:sample",
    ]
    path = os.pathsep.join([str(tmp_path), str(Path(raypipe.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([*command, "--shards=2"], capture_output=True, text=True, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["samples"] == 30
    expected = {"label": [i % 7 for i in range(30)], "key": [f"{i:02d}" for i in range(30)]}
    assert contents(open_store(dst)) == {"image": IMAGES, **expected}


def test_lmdb_of_images_and_of_pickles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = write_lmdb(tmp_path / "a.lmdb", {b"%040x" % i: image for i, image in enumerate(IMAGES)})
    assert contents(ingested(capsys, src, tmp_path / "b.parquet")) == {"image": IMAGES}
    pickled = {b"%02d" % i: pickle.dumps((image, i)) for i, image in enumerate(IMAGES)}
    src = write_lmdb(tmp_path / "c.lmdb", pickled | {b"__len__": pickle.dumps(30)})
    store = ingested(capsys, src, tmp_path / "d.lmdb", "--layout=pickle")
    assert contents(store) == {"image": IMAGES, "label": list(range(30))}
    with pytest.raises(SystemExit):
        cli.main(["ingest", str(src), str(tmp_path / "e.lmdb")])
    assert "--layout pickle" in capsys.readouterr().err


def test_tfrecord(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        shutil.copy(DATA / "tensorflow-train.tfrecord", tmp_path / f"train-{number:05d}-of-00002")
    store = ingested(capsys, f"{tmp_path}/train-*", tmp_path / "train.lmdb")
    assert contents(store) == contents(open_store(tmp_path / "train-*-of-00002"))
    assert contents(store)["label"] == [1, 2, 3, 4] * 4


def test_a_split_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = DATA / "hugging-face" / "train-*.parquet"
    store = ingested(capsys, src, tmp_path / "train.lmdb")
    assert contents(store) == contents(open_store(src)) and store.classes == ("cat", "dog", "owl")


def test_pixels_of_hdf5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 6, 5, 3), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["pixels"], file["y"] = pixels, np.arange(70)
    store = ingested(capsys, tmp_path / "a.h5", tmp_path / "b.lmdb", "--image-column", "pixels", "--shards=2")
    found = contents(store)
    assert np.array_equal([decode(image) for image in found["image"]], pixels)
    assert found["label"] == list(range(70))
    store = ingested(
        capsys, tmp_path / "a.h5", tmp_path / "c.lmdb", "--image-column=pixels", "--short-side=4", "--quality=80"
    )
    assert all(image.startswith(b"\xff\xd8\xff") for image in contents(store)["image"])
