"""A folder of class folders of images, as torchvision's ImageFolder reads it."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.local_file import check_regular, open_regular
from raypipe.stores.base import ARRAY_SUFFIX, IMAGE_SUFFIXES, MAX_SAMPLE_BYTES, Columns, FileStore


class FolderStore(FileStore["_Scan"]):
    """A store in `root/class/**/file`.

    Every folder in the root is a class, in the order of the names, even one without images: a split
    that lacks a class then keeps the labels of the others. Samples are sorted by class, then by path.
    Hidden files and folders do not count, nor do files in the root. Links are followed; a folder that several
    links lead to counts once in a class, by the shortest path, and of these by the first. A file that cannot be
    read, or is over 512 MiB, is an image None. Where no folder has an image, arrays (*.npy) are the samples.

    Args:
        address: the root.
    """

    def _open(self) -> _Scan:
        return _Scan(self.address)


class _Scan:
    """What is in a folder: class names, and the relative path and label of each sample."""

    columns = ("image", "label")
    groups = None

    def __init__(self, root: str) -> None:
        self._root = root
        try:
            entries = sorted(_visible(root), key=lambda entry: entry.name)
            self.classes = tuple(entry.name for entry in entries if stat.S_ISDIR(_mode(entry)))
            images = [sorted(_images(root, name, IMAGE_SUFFIXES)) for name in self.classes]
            if not any(images):
                images = [sorted(_images(root, name, {ARRAY_SUFFIX})) for name in self.classes]
        except OSError as error:
            raise StoreError(f"{root} cannot be scanned: {error}") from error
        self._paths = [path for of_class in images for path in of_class]
        self._labels = np.repeat(np.arange(len(images)), [len(of_class) for of_class in images])
        if not self._paths:
            raise StoreError(
                f"{root} has no class folders with images ({', '.join(sorted(IMAGE_SUFFIXES))}), nor with "
                f"arrays ({ARRAY_SUFFIX}): "
                "the layout is root/class/image.jpg"
            )

    def __len__(self) -> int:
        return len(self._paths)

    @cached_property
    def fingerprint(self) -> str:
        """Hash over the class names and the files' relative paths and sizes."""
        # Only here are the sizes asked for: one system call per file, which readers need not pay.
        digest = hashlib.blake2b(repr(self.classes).encode(), digest_size=16)
        for index, path in enumerate(self._paths):
            try:
                num_bytes = Path(self.sample_name(index)).stat().st_size
            except OSError:
                num_bytes = -1
            digest.update(f"{path}\0{num_bytes}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        return {
            name: self._labels[indices]
            if name == "label"
            else [_bytes_of(self.sample_name(index)) for index in indices.tolist()]
            for name in columns
        }

    def sample_name(self, index: int) -> str:
        return f"{self._root}/{self._paths[index]}"


def _visible(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _images(root: str, name: str, suffixes: Collection[str]) -> Iterator[str]:
    """Yield the relative paths of all files of a class with these suffixes, in no order."""
    folders, visited = [name], set[tuple[int, int]]()
    for folder in folders:  # which grow meanwhile
        found = Path(f"{root}/{folder}").stat()
        if (found.st_dev, found.st_ino) in visited:
            continue
        visited.add((found.st_dev, found.st_ino))
        within = []
        for entry in _visible(f"{root}/{folder}"):
            path, mode = f"{folder}/{entry.name}", _mode(entry)
            if stat.S_ISDIR(mode):
                within.append(path)
            elif Path(entry.name).suffix.lower() in suffixes:
                try:
                    check_regular(mode)
                except OSError as error:
                    raise StoreError(f"{root}/{path} is no image: {error}; remove it") from None
                yield path
        folders += sorted(within)


def _mode(entry: os.DirEntry[str]) -> int:
    """The kind of an entry of a folder, or of a link's target."""
    try:
        # As the listing has it: no system call for each of a million files.
        if entry.is_file():
            return stat.S_IFREG
        return stat.S_IFDIR if entry.is_dir() else entry.stat().st_mode
    except OSError:  # a link that leads nowhere: a sample that cannot be read
        return stat.S_IFREG


def _bytes_of(path: str) -> bytes | None:
    try:
        with io.BufferedReader(io.FileIO(path, opener=open_regular)) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            return file.read(num_bytes) if num_bytes <= MAX_SAMPLE_BYTES else None
    except OSError:
        return None
