"""Class folders of images, `class/image.jpg`, as in torchvision's ImageFolder, local or in an object store."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow.fs

from raypipe.errors import StoreError
from raypipe.storage.filesystem import explained, is_remote, join, open_filesystem
from raypipe.storage.local_file import check_regular, open_regular
from raypipe.storage.patience import in_threads, progress
from raypipe.stores.base import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    MAX_SAMPLE_BYTES,
    Columns,
    FileStore,
    hash_of_facts,
    refuse_splits,
)

_SUFFIXES = {*IMAGE_SUFFIXES, ARRAY_SUFFIX}

_File = tuple[str, int]
"""Path of a file from the root, and its size; -1 for a local file, whose size is read only when needed."""


class FolderStore(FileStore["_Images"]):
    """A store in `root/class/**/file`.

    Every folder in the root is a class, in the order of names. A folder without images is a class too, so a split
    that lacks a class keeps the labels of the others. Samples are sorted by class, then by path. Hidden files and
    folders do not count, nor do files in the root. Links are followed; a folder at the end of several links counts
    once per class, under its shortest and then first path. An image that cannot be read, or is over 512 MiB, is
    None. If no folder has an image, arrays (*.npy) are the samples.

    In an object store, the process that opens the store first lists the folder and sends the listing to the
    others; an object whose size has changed since then raises StoreError. The fingerprint is a hash over the class
    names and the files' relative paths and sizes, for local and remote folders.

    Args:
        address: the root, a path or a URI.
    """

    def _open(self) -> _Images:
        if not is_remote(self.address):
            return _Images(self.address, *_samples_of(self.address, _scan_disk(self.address)))
        self._listing = self._listing or _packed(*_samples_of(self.address, _list_objects(self.address)))
        return _Images(self.address, *_unpacked(self._listing))


def _samples_of(root: str, files: dict[str, list[_File]]) -> tuple[tuple[str, ...], list[int], list[_File]]:
    """Return class names, the number of samples of each, and the samples in order, from the files by class."""
    by_class = [sorted(class_files) for class_files in files.values()]
    images = [[file for file in class_files if _suffix(file[0]) in IMAGE_SUFFIXES] for class_files in by_class]
    samples = images if any(images) else by_class
    if not any(samples):
        raise StoreError(
            f"{root} has no class folders with images ({', '.join(sorted(IMAGE_SUFFIXES))}), nor with "
            f"arrays ({ARRAY_SUFFIX}): the layout is root/class/image.jpg"
        )
    refuse_splits(root, files)
    return tuple(files), list(map(len, samples)), list(itertools.chain.from_iterable(samples))


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()


class _Images:
    """Contents of a folder: class names, and each sample's path from the root, size and label."""

    columns = ("image", "label")
    groups = None

    def __init__(self, root: str, classes: tuple[str, ...], num: Sequence[int], files: Sequence[_File]) -> None:
        self._root, self.classes = root, classes
        self._labels = np.repeat(np.arange(len(classes)), num)
        self._paths = [path for path, _ in files]
        self._sizes = np.array([num_bytes for _, num_bytes in files], np.int64)

    def __len__(self) -> int:
        return len(self._paths)

    @cached_property
    def identity(self) -> str:
        """The hash of classes and paths, for which no file is looked at; see `FileStore`."""
        return hash_of_facts((self.classes, self._paths))

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(repr(self.classes).encode(), digest_size=16)
        for path, num_bytes in zip(self._paths, self._sizes.tolist(), strict=True):
            size = num_bytes if is_remote(self._root) else _size_of(f"{self._root}/{path}")
            digest.update(f"{path}\0{size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        return {
            name: self._labels[indices] if name == "label" else self._images(indices.tolist()) for name in columns
        }

    def sample_name(self, index: int) -> str:
        """Return a sample's path or URI."""
        return join(self._root, *self._paths[index].split("/"))

    def _images(self, indices: list[int]) -> list[bytes | None]:
        """Return the contents of files."""
        if not is_remote(self._root):
            return [_bytes_of(f"{self._root}/{self._paths[index]}") for index in indices]
        with explained(StoreError, f"{self._root} cannot be read"):
            filesystem, root = open_filesystem(self._root)
            return in_threads(lambda index: self._object(filesystem, root, index), indices)

    def _object(self, filesystem: pyarrow.fs.FileSystem, root: str, index: int) -> bytes | None:
        path, num_bytes = self._paths[index], int(self._sizes[index])
        if num_bytes > MAX_SAMPLE_BYTES:
            return None
        try:
            with filesystem.open_input_file(f"{root}/{path}") as file:
                if file.size() != num_bytes:
                    raise StoreError(
                        f"{self.sample_name(index)} has changed since the store was opened: {num_bytes} bytes "
                        f"then, {file.size()} now. Start a new run, or put the old object back"
                    )
                return file.read(num_bytes)
        except FileNotFoundError:
            return None


# On a disk


def _scan_disk(root: str) -> dict[str, list[_File]]:
    try:
        entries = sorted(_visible(root), key=lambda entry: entry.name)
        classes = [entry.name for entry in entries if stat.S_ISDIR(_mode(entry))]
        return {name: [(path, -1) for path in _files(root, name)] for name in classes}
    except OSError as error:
        raise StoreError(f"{root} cannot be scanned: {error}") from error


def _visible(folder: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _files(root: str, name: str) -> Iterator[str]:
    """Yield the paths of all images and arrays of a class from the root, unordered."""
    folders, visited = [name], set[tuple[int, int]]()
    for folder in folders:  # the loop appends to the list
        status = Path(f"{root}/{folder}").stat()
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        within = []
        for entry in _visible(f"{root}/{folder}"):
            path, mode = f"{folder}/{entry.name}", _mode(entry)
            if stat.S_ISDIR(mode):
                within.append(path)
            elif _suffix(entry.name) in _SUFFIXES:
                try:
                    check_regular(mode)
                except OSError as error:
                    raise StoreError(f"{root}/{path} is not an image: {error}; remove it") from None
                yield path
        folders += sorted(within)


def _mode(entry: os.DirEntry[str]) -> int:
    """Return the kind of a folder's entry, or of a link's target."""
    try:
        # The listing has the kind, which saves a system call for each of a million files.
        if entry.is_file():
            return stat.S_IFREG
        return stat.S_IFDIR if entry.is_dir() else entry.stat().st_mode
    except OSError:  # a broken link is a sample that cannot be read
        return stat.S_IFREG


def _size_of(path: str) -> int:
    """Return the size of a file; -1 if unknown. Only the fingerprint needs it, so readers do not ask for it."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return -1


def _bytes_of(path: str) -> bytes | None:
    try:
        with io.BufferedReader(io.FileIO(path, opener=open_regular)) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            return file.read(num_bytes) if num_bytes <= MAX_SAMPLE_BYTES else None
    except OSError:
        return None


# In an object store


def _list_objects(address: str) -> dict[str, list[_File]]:
    """List the classes in the object store, then the objects of several classes at a time."""
    with explained(StoreError, f"{address} cannot be listed"):
        filesystem, root = open_filesystem(address)
        infos = filesystem.get_file_info(pyarrow.fs.FileSelector(root))
        folders = (info.base_name for info in infos if info.type == pyarrow.fs.FileType.Directory)
        classes = sorted(name for name in folders if not name.startswith("."))
        files = in_threads(lambda name: _objects(filesystem, root, name), classes)
    return dict(zip(classes, files, strict=True))


def _objects(filesystem: pyarrow.fs.FileSystem, root: str, name: str) -> list[_File]:
    """Return the images and arrays of a class."""
    infos = filesystem.get_file_info(pyarrow.fs.FileSelector(f"{root}/{name}", recursive=True))
    progress()
    objects = (info for info in infos if info.type == pyarrow.fs.FileType.File)
    files = ((info.path.removeprefix(f"{root}/"), info.size) for info in objects)
    return [
        (path, size)
        for path, size in files
        if _suffix(path) in _SUFFIXES and not any(part.startswith(".") for part in path.split("/"))
    ]


_Packed = tuple[tuple[str, ...], list[int], bytes, bytes]
"""Class names, the number of samples of each, and their paths and sizes, compressed for sending."""


def _packed(classes: tuple[str, ...], num: list[int], files: list[_File]) -> _Packed:
    paths, sizes = "\0".join(path for path, _ in files), np.array([size for _, size in files], "<i8")
    return classes, num, zlib.compress(paths.encode()), zlib.compress(sizes.tobytes())


def _unpacked(packed: _Packed) -> tuple[tuple[str, ...], list[int], list[_File]]:
    classes, num, paths, sizes = packed
    names, numbers = zlib.decompress(paths).decode().split("\0"), np.frombuffer(zlib.decompress(sizes), "<i8")
    return classes, num, list(zip(names, numbers.tolist(), strict=True))
