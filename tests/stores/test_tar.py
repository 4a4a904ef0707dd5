"""Tar stores: truncation, compression, and members that are not what they should be."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from raypipe.errors import StoreError
from raypipe.stores.base import name_of
from raypipe.stores.tar import TarStore

pytestmark = pytest.mark.usefixtures("in_own_folder")


def add(
    tar: tarfile.TarFile, name: str, content: bytes | None = None, **fields: object
) -> None:
    member = tarfile.TarInfo(name)
    if content is None:
        content = b"1" if name.endswith(".cls") else name.encode()
    for field, value in fields.items():
        setattr(member, field, value)
    member.size = len(content) if member.isreg() else 0
    tar.addfile(member, io.BytesIO(content) if member.isreg() else None)


def make(path: str, *names: str, mode: str = "w") -> TarStore:
    with tarfile.open(path, mode) as tar:
        for name in names:
            add(tar, name)
    return TarStore(path)


def names_of(store: TarStore) -> list[str]:
    return [image.decode() for image in store.read(np.arange(len(store)))["image"]]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_are_told_without_control_characters(form: int) -> None:
    names = ["a/1.png", "a/\x1b[31m\n.png", f"a/{'z' * 300}.png"]
    with tarfile.open("x.tar", "w", format=form) as tar:
        for name in names:
            add(tar, name, b"")
            add(tar, f"{name[:-4]}.cls")
    store = TarStore("x.tar")
    told = {
        name_of(store, index).removeprefix(f"{store.address}, ")
        for index in range(len(names))
    }
    assert told == {"a/1", r"a/\x1b[31m\n", f"a/{'z' * 300}"}


def test_odd_members_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    folder = Path("store")
    folder.mkdir()
    with tarfile.open(folder / "a.tar", "w") as tar:
        add(tar, "a", type=tarfile.DIRTYPE)
        add(tar, "a/1.png")
        add(tar, "a/1.cls")
        add(tar, "../evil.png")
        add(tar, "../a/evil.png")
        add(tar, "a/../../evil.png")
        add(tar, "/etc/evil.png")
        add(tar, "a/link.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "a/hard.png", type=tarfile.LNKTYPE, linkname="a/1.png")
        add(tar, "a/hard.cls", type=tarfile.SYMTYPE, linkname="1.cls")
        add(tar, "a/pipe.png", type=tarfile.FIFOTYPE)
        add(tar, "a/" + "long" * 60 + ".png", b"long")
        add(tar, "a/" + "long" * 60 + ".cls")
    store = TarStore(folder / "a.tar")
    assert names_of(store) == ["a/1.png", "a/1.png", "long"]
    left_out = "4 outside the tar by their names, 1 links to no member, 1 a FIFO"
    assert f"left out: {left_out}" in caplog.text
    assert [path.name for path in Path().rglob("*")] == ["store", "a.tar"]


def test_a_member_too_large_for_an_image_is_a_missing_sample() -> None:
    path = Path("a.tar")
    make(path, "a/1.png", "a/1.cls", "a/9.cls")
    member = tarfile.TarInfo("a/9.png")
    member.size = (8 << 30) - 1
    with path.open("r+b") as file:  # of holes
        file.seek(3072)
        file.write(member.tobuf())
        file.truncate(3584 + (8 << 30) + 1024)
    assert TarStore(path).read(np.arange(2))["image"] == [b"a/1.png", None]


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed(mode: str) -> None:
    with pytest.raises(
        StoreError,
        match=r"a\.tar .*it is compressed, and must then be named \*\.tar\.gz",
    ):
        len(make("a.tar", "a/1.png", mode=mode))


def test_shrunk_after_opening() -> None:
    store = make("a.tar", "a/1.png", "a/1.cls", "b/2.cls", "b/2.png")
    assert len(store) == 2
    os.truncate("a.tar", 1024)
    assert store.read(np.array([0]))["image"] == [b"a/1.png"]
    with pytest.raises(StoreError, match="has become shorter"):
        store.read(np.array([1]))


def test_close_closes_the_file() -> None:
    def is_open() -> bool:
        links = (each for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
        return Path("a.tar").absolute() in {link.readlink() for link in links}

    store = make("a.tar", "a/1.png", "a/1.cls")
    store.read(np.array([0]))
    assert is_open()
    store.close()
    assert not is_open()
