"""Class folders: a folder and its tar are one data set, whatever is in it, and what is left out is said."""

from __future__ import annotations

import logging
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from class_trees import (
    GNU_TAR,
    TREES,
    TWO,
    contents,
    in_tar,
    random_tree,
    sparse_header,
    write,
)
from refused import store_refused

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.folder import FolderStore
from raypipe.stores.tar import TarStore


@pytest.fixture(scope="module")
def gnu_tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tars that GNU tar makes of all trees: number.gnu.tar, number.pax.tar; none without it."""
    folder = tmp_path_factory.mktemp("gnu")
    for number, make in enumerate(TREES.values()):
        tree = folder / "trees" / str(number)
        tree.mkdir(parents=True)
        make(tree)
    if shutil.which("tar"):
        script = f"tar --version | grep -q GNU || exit 0; {GNU_TAR}"
        # one program for all of them
        subprocess.run(["sh", "-c", script], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize("number", range(len(TREES)), ids=TREES)
def test_a_folder_and_its_tar_are_one_data_set(
    number: int, gnu_tars: Path, tmp_path: Path
) -> None:
    make = [*TREES.values()][number]
    (tmp_path / "root").mkdir()
    make(tmp_path / "root")
    expected = contents(FolderStore, tmp_path / "root")
    assert not isinstance(expected, str) and len(expected[0]), expected
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        assert (
            contents(TarStore, in_tar(tmp_path / "root", tmp_path / "a.tar", form))
            == expected
        )
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        tar.add(tmp_path / "root", ".")
    made = sorted(gnu_tars.glob(f"{number}.*.tar"))
    assert len(made) in (0, 2)
    for path in (tmp_path / "b.tar", *made):
        assert contents(TarStore, path) == expected


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_folders_by_chance_and_their_tars_are_one_data_set(
    first: int, tmp_path: Path
) -> None:
    num_stores = 0
    for seed in range(first, first + 50):
        root = tmp_path / str(seed)
        root.mkdir()
        random_tree(seed)(root)
        expected, found = (
            contents(FolderStore, root),
            contents(TarStore, in_tar(root, tmp_path / f"{seed}.tar")),
        )
        if isinstance(expected, str):  # the errors of a tar name its other layouts too
            assert isinstance(found, str), seed
        else:
            assert found == expected, seed
            num_stores += 1
    assert num_stores > 20


def test_what_is_left_out_is_said_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    write(
        root,
        *TWO,
        "cat/.DS_Store",
        "__MACOSX/x",
        "cat/notes.txt",
        "cat/7.ppm",
        "dog/8.ppm",
        "labels.csv",
    )
    for path in (root, in_tar(root, tmp_path / "a.tar")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert len(open_store(path)) == 2
        (line,) = caplog.messages
        start, told, not_read = line.split("; ")
        told = told.removeprefix("left out: ")
        assert start == f"{path}: 2 samples"
        expected = [
            "2 hidden or of the system",
            "2 .ppm",
            "1 .txt",
        ]
        assert not_read == "not read: labels.csv"
        assert sorted(told.split(", ")) == sorted(expected)
    write(tmp_path / "clean", *TWO)
    caplog.clear()
    assert len(open_store(tmp_path / "clean")) == 2 and not caplog.messages


@pytest.mark.parametrize(
    "suffix", ["label", "txt", "json", "xml", "lbl", "jpg.json", "cls", "caption.txt"]
)
def test_files_that_belong_to_images_are_named_with_the_setting(
    suffix: str, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    write(root, "cat/a.jpg", "dog/b.jpg", f"dog/b.{suffix}", "dog/c.jpg")
    message = rf"dog/b\.{suffix}, which belong to images by their names.* set store\.target_column to 'folder'"
    store_refused(message, root)
    for column in ("folder", ""):
        assert open_store(root, target_column=column).read(np.arange(3))[
            "label"
        ].tolist() == [0, 1, 1]
    path = in_tar(root, tmp_path / "a.tar")
    # A WebDataset's labels must be numbers, and each sample has one.
    store_refused(
        message if suffix not in ("label", "cls") else "the label dog/b", path
    )
    assert open_store(path, target_column="folder").classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("parts", "num_bytes", "is_good"),
    [
        ([(512, 4), (2000, 3)], 3000, True),
        ([(3000, 0)], 3000, True),
        ([(512, 4), (514, 3)], 3000, False),
        ([(2998, 7)], 3000, False),
        ([(1 << 30, 7)], 3000, False),
    ],
)
def test_parts_of_a_sparse_member_are_in_it(
    parts: list[tuple[int, int]], num_bytes: int, is_good: bool, tmp_path: Path
) -> None:
    stored = b"abcdefg"[: sum(length for _, length in parts)]
    data = stored + bytes(-len(stored) % 512)
    (tmp_path / "a.tar").write_bytes(
        sparse_header("a/1.png", parts, num_bytes) + data + bytes(1024)
    )
    store = TarStore(tmp_path / "a.tar")
    if not is_good:
        with pytest.raises(
            StoreError, match=r"cannot be read as tar: .*a sparse member of"
        ):
            len(store)
        return
    expected = bytearray(num_bytes)
    for offset, length in parts:
        expected[offset : offset + length], stored = stored[:length], stored[length:]
    assert store.read(np.arange(1))["image"] == [bytes(expected)]


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../../etc/passwd", "../../../a/1.png", "..", ""]
)
def test_a_link_out_of_a_tar_reads_nothing(target: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in (("a/1.png", tarfile.SYMTYPE), ("a/2.png", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
    store = TarStore(tmp_path / "a.tar")
    if target != "..":  # that is a folder
        assert store.read(np.arange(2))["image"] == [None, None]
