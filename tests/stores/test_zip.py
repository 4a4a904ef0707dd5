"""Zips as sources of a conversion: which members count, what is refused, and damage."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path

import numpy as np
import pytest

from raypipe.errors import StoreError
from raypipe.stores import open_source, open_store
from raypipe.stores.folder import FolderStore
from raypipe.stores.zip import ZipSamples


def make(path: Path, *names: str, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in names:
            archive.writestr(name, name * 20)
    return path


def images_of(path: Path) -> list[str | None]:
    images = [sample["image"] for sample in ZipSamples(path)]
    return [None if image is None else image.decode()[: len(image) // 20] for image in images]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_it_has_the_samples_of_the_folder_that_was_zipped(method: int, tmp_path: Path) -> None:
    names = ["b/1.JPG", "a-b/1.png", "a/x.webp", "b/0/z.jpeg", "a/ü.png"]
    for name in names:
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"root/{name}" * 20)
    folder = FolderStore(tmp_path / "root")
    path = make(
        tmp_path / "a.zip",
        *(f"root/{name}" for name in names),
        *("__MACOSX/root/a/._x.webp", "__MACOSX/a/x.png", "root/a/.hidden.png", "root/a/notes.txt", "top.png"),
        *("../a/x.png", "/a/x.png"),
        method=method,
    )
    samples, expected = list(ZipSamples(path)), folder.read(np.arange(5))
    assert ZipSamples(path).classes == folder.classes == ("a", "a-b", "b")
    assert [sample["image"] for sample in samples] == expected["image"]
    assert [sample["label"] for sample in samples] == expected["label"].tolist()


def test_several_are_one_source_with_the_classes_of_all(tmp_path: Path) -> None:
    make(tmp_path / "p-0.zip", "b/1.png", "a/2.png")
    make(tmp_path / "p-1.zip", "c/3.png", "a/4.png")
    found = ZipSamples(tmp_path / "p-{0..1}.zip")
    assert found.classes == ("a", "b", "c") and [sample["label"] for sample in found] == [0, 1, 0, 2]
    assert list(open_source(tmp_path / "p-*.zip")) == list(found)


def test_it_is_no_store_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"can only be read once, in order: copy it with `raypipe convert .*a\.zip NEW"
    ):
        open_store(make(tmp_path / "a.zip", "a/1.png"))


def test_the_last_of_a_name_counts_and_links_and_folders_do_not(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("a/2.png")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("a/", b"")
        archive.writestr("a/1.png", "old" * 20)
        archive.writestr("a/1.png", "new" * 20)
        archive.writestr("a/2.png", "old" * 20)
        archive.writestr(link, "/etc/passwd")
    assert images_of(tmp_path / "a.zip") == ["new"]


def patched(path: Path, flags: int | None = None, num_bytes: int | None = None) -> Path:
    """The zip with other words in its first entry, and in its directory's."""
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    for place, size, value in ((8, 2, flags), (24, 4, num_bytes)):
        if value is not None:
            content[at + place : at + place + size] = value.to_bytes(size, "little")
    if flags is not None:
        content[6:8] = flags.to_bytes(2, "little")
    path.write_bytes(content)
    return path


def test_what_is_not_read_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with pytest.raises(StoreError, match=r"a\.zip, 'a/1\.png': cannot be read: .*encrypted.*; make the zip again"):
        list(ZipSamples(patched(make(path, "a/1.png"), flags=1)))
    with pytest.raises(StoreError, match=r"only images at its top"):
        ZipSamples(make(path, "1.png"))
    with pytest.raises(StoreError, match="has no images"):
        ZipSamples(make(path, "a/1.txt"))
    with pytest.raises(StoreError, match=r"b\.zip cannot be read as zip: .*No such file"):
        ZipSamples(tmp_path / "b.zip")


@pytest.mark.parametrize("cut", [0, 10, 100, -1, -30, -90])
def test_truncated(cut: int, tmp_path: Path) -> None:
    path = make(tmp_path / "a.zip", "a/1.png", "b/2.png")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(StoreError, match=r"a\.zip cannot be read as zip: .*copy it again"):
        ZipSamples(path)


def test_a_member_that_says_another_size_than_it_has_is_a_missing_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/1.png", bytes(100_000_000))
    assert [sample["image"] for sample in ZipSamples(path)] == [bytes(100_000_000)]
    for num_bytes in (1000, (1 << 29) + 1, (1 << 32) - 2):
        with caplog.at_level(logging.WARNING, "raypipe"):
            assert [sample["image"] for sample in ZipSamples(patched(path, num_bytes=num_bytes))] == [None]
        assert caplog.messages.pop().startswith(f"{path}, 'a/1.png': ")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damaged_data_is_a_missing_sample(method: int, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    make(path, "a/1.png", "a/2.png", method=method)
    whole = path.read_bytes()
    for at in (0, 26, 40):  # the magic, the length of the name, the data
        content = bytearray(whole)
        content[at] ^= 0x10
        path.write_bytes(content)
        assert images_of(path) == [None, "a/2.png"]
