"""Folder stores: what counts as a class and as a sample."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from refused import store_refused

from raypipe.errors import ConfigError, StoreError
from raypipe.stores import open_store
from raypipe.stores.folder import FolderStore


def make(root: Path, *names: str) -> FolderStore:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(name.encode())
    return FolderStore(root)


def names_of(store: FolderStore) -> list[str]:
    return [image.decode() for image in store.read(np.arange(len(store)))["image"]]


def test_order_and_suffixes(tmp_path: Path) -> None:
    names = [
        "b/1.JPG",
        "b/0/z.jpeg",
        "a/x.webp",
        "a/X.png",
        "a-b/1.tiff",
        "c/1.gif",
        "c/2.bmp",
        "c/3.tif",
    ]
    store = make(tmp_path, *names, "a/notes.txt", "a/jpg", "root.jpg")
    assert store.classes == ("a", "a-b", "b", "c")
    assert names_of(store) == [
        "a/X.png",
        "a/x.webp",
        "a-b/1.tiff",
        "b/0/z.jpeg",
        "b/1.JPG",
        "c/1.gif",
        "c/2.bmp",
        "c/3.tif",
    ]
    assert store.read(np.arange(8))["label"].tolist() == [0, 0, 1, 2, 2, 3, 3, 3]


def test_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    make(outside, "x.png", "more/y.png")
    root = tmp_path / "root"
    store = make(root, "a/1.png")
    (root / "a" / "2.png").symlink_to(outside / "x.png")
    (root / "a" / "3.png").symlink_to(outside / "absent.png")
    (root / "a" / "loop").symlink_to(root)
    (root / "b").symlink_to(outside / "more")
    assert store.classes == ("a", "b")
    batch = store.read(np.arange(len(store)))
    # Of the loop what is not in the class yet.
    assert batch["image"] == [b"a/1.png", b"x.png", None, b"more/y.png", b"more/y.png"]
    assert batch["label"].tolist() == [0, 0, 0, 0, 1]


def test_links_in_a_lattice_or_a_ring_bring_each_folder_once(tmp_path: Path) -> None:
    for level in range(20):  # 2^20 paths lead to the last
        (tmp_path / f"level{level}").mkdir()
        for name in "xy":
            (tmp_path / f"level{level}" / name).symlink_to(
                tmp_path / f"level{level + 1}"
            )
    make(tmp_path, "level20/1.png")
    root = tmp_path / "root"
    for name in "abcdefghijkl":  # 12! paths
        (root / name).mkdir(parents=True)
        for other in set("abcdefghijkl") - {name}:
            (root / name / other).symlink_to(root / other)
    (root / "lattice").symlink_to(tmp_path / "level0")
    store = make(root, "a/1.png")
    batch = store.read(np.arange(len(store)))
    assert batch["image"] == [b"a/1.png"] * 12 + [b"level20/1.png"]
    assert batch["label"].tolist() == [*range(13)]


def test_folders_that_are_nested_very_deep(tmp_path: Path) -> None:
    folder = f"{tmp_path}/a"
    for _ in range(1200):
        Path(folder).mkdir()
        folder += "/b"
    try:
        (Path(folder).parent / "1.png").write_bytes(b"x")
        assert FolderStore(tmp_path).read(np.arange(1))["image"] == [b"x"]
    finally:  # pytest could not
        (Path(folder).parent / "1.png").unlink()
        os.removedirs(Path(folder).parent)


def test_vanished_file_is_a_missing_sample(tmp_path: Path) -> None:
    store = make(tmp_path, "a/1.png", "a/2.png")
    assert len(store) == 2
    (tmp_path / "a" / "1.png").unlink()
    batch = store.read(np.arange(2))
    assert batch["image"] == [None, b"a/2.png"]
    assert batch["label"].tolist() == [0, 0]
    store.close()
    assert len(store) == 1


def test_a_file_too_large_for_an_image_is_a_missing_sample(tmp_path: Path) -> None:
    store = make(tmp_path, "a/1.png", "a/2.png")
    os.truncate(tmp_path / "a" / "1.png", 40 << 30)  # of holes
    assert store.read(np.arange(2))["image"] == [None, b"a/2.png"]


def test_images_in_no_folder_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    make(tmp_path, "1.png", "2.jpg", "a/notes.txt")
    store_refused(
        r"has 2 images and no class folders.* such as .*/cat/1\.png, or set", tmp_path
    )
    store = open_store(tmp_path, target_column="")
    assert tuple(store.stored.names) == ("image",) and store.classes is None
    assert store.read(np.arange(2), ("image",))["image"] == [b"1.png", b"2.jpg"]
    with pytest.raises(
        ConfigError,
        match=r"target_column='kind': .* is a folder of images, whose labels are",
    ):
        open_store(tmp_path, target_column="kind")


@pytest.mark.parametrize("names", [[], ["a/notes.txt"]])
def test_nothing_there(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(
        StoreError, match=r"has no class folders with images .*root/class/image\.jpg"
    ):
        len(make(tmp_path, *names))
