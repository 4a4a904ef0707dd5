"""Class folders of images, `class/image.jpg`, as in torchvision's ImageFolder, local or in an object store."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.filesystem import (
    errors_as,
    is_remote,
    join_address,
    open_filesystem,
)
from raypipe.storage.local_file import file_kind
from raypipe.storage.retries import in_threads, report_progress
from raypipe.stores.addresses import is_left_out
from raypipe.stores.base import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    Columns,
    FileStore,
    hash_of_facts,
)
from raypipe.stores.class_folders import (
    BY_FOLDER,
    FILE,
    FOLDER,
    Entry,
    FileTree,
    Layout,
    LeftOut,
    TreeSample,
    check_classes,
    find_classes,
    tell_left_out,
    words_of,
)
from raypipe.stores.image_files import FileFacts, read_files, written_at
from raypipe.stores.memory_tree import MemoryTree
from raypipe.stores.tables import ListedFiles, as_table

_DEFAULT = "label"


class FolderStore(FileStore["_Images | ListedFiles"]):
    """A store in `root/class/**/file`, by the rules of `raypipe.stores.class_folders`.

    Links are followed. An image that cannot be read, or is over 512 MiB, is None.

    In an object store, the process that opens the store first lists the folder and sends the listing to the
    others; an object whose size has changed since then raises StoreError. The fingerprint is a hash over the class
    names and the files' relative paths and sizes, for local and remote folders.

    Args:
        address: the root, a path or a URI.
        target_column: "label" = the class folders, unless other files belong to images by their names; "folder" =
            the class folders in any case; empty = no label is needed, so images may also be in no folder; or a
            pattern that finds the labels in the names of images in no folder, see `raypipe.stores.tables`.
    """

    def __init__(self, address: str | Path, target_column: str = _DEFAULT) -> None:
        super().__init__(address, target_column)
        is_other = target_column not in (_DEFAULT, BY_FOLDER, "")
        if is_other and "(?P<" not in target_column:
            raise ConfigError(
                f"target_column={target_column!r}: {address} is a folder of images, whose labels are its class "
                "folders: leave target_column out, or set it to '' for no target, or to a pattern of the names: "
                r"'(?P<label>\d+)_'"
            )

    def _open(self) -> _Images | ListedFiles:
        (target_column,) = self._options
        if self._listing is not None:
            return _Images(self.address, *self._listing)
        tree: FileTree = _Disk(self.address)
        version = ""
        if is_remote(self.address):
            tree, version = _list_objects(self.address)
        try:
            layout = find_classes([tree], self.address)
        except OSError as error:
            raise StoreError(f"{self.address} cannot be scanned: {error}") from error
        if "(?P<" in target_column:
            return self._labeled_by(target_column, layout)
        classes, samples = self._samples(layout)
        # plain lists are sent faster
        labels, paths, sizes = map(list, zip(*samples, strict=True))
        listing = classes, labels, paths, sizes, version
        if version:
            self._listing = listing
        return _Images(self.address, *listing)

    def _labeled_by(self, pattern: str, layout: Layout) -> ListedFiles:
        """Return the images in no folder, whose labels a pattern finds in their names."""
        images = [path for _, path, _ in layout.flat]
        if not images:
            raise StoreError(
                f"{self.address} has no images outside of folders, in whose names target_column={pattern!r:.100} "
                "would find labels: choose a folder of images"
            )
        if not self._identity:
            in_folders = +LeftOut({"in folders": layout.num_samples})
            tell_left_out(self.address, len(images), in_folders)
        rows = pa.table({"path": images})
        with as_table(self.address):
            return ListedFiles(f"{self.address}/", rows, images, "path", pattern)

    def _samples(
        self, layout: Layout
    ) -> tuple[tuple[str, ...] | None, list[TreeSample]]:
        """Return class names, and the samples in order."""
        (target_column,) = self._options
        (samples,) = layout.samples
        if not samples and layout.flat and not target_column:
            return None, layout.flat
        if not samples:
            raise StoreError(_nothing(self.address, layout))
        told = check_classes(self.address, target_column, layout)
        if not self._identity:
            # other processes were sent the store by one that said so
            tell_left_out(self.address, len(samples), layout.left_out, *told)
        return layout.classes, samples


def _nothing(address: str, layout: Layout) -> str:
    """Return the error about a folder without class folders."""
    if layout.flat:
        return (
            f"{address} has {len(layout.flat):,} images and no class folders with images: put the images of each "
            f"class into a folder of its own, such as {address}/cat/{layout.flat[0].path}, or set "
            "store.target_column to '' to read them without labels, or to a pattern of the labels in their names, "
            r"such as '(?P<label>\d+)_'"
        )
    content = f"; it has {words_of(layout.left_out)}" if layout.left_out else ""
    return (
        f"{address} has no class folders with images ({', '.join(sorted(IMAGE_SUFFIXES))}), nor with "
        f"arrays ({ARRAY_SUFFIX}): the layout is root/class/image.jpg{content}. "
        f"A store in tars is {address}/*.tar, in quotes"
    )


class _Images(FileFacts):
    """Contents of a folder: class names, and each sample's path from the root, size and label."""

    groups = None

    def __init__(
        self,
        root: str,
        classes: tuple[str, ...] | None,
        labels: Sequence[int],
        paths: Sequence[str],
        sizes: Sequence[int],
        version: str,
    ) -> None:
        self._root = root
        self._version = version
        self.classes = classes
        fields = {"image": pa.binary()}
        if classes is not None:
            fields["label"] = pa.int64()
        self.schema = pa.schema(fields)
        self._labels = np.array(labels, np.int64)
        self._paths = paths
        # -1 for a local file, whose size is read only when needed
        self._sizes = np.array(sizes, np.int64)
        self.identity = hash_of_facts((classes, self._paths))

    def __len__(self) -> int:
        return len(self._paths)

    def look(self) -> list[tuple[int, ...]]:
        """Look at all local files; remote ones were listed."""
        if self._version:
            return [(size,) for size in self._sizes.tolist()]
        return [written_at(f"{self._root}/{path}") for path in self._paths]

    @property
    def written(self) -> str:
        """See `FileStore.written`."""
        return self._version or super().written

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        images = None
        if "image" in columns:
            addresses = [self.sample_name(index) for index in indices.tolist()]
            images = read_files(addresses, self._sizes[indices].tolist())
        table = {}
        if "label" in columns:
            table["label"] = self._labels[indices]
        return Columns(images, pa.table(table))

    def names(self, indices: np.ndarray) -> list[str]:
        """Return the paths of samples from the root."""
        return [self._paths[index] for index in indices.tolist()]

    def sample_name(self, index: int) -> str:
        """Return a sample's path or URI."""
        return join_address(self._root, *self._paths[index].split("/"))


# On a disk


class _Disk:
    """The tree of a local folder; see `raypipe.stores.class_folders.FileTree`."""

    def __init__(self, root: str) -> None:
        self._root = root

    def entries(self, folder: str) -> Iterator[Entry]:
        with os.scandir(f"{self._root}/{folder}") as entries:
            for entry in entries:
                yield Entry(entry.name, _kind(entry), -1)

    def identity(self, folder: str) -> Hashable:
        status = Path(f"{self._root}/{folder}").stat()
        return status.st_dev, status.st_ino


def _kind(entry: os.DirEntry[str]) -> str:
    """Return the kind of a folder's entry, or of a link's target."""
    try:
        # The listing has the kind, which saves a system call for each of a million files.
        if entry.is_file():
            return FILE
        if entry.is_dir():
            return FOLDER
        return file_kind(entry.stat().st_mode)
    except OSError:  # a broken link is a sample that cannot be read
        return FILE


# In an object store


def _list_objects(address: str) -> tuple[MemoryTree, str]:
    """List a folder of the object store: its top, then the objects of several of its folders at a time.

    Returns:
        Its files, and a hash of what changes when one is replaced: their sizes and times.
    """
    infos = list[pyarrow.fs.FileInfo]()
    with errors_as(StoreError, f"{address} cannot be listed"):
        filesystem, root = open_filesystem(address)
        folders = [root]
        while len(folders) == 1:  # a folder around the classes, such as train/
            of_top = filesystem.get_file_info(pyarrow.fs.FileSelector(folders[0]))
            infos += of_top
            folders = [
                info.path
                for info in of_top
                if info.type == pyarrow.fs.FileType.Directory
                and not is_left_out(info.base_name)
            ]
        for below in in_threads(lambda folder: _objects(filesystem, folder), folders):
            infos += below
    tree = MemoryTree(missing=0)
    for info in infos:
        kind = FILE if info.type == pyarrow.fs.FileType.File else FOLDER
        tree.add(Entry(info.path.removeprefix(f"{root}/"), kind, info.size))
    written = sorted((info.path, info.size, info.mtime_ns) for info in infos)
    return tree, hash_of_facts(written)


def _objects(
    filesystem: pyarrow.fs.FileSystem, folder: str
) -> list[pyarrow.fs.FileInfo]:
    infos = filesystem.get_file_info(pyarrow.fs.FileSelector(folder, recursive=True))
    report_progress()
    return infos
