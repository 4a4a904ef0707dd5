"""A folder of class folders of images, as torchvision's ImageFolder reads it."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.local_file import check_regular, open_regular
from raypipe.stores.base import Columns
from raypipe.stores.checks import IMAGE_SUFFIXES, MAX_SAMPLE_BYTES, check_columns, check_indices


class FolderStore:
    """A store in `root/class/**/file`.

    Every folder in the root is a class, in the order of the names, even one without images: a split
    that lacks a class then keeps the labels of the others. Samples are sorted by class, then by path.
    Hidden files and folders do not count, files in the root neither. Links are followed; a folder to which
    several lead counts once in a class, by the path of the fewest folders, and of these by the first.

    Args:
        address: the root; a relative one is made absolute, since other processes have other folders.
    """

    def __init__(self, address: str | Path) -> None:
        self.address = str(Path(address).absolute())
        self._scanned: _Scan | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address,)

    @property
    def columns(self) -> tuple[str, ...]:
        return ("image", "label")

    @property
    def classes(self) -> tuple[str, ...]:
        return self._scan().classes

    @property
    def groups(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        """Hash over the class names and the files' relative paths and sizes."""
        return self._scan().fingerprint

    def __len__(self) -> int:
        return len(self._scan().paths)

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples, see `Store.read`. A file that cannot be read, or is over 512 MiB, is an image None."""
        scan = self._scan()
        wanted = check_indices(indices, len(scan.paths), self.address)
        check_columns(columns, self.columns, self.address)
        result: Columns = {}
        for name in columns:
            if name == "label":
                result[name] = scan.labels[wanted]
            else:
                result[name] = [_content(f"{self.address}/{scan.paths[i]}") for i in wanted.tolist()]
        return result

    def sample_name(self, index: int) -> str:
        """The path of a sample's file."""
        return f"{self.address}/{self._scan().paths[index]}"

    def close(self) -> None:
        self._scanned = None

    def _scan(self) -> _Scan:
        if self._scanned is None:
            self._scanned = _Scan(self.address)
        return self._scanned


class _Scan:
    """What is in a folder: class names, and the relative path and label of each sample."""

    def __init__(self, root: str) -> None:
        try:
            entries = sorted(_visible(root), key=lambda entry: entry.name)
            self.classes = tuple(entry.name for entry in entries if stat.S_ISDIR(_mode(entry)))
            self.paths: list[str] = []
            labels: list[int] = []
            for label, name in enumerate(self.classes):
                images = sorted(_images(root, name))
                self.paths += images
                labels += [label] * len(images)
        except OSError as error:
            raise StoreError(f"{root} cannot be scanned: {error}") from error
        if not self.paths:
            raise StoreError(
                f"{root} has no class folders with images ({', '.join(sorted(IMAGE_SUFFIXES))}): "
                "the layout is root/class/image.jpg"
            )
        self.labels = np.array(labels, dtype=np.int64)
        self._root = root
        self._fingerprint: str | None = None

    @property
    def fingerprint(self) -> str:
        # Only here are the sizes asked for: one system call per file, which readers need not pay.
        if self._fingerprint is None:
            digest = hashlib.blake2b(repr(self.classes).encode(), digest_size=16)
            for path in self.paths:
                digest.update(f"{path}\0{_num_bytes(f'{self._root}/{path}')}\n".encode(errors="surrogateescape"))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def _visible(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _images(root: str, name: str) -> Iterator[str]:
    """Yield the relative paths of all images of a class, in no order."""
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
            elif Path(entry.name).suffix.lower() in IMAGE_SUFFIXES:
                try:
                    check_regular(mode)
                except OSError as error:
                    raise StoreError(f"{root}/{path} is no image: {error}; remove it") from None
                yield path
        folders += sorted(within)


def _mode(entry: os.DirEntry[str]) -> int:
    """The kind of what is in a folder, or of what a link leads to."""
    if entry.is_symlink():
        try:
            return entry.stat().st_mode
        except OSError:  # it leads nowhere: a sample that cannot be read
            return stat.S_IFREG
    # As the listing has it: no system call for each of a million files.
    if entry.is_file():
        return stat.S_IFREG
    return stat.S_IFDIR if entry.is_dir() else entry.stat().st_mode


def _content(path: str) -> bytes | None:
    try:
        with io.BufferedReader(io.FileIO(path, opener=open_regular)) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            return file.read(num_bytes) if num_bytes <= MAX_SAMPLE_BYTES else None
    except OSError:
        return None


def _num_bytes(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return -1
