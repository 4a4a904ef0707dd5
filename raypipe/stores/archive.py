"""What stores of archives, tar and zip, have in common: the files, local or remote, reads by an index, and class
folders, `class/image.jpg`.

One scan finds what is in an archive; samples are then read by position. Nothing is ever extracted, so what the
members' names say has no effect on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import RemoteFile, look_up, read_json, write_json
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_cache import shared_cache
from raypipe.storage.local_file import locked, make_cache_folder, open_regular
from raypipe.storage.patience import Threads
from raypipe.stores.addresses import list_files
from raypipe.stores.base import (
    ARRAY_SUFFIX,
    IMAGE_SUFFIXES,
    Columns,
    FileStore,
    as_text,
    by_part,
    join_fingerprints,
    part_of,
)

_NUM_REQUESTS = 16  # under way at a time; a store may have thousands of objects
_NUM_FETCHES = 4  # archives that are fetched and scanned at a time
# A scan takes some 80 us for each member: of a local archive below this size, a few seconds at most.
_SMALL_BYTES = 64 << 20

Scan = dict[str, Any]
"""What a scan finds, as JSON has it. Of class folders {"members": {name: [position, num_bytes, …]}}, with what
else tells a member's content from another's: its time, or checksum."""


@dataclass(frozen=True)
class Index:
    """The samples of one archive or of several, one archive after the other.

    Attributes:
        columns: image and label first. Labels are int64 of shape (N,). Other columns hold places, int64 of shape
            (N, k): position and num_bytes of each sample's member, -1 if it has none, and further numbers of this
            kind of archive.
        texts: the columns that are text.
        classes: class names, position = label; None if they have no names.
        bounds: int64 of shape (num_archives + 1,): the first sample of each archive, and N.
        fingerprint: 32 hex digits.
    """

    columns: dict[str, np.ndarray]
    texts: frozenset[str]
    classes: tuple[str, ...] | None
    bounds: np.ndarray
    fingerprint: str


class OpenFile:
    """An archive, open for reading; it closes with the object."""

    def __init__(self, path: Path) -> None:
        self.descriptor = open_regular(path)
        self.path = Path(f"/dev/fd/{self.descriptor}")  # the cache may have removed the other by now
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True)
class _Archive:
    """One archive. A local one stays open, so that it is the one that was scanned; a remote one is cached."""

    name: str
    file: OpenFile | RemoteFile

    def open(self) -> OpenFile:
        return self.file if isinstance(self.file, OpenFile) else shared_cache().get(self.file, OpenFile)


class _Opened:
    """The archives of a store, and what is in them; see `FileStore`."""

    groups = None

    def __init__(self, kind: type[ArchiveStore], archives: list[_Archive], index: Index) -> None:
        self._kind, self._archives, self._index = kind, archives, index
        self.columns, self.classes, self.fingerprint = tuple(index.columns), index.classes, index.fingerprint
        labels = index.columns.get("label")
        self.label_is_class = labels is None or (labels.dtype == np.int64 and labels.ndim == 1)

    def __len__(self) -> int:
        return int(self._index.bounds[-1])

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        return {name: self._read(name, indices) for name in columns}

    def _read(self, column: str, indices: np.ndarray) -> Any:
        places = self._index.columns[column]
        if column == "label":
            return places[indices]
        contents: list[bytes | None] = [None] * len(indices)
        for number, positions in by_part(indices, self._index.bounds):
            archive = self._archives[number]
            file = archive.open()
            for position, place in zip(positions.tolist(), places[indices[positions]].tolist(), strict=True):
                contents[position] = self._kind.content(file, archive.name, place)
        return list(map(as_text, contents)) if column in self._index.texts else contents

    def sample_name(self, index: int) -> str:
        archive = self._archives[part_of(self._index.bounds, index)[0]]
        place = self._index.columns["image"][index].tolist()
        return f"{archive.name}, {self._kind.member(archive.open(), place)}"


class ArchiveStore(FileStore[_Opened]):
    """A store in archives, `NAME-{0000..0099}.SUFFIX`, one file, or a folder of them, local or remote.

    Remote archives are read through the node's cache, see `storage.local_cache`. Each node fetches and scans
    all of them once; the result stays in its cache, as it does for large local ones. The fingerprint is a hash
    over the members' names, sizes, and modification times or checksums. A member over 512 MiB is None.

    Args:
        address: see above, or a URI; a relative path is made absolute, since other processes have other folders.
        options: strings that the scan depends on.
    """

    suffix: ClassVar[str]
    index_file: ClassVar[str]  # in the cache; another layout gets another number
    advice: ClassVar[str]  # what a file may be that cannot be scanned, and what to do

    def close(self) -> None:
        super().close()
        if self._found:
            shared_cache().close([archive.file for archive in self._found])

    @abstractmethod
    def _scan(self, path: Path, name: str) -> Scan:
        """What is in an archive; name is for errors. It may raise anything."""

    @abstractmethod
    def _index(self, names: Sequence[str], scans: Sequence[Scan]) -> Index:
        """The index of all archives."""

    @staticmethod
    @abstractmethod
    def content(file: OpenFile, name: str, place: list[int]) -> bytes | None:
        """What is at a place of `Index.columns`; None if it is damaged or over 512 MiB."""

    @staticmethod
    @abstractmethod
    def member(file: OpenFile, place: list[int]) -> str:
        """The name of what is at a place of `Index.columns`, for errors."""

    def _open(self) -> _Opened:
        archives = self._found
        if archives is None:
            files = list_files(self.address, lambda name: name.endswith(self.suffix), f"*{self.suffix}")
            with Threads(_NUM_REQUESTS) as pool:
                archives = list(pool.map(_find, files))
            if is_remote(self.address):
                self._found = archives
        with Threads(_NUM_FETCHES) as pool:
            scans = list(pool.map(self._scanned, archives))
        return _Opened(type(self), archives, self._index([archive.name for archive in archives], scans))

    def _scanned(self, archive: _Archive) -> Scan:
        """What is in an archive. Scans of remote and of large ones are kept on the node, for all its processes."""
        state: list[Any] = list(self._options)
        lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if isinstance(archive.file, RemoteFile):
            index = shared_cache().folder_of(archive.file) / self.index_file
        else:
            found = os.fstat(archive.file.descriptor)
            state += [found.st_size, found.st_mtime_ns, found.st_ino]
            try:
                folder = make_cache_folder("scans") if found.st_size >= _SMALL_BYTES else None
            except OSError:  # it is for speed alone
                folder = None
            if folder is None:
                return self._checked_scan(Path(archive.name), archive.name)
            name = hashlib.blake2b(os.fsencode(archive.name), digest_size=16).hexdigest()
            index = folder / f"{name}-{self.index_file}"
            lock = locked(index.with_suffix(".lock"))  # one process scans, and the others wait
        with lock:
            with contextlib.suppress(ConfigError, KeyError, TypeError):
                kept = read_json(index)
                if kept["state"] == state:
                    return kept["found"]
            scan = self._checked_scan(archive.open().path, archive.name)
            with contextlib.suppress(ConfigError):
                write_json(index, {"state": state, "found": scan})
        return scan

    def _checked_scan(self, path: Path, name: str) -> Scan:
        try:
            return self._scan(path, name)
        except StoreError:
            raise
        except Exception as error:  # tarfile and zipfile let half a dozen types through
            reason = f"{type(error).__name__}: {error!s:.500}; it is {self.advice}"
            raise StoreError(f"{name} cannot be read as {self.suffix[1:]}: {reason}") from error


def _find(listed: RemoteFile) -> _Archive:
    address = listed.address
    if is_remote(address):
        return _Archive(address, listed.checked(look_up(address)))
    try:
        return _Archive(address, OpenFile(Path(address)))
    except OSError as error:
        raise StoreError(
            f"{address} cannot be read as {Path(address).suffix[1:]}: {error}; check the path"
        ) from error


def is_visible(name: PurePosixPath) -> bool:
    """Whether a member counts: hidden members, absolute names and names that lead out of the folder do not."""
    return not name.is_absolute() and not any(part.startswith(".") or part == "__MACOSX" for part in name.parts)


def is_sample(name: PurePosixPath, suffixes: Collection[str] = IMAGE_SUFFIXES) -> bool:
    """Whether a member may be a sample of class folders."""
    return name.suffix.lower() in suffixes and is_visible(name)


def sample_suffixes(names: Iterable[str]) -> Collection[str]:
    """Those of an archive's samples: of images, or, where it has none, of arrays."""
    return IMAGE_SUFFIXES if any(is_sample(PurePosixPath(name)) for name in names) else {ARRAY_SUFFIX}


def index_class_folders(address: str, scans: Sequence[Scan], num: int, hint: str = "") -> Index:
    """The index of archives of class folders: samples are sorted by archive, by class, then by name.

    The first `num` numbers of a member become its place; `hint` is what else such archives may hold, for errors.
    """
    shards = [scan["members"] for scan in scans]
    shared = [name.split("/") for members in shards for name in members if "/" in name]
    if not shared:
        where = "only images at its top, so their labels are unknown" if any(shards) else "no images"
        raise StoreError(f"{address} has {where}: the layout is class/image.jpg, maybe below common folders{hint}")
    depth = 0
    # A folder that all share is a wrapper such as `train/`, as long as a class folder is left below it.
    while len({names[depth] for names in shared}) == 1 and min(map(len, shared)) > depth + 2:
        depth += 1
    found = [sorted((name.split("/")[depth], name) for name in members if "/" in name) for members in shards]
    classes = tuple(sorted({label for samples in found for label, _ in samples}))
    class_labels = {name: label for label, name in enumerate(classes)}
    pairs = list(zip(shards, found, strict=True))
    places = [members[name][:num] for members, samples in pairs for _, name in samples]
    labels = [class_labels[label] for samples in found for label, _ in samples]
    return Index(
        columns={"image": np.array(places, np.int64), "label": np.array(labels, np.int64)},
        texts=frozenset(),
        classes=classes,
        bounds=np.cumsum([0] + [len(samples) for samples in found]),
        fingerprint=join_fingerprints([_fingerprint(members, samples) for members, samples in pairs]),
    )


def _fingerprint(members: dict[str, list[float]], samples: list[tuple[str, str]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for _, name in samples:
        line = "\0".join(map(str, (name, *members[name][1:])))
        digest.update(f"{line}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
