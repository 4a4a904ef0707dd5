"""A folder of class folders of images in an object store, read where they are."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

import numpy as np
import pyarrow.fs

from raypipe.errors import StoreError
from raypipe.storage.filesystem import explained, join, open_filesystem
from raypipe.storage.patience import Threads, progress
from raypipe.stores.base import ARRAY_SUFFIX, IMAGE_SUFFIXES, MAX_SAMPLE_BYTES, Columns, FileStore

# Requests under way at a time, of a process: an image takes two, of some 20 to 50 ms each.
_NUM_REQUESTS = 16


class RemoteFolderStore(FileStore["_Opened"]):
    """A store in `s3://bucket/root/class/**/image`, in the order of `FolderStore`, which reads the same on a disk.

    The process that opens it first lists the folder, and sends what it has found to the others. Hidden names, with
    a dot at their beginning, do not count, nor do objects in the root. An object that is gone, or is over 512 MiB,
    is an image None; one of another size than was listed raises StoreError. The fingerprint is that of
    `FolderStore`.

    Args:
        address: the URI of the root.
    """

    _has_lock = True  # threads that read

    def _open(self) -> _Opened:
        self._found = self._found or _listed(self.address)
        return _Opened(self.address, self._found)


@dataclass(frozen=True)
class Listing:
    """What is in a folder, as small as it goes: every process gets it.

    Attributes:
        classes: names, position = label.
        num: images of each class.
        paths: of the images from the root, sorted by class, then by path, with NUL between them; deflated.
        sizes: bytes of each image, little-endian int64; deflated.
    """

    classes: tuple[str, ...]
    num: tuple[int, ...]
    paths: bytes
    sizes: bytes


def _listed(address: str) -> Listing:
    """Ask the object store what there is: the classes first, then several of them at a time."""
    with explained(StoreError, f"{address} cannot be listed"):
        filesystem, root = open_filesystem(address)
        found = filesystem.get_file_info(pyarrow.fs.FileSelector(root))
        folders = (info.base_name for info in found if info.type == pyarrow.fs.FileType.Directory)
        classes = tuple(sorted(name for name in folders if not name.startswith(".")))
        with Threads(_NUM_REQUESTS) as pool:
            images = list(pool.map(lambda name: _samples(filesystem, root, name), classes))
    if any(_has_suffix(path, IMAGE_SUFFIXES) for of_class in images for path, _ in of_class):  # else arrays
        images = [[each for each in of_class if _has_suffix(each[0], IMAGE_SUFFIXES)] for of_class in images]
    if not any(images):
        raise StoreError(
            f"{address} has no class folders with images ({', '.join(sorted(IMAGE_SUFFIXES))}), nor with "
            f"arrays ({ARRAY_SUFFIX}): "
            "the layout is root/class/image.jpg"
        )
    return _listing(classes, images)


def _listing(classes: tuple[str, ...], images: Sequence[Sequence[tuple[str, int]]]) -> Listing:
    """Of the sorted paths and sizes of each class."""
    paths = "\0".join(path for of_class in images for path, _ in of_class)
    sizes = np.array([size for of_class in images for _, size in of_class], "<i8")
    return Listing(classes, tuple(map(len, images)), zlib.compress(paths.encode()), zlib.compress(sizes.tobytes()))


def _samples(filesystem: pyarrow.fs.FileSystem, root: str, name: str) -> list[tuple[str, int]]:
    """The paths from the root, and the sizes, of all images and arrays of a class, sorted."""
    found = filesystem.get_file_info(pyarrow.fs.FileSelector(f"{root}/{name}", recursive=True))
    progress()
    there = (info for info in found if info.type == pyarrow.fs.FileType.File)
    files = ((info.path.removeprefix(f"{root}/"), info.size) for info in there)
    return sorted((path, size) for path, size in files if _is_sample(PurePosixPath(path)))


def _is_sample(path: PurePosixPath) -> bool:
    is_visible = not any(part.startswith(".") for part in path.parts)
    return is_visible and path.suffix.lower() in {*IMAGE_SUFFIXES, ARRAY_SUFFIX}


def _has_suffix(path: str, suffixes: Collection[str]) -> bool:
    return PurePosixPath(path).suffix.lower() in suffixes


class _Opened:
    """What is in a folder: class names, the paths as one text, the sizes, and threads that read."""

    columns = ("image", "label")
    groups = None

    def __init__(self, address: str, listing: Listing) -> None:
        self._address, self.classes = address, listing.classes
        self._text = zlib.decompress(listing.paths)
        self._sizes = np.frombuffer(zlib.decompress(listing.sizes), "<i8")
        self._labels = np.repeat(np.arange(len(listing.num)), listing.num)
        self._ends = np.append(np.flatnonzero(np.frombuffer(self._text, np.uint8) == 0), len(self._text))
        self._pool = Threads(_NUM_REQUESTS)

    def __len__(self) -> int:
        return len(self._sizes)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(repr(self.classes).encode(), digest_size=16)
        for index, num_bytes in enumerate(self._sizes.tolist()):
            digest.update(f"{self._path(index)}\0{num_bytes}\n".encode())
        return digest.hexdigest()

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        return {name: self._labels[indices] if name == "label" else self._images(indices) for name in columns}

    def _images(self, indices: np.ndarray) -> list[bytes | None]:
        with explained(StoreError, f"{self._address} cannot be read"):
            filesystem, root = open_filesystem(self._address)
            contents = self._pool.map(lambda index: self._image(filesystem, root, index), indices.tolist())
            try:
                return list(contents)
            except BaseException:
                self._pool.give_up()
                self._pool = Threads(_NUM_REQUESTS)
                raise

    def _image(self, filesystem: pyarrow.fs.FileSystem, root: str, index: int) -> bytes | None:
        num_bytes = int(self._sizes[index])
        if num_bytes > MAX_SAMPLE_BYTES:
            return None
        try:
            with filesystem.open_input_file(f"{root}/{self._path(index)}") as file:
                if file.size() != num_bytes:
                    raise StoreError(
                        f"{self.sample_name(index)} has changed since the store was opened: {num_bytes} bytes "
                        f"then, {file.size()} now. Start a new run, or put the old object back"
                    )
                return file.read(num_bytes)
        except FileNotFoundError:
            return None

    def _path(self, index: int) -> str:
        start = self._ends[index - 1] + 1 if index else 0
        return self._text[start : self._ends[index]].decode()

    def sample_name(self, index: int) -> str:
        return join(self._address, *self._path(index).split("/"))
