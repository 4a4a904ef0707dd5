"""Zip stores: which members count, what is refused, and damage."""

from __future__ import annotations

import os
import pickle
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from raypipe.errors import StoreError
from raypipe.stores.folder import FolderStore
from raypipe.stores.tar_and_zip import ZipStore


def make(path: Path, *names: str, method: int = zipfile.ZIP_STORED) -> ZipStore:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in names:
            archive.writestr(name, name * 20)
    return ZipStore(path)


def images_of(store: ZipStore) -> list[str | None]:
    images = store.read(np.arange(len(store)))["image"]
    return [None if image is None else image.decode()[: len(image) // 20] for image in images]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_it_is_the_store_of_the_folder_that_was_zipped(method: int, tmp_path: Path) -> None:
    names = ["b/1.JPG", "a-b/1.png", "a/x.webp", "b/0/z.jpeg", "a/ü.png"]
    for name in names:
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"root/{name}" * 20)
    folder = FolderStore(tmp_path / "root")
    store = make(
        tmp_path / "a.zip",
        *(f"root/{name}" for name in names),
        *("__MACOSX/root/a/._x.webp", "__MACOSX/a/x.png", "root/a/.hidden.png", "root/a/notes.txt", "top.png"),
        *("../a/x.png", "/a/x.png"),
        method=method,
    )
    assert store.classes == folder.classes == ("a", "a-b", "b")
    samples, expected = store.read(np.arange(5)), folder.read(np.arange(5))
    assert samples["image"] == expected["image"]
    assert samples["label"].tolist() == expected["label"].tolist()


def test_the_last_of_a_name_counts_and_links_and_folders_do_not(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("a/2.png")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("a/", b"")
        archive.writestr("a/1.png", "old" * 20)
        archive.writestr("a/1.png", "new" * 20)
        archive.writestr("a/2.png", "old" * 20)
        archive.writestr(link, "/etc/passwd")
    assert images_of(ZipStore(tmp_path / "a.zip")) == ["new"]


def test_a_member_without_a_name_does_not_count(tmp_path: Path) -> None:
    make(tmp_path / "a.zip", "x", "a/1.png")
    content = bytearray((tmp_path / "a.zip").read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 28], content[at + 30] = 0, 1  # the name's byte becomes one of the extra field
    (tmp_path / "a.zip").write_bytes(content)
    assert images_of(ZipStore(tmp_path / "a.zip")) == ["a/1.png"]


def test_many_threads_and_copies_read_at_once(tmp_path: Path) -> None:
    names = [f"a/{i:03d}.png" for i in range(100)]
    store = make(tmp_path / "a.zip", *names, method=zipfile.ZIP_DEFLATED)
    stores = [store, pickle.loads(pickle.dumps(store))]
    found: list[bool] = []

    def run(number: int) -> None:
        order = np.random.default_rng(number).permutation(100)
        images = stores[number % 2].read(order)["image"]
        found.append([image.decode()[: len(names[0])] for image in images] == [names[i] for i in order])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def patched(
    path: Path, flags: int | None = None, method: int | None = None, num_bytes: int | None = None
) -> ZipStore:
    """The zip with other words in its directory's first entry."""
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    for place, size, value in ((8, 2, flags), (10, 2, method), (24, 4, num_bytes)):
        if value is not None:
            content[at + place : at + place + size] = value.to_bytes(size, "little")
    path.write_bytes(content)
    return ZipStore(path)


def test_what_is_not_read_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    for flags in (1, 0x41, 0x2000):
        make(path, "a/1.png")
        with pytest.raises(StoreError, match=r"a\.zip: 'a/1\.png' is encrypted, which is not read"):
            len(patched(path, flags=flags))
    with pytest.raises(StoreError, match=r"a\.zip: 'a/1\.png' is compressed by method 14, which is not read"):
        len(make(path, "a/1.png", method=zipfile.ZIP_LZMA))
    with pytest.raises(StoreError, match=r"only images at its top"):
        len(make(path, "1.png"))
    with pytest.raises(StoreError, match="has no images"):
        len(make(path, "a/1.txt"))
    with pytest.raises(StoreError, match=r"b\.zip cannot be read as zip: .*No such file.*check the path"):
        len(ZipStore(tmp_path / "b.zip"))


@pytest.mark.parametrize("cut", [0, 10, 100, -1, -30, -90])
def test_truncated(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    make(path, "a/1.png", "b/2.png")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(StoreError, match=r"a\.zip.* (cannot be read as zip: .*copy it again|would end behind)"):
        len(ZipStore(path))


def test_a_member_that_says_it_is_too_large_or_inflates_to_more_than_it_says_is_a_missing_sample(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/1.png", bytes(100_000_000))
    assert ZipStore(path).read(np.array([0]))["image"] == [bytes(100_000_000)]
    for num_bytes in (0, 1000, (1 << 29) + 1, (1 << 32) - 2):
        assert patched(path, num_bytes=num_bytes).read(np.array([0]))["image"] == [None]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damaged_data_is_a_missing_sample(method: int, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    make(path, "a/1.png", "a/2.png", method=method)
    whole = path.read_bytes()
    for at in (0, 26, 40):  # the magic, the length of the name, the data
        content = bytearray(whole)
        content[at] ^= 0x10
        path.write_bytes(content)
        assert images_of(ZipStore(path)) == [None, "a/2.png"]


def test_shrunk_after_opening(tmp_path: Path) -> None:
    store = make(tmp_path / "a.zip", "a/1.png", "b/2.png")
    assert len(store) == 2
    os.truncate(tmp_path / "a.zip", 180)
    assert store.read(np.array([0]))["image"] == [b"a/1.png" * 20]
    with pytest.raises(StoreError, match="has become shorter"):
        store.read(np.array([1]))


def test_a_directory_beyond_all_bounds_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypipe.stores.tar_and_zip._MAX_DIRECTORY_BYTES", 1000)
    with pytest.raises(StoreError, match=r"a directory of \d+ bytes; the limit is 1000"):
        len(make(tmp_path / "a.zip", *(f"a/{i}.png" for i in range(100))))
