"""A folder of images in a bucket: the same store as on a disk, listed once, and read by several requests."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from s3_server import FaultyProxy

from raypipe.errors import StoreError
from raypipe.storage.files import write_bytes
from raypipe.storage.filesystem import join_address, open_filesystem
from raypipe.stores import folder as folder_module
from raypipe.stores import image_files, open_store
from raypipe.stores.base import name_of
from raypipe.stores.folder import FolderStore

NAMES = [
    *(
        "b/1.JPG",
        "b/0/z.jpeg",
        "b/0.png",
        "a/x.webp",
        "a/X.png",
        "a/é %41+#.png",
        "a-b/1.tiff",
        "ä/1.gif",
        "ä/2.bmp",
    ),
    *(
        "a/notes.txt",
        "a/.hidden.png",
        "a/.cache/2.png",
        ".git/3.png",
        "root.jpg",
        "empty/.keep",
    ),
]


def write(root: Path, address: str, names: list[str] = NAMES) -> None:
    """The same files on a disk and in a bucket."""
    for number, name in enumerate(names):
        content = name.encode() * (1 + 50 * number)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
        write_bytes(join_address(address, *name.split("/")), content)


@pytest.mark.parametrize("folder", ["", "/train", "/data%20set/train/"])
def test_a_folder_copied_to_a_bucket_is_the_same_store(
    folder: str, bucket: str, tmp_path: Path
) -> None:
    address = bucket + folder
    write(tmp_path / "root", address)
    local = FolderStore(tmp_path / "root")
    remote = open_store(address)
    assert isinstance(remote, FolderStore) and remote.address == address
    assert remote.classes == local.classes == ("a", "a-b", "b", "empty", "ä")
    assert remote.schema == local.schema and remote.fingerprint == local.fingerprint
    assert len(remote) == len(local) == 9
    for indices in (np.arange(9), np.array([8, 0, 3, 3, 1])):
        found = remote.read(indices)
        expected = local.read(indices)
        assert found.images == expected.images and found.table == expected.table
    name = f"{address.rstrip('/')}/a/%C3%A9%20%2541%2B%23.png"
    assert name_of(remote, 2) == name


def test_it_is_listed_once_and_other_processes_get_what_was_found(
    proxy: FaultyProxy, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "root", f"{bucket}/train")
    store = open_store(f"{bucket}/train")
    fingerprint = store.fingerprint
    write_bytes(f"{bucket}/train/a/A.png", b"too late")
    sent = pickle.dumps(store)

    def never(address: str) -> None:
        raise AssertionError(f"{address} is listed again")

    monkeypatch.setattr(folder_module, "_list_objects", never)
    before = proxy.requests.total()
    copy = pickle.loads(sent)
    assert (
        copy.fingerprint == fingerprint
        and len(copy) == 9
        and proxy.requests.total() == before
    )
    assert copy.read(np.arange(9))["image"] == store.read(np.arange(9))["image"]
    store.close()
    assert len(store) == 9
    assert proxy.requests.total() - before <= 2 * 2 * 9


def test_a_vanished_object_is_a_missing_sample_and_a_changed_one_an_error(
    bucket: str, tmp_path: Path
) -> None:
    write(tmp_path / "root", f"{bucket}/train")
    store = open_store(f"{bucket}/train")
    images = store.read(np.arange(9))["image"]
    filesystem, path = open_filesystem(f"{bucket}/train/a-b/1.tiff")
    filesystem.delete_file(path)
    assert store.read(np.arange(9))["image"] == [
        None if i == 3 else image for i, image in enumerate(images)
    ]
    write_bytes(f"{bucket}/train/b/0.png", b"another")
    with pytest.raises(
        StoreError,
        match=r"/train/b/0\.png has changed since the store was opened: \d+ bytes then, 7",
    ):
        store.read(np.array([4]))
    assert open_store(f"{bucket}/train").read(np.array([3]))["image"] == [b"another"]


def test_an_object_too_large_for_an_image_is_never_asked_for(
    proxy: FaultyProxy, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "root", f"{bucket}/train")
    store = open_store(f"{bucket}/train")
    sizes = [len(image) for image in store.read(np.arange(9))["image"]]
    monkeypatch.setattr(image_files, "MAX_SAMPLE_BYTES", sorted(sizes)[4])
    before = proxy.requests["GET"]
    found = store.read(np.arange(9))["image"]
    assert [image is None for image in found] == [
        size > sorted(sizes)[4] for size in sizes
    ]
    assert proxy.requests["GET"] - before == 5
