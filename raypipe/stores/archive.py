"""What stores of archives, tar and zip, have in common: the files, local or remote, and reads by an index."""

from __future__ import annotations

import contextlib
import hashlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.file_lock import locked
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_cache import make_cache_folder, shared_cache
from raypipe.storage.local_file import open_regular
from raypipe.storage.remote_file import RemoteFile, look_up_all
from raypipe.storage.whole_file import read_json, write_json
from raypipe.stores.addresses import list_files
from raypipe.stores.base import Columns
from raypipe.stores.checks import check_columns, check_indices, part_of
from raypipe.stores.members import Index
from raypipe.stores.remote import list_shards

_NUM_FETCHES = 4  # archives that are fetched and scanned at a time
# A scan takes some 80 us for each member: of a local archive below this size, a few seconds at most.
_SMALL_BYTES = 64 << 20

S = TypeVar("S")  # what a scan finds


class OpenFile:
    """An archive, open for reading; it closes with the object."""

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def state(self) -> list[int]:
        """Another one after every change: bytes, time of the change, number of the file."""
        found = os.fstat(self.descriptor)
        return [found.st_size, found.st_mtime_ns, found.st_ino]


class _LocalArchive:
    """An archive on this machine; it stays open, so that it is the one that was scanned."""

    def __init__(self, path: str, suffix: str) -> None:
        self.name = path
        try:
            self._file = OpenFile(Path(path))
        except OSError as error:
            raise StoreError(f"{path} cannot be read as {suffix[1:]}: {error}; check the path") from error

    def use(self) -> contextlib.AbstractContextManager[OpenFile]:
        return contextlib.nullcontext(self._file)


class _RemoteArchive:
    """An archive in an object store, read through the node's cache."""

    def __init__(self, file: RemoteFile) -> None:
        self.name, self.file = file.address, file

    def use(self) -> contextlib.AbstractContextManager[OpenFile]:
        return shared_cache().use(self.file, OpenFile)


class ArchiveStore(ABC, Generic[S]):
    """A store in archives, `NAME-{0000..0099}.SUFFIX`, one file, or a folder of them, local or remote.

    Remote archives are read through the node's cache, see `storage.local_cache`. Each node fetches and scans
    all of them once; what was found stays in its cache, as it does of local ones that are not small.

    Args:
        address: see above, or a URI; a relative path is made absolute, since other processes have other folders.
        files: of a remote store, as they were found by who opened it first; None = they are looked for.
    """

    suffix: ClassVar[str]
    index_file: ClassVar[str]  # in the cache; another layout gets another number

    def __init__(self, address: str | Path, files: list[RemoteFile] | None = None) -> None:
        self.address = str(address) if is_remote(address) else str(Path(address).absolute())
        self._files = files
        self._opened: tuple[Sequence[_LocalArchive | _RemoteArchive], Index] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._open()[1].types)

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self._open()[1].classes

    @property
    def groups(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        """Hash over the members' names, sizes, and times of change or checksums."""
        return self._open()[1].fingerprint

    def __len__(self) -> int:
        return int(self._open()[1].bounds[-1])

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples, see `Store.read`. A member over 512 MiB is None; numbers that are damaged are 0."""
        index = self._open()[1]
        wanted = check_indices(indices, len(self), self.address)
        check_columns(columns, index.types, self.address)
        result: Columns = {}
        for name in columns:
            if name == "label":
                assert index.labels is not None
                result[name] = index.labels[wanted]
            else:
                result[name] = _values(self._contents(index, name, wanted), index.types[name])
        return result

    def sample_name(self, index: int) -> str:
        """A sample's archive, and its image's member in it."""
        archives, found = self._open()
        archive = archives[part_of(found.bounds, index)[0]]
        with archive.use() as file:
            return f"{archive.name}, {self._member(file, found.places['image'][index].tolist())}"

    def close(self) -> None:
        self._opened = None
        if self._files:
            shared_cache().close(self._files)

    @abstractmethod
    def _scan(self, path: Path, name: str) -> S:
        """What is in an archive; name is for errors."""

    @abstractmethod
    def _index(self, names: Sequence[str], scans: Sequence[S]) -> Index:
        """The index of all archives."""

    @abstractmethod
    def _content(self, file: OpenFile, name: str, place: list[int]) -> bytes | None:
        """What is at a place of `Index.places`."""

    @abstractmethod
    def _member(self, file: OpenFile, place: list[int]) -> str:
        """The name of what is at a place of `Index.places`, for errors."""

    @abstractmethod
    def _to_json(self, scan: S) -> dict[str, Any]: ...

    @abstractmethod
    def _of_json(self, content: dict[str, Any]) -> S:
        """The reverse; KeyError, TypeError or ValueError where it is damaged, or was made by other options."""

    def _open(self) -> tuple[Sequence[_LocalArchive | _RemoteArchive], Index]:
        if self._opened is None:
            archives = self._archives()
            with ThreadPoolExecutor(_NUM_FETCHES) as pool:
                scans = list(pool.map(self._scanned, archives))
            self._opened = archives, self._index([archive.name for archive in archives], scans)
        return self._opened

    def _archives(self) -> Sequence[_LocalArchive | _RemoteArchive]:
        if is_remote(self.address):
            if self._files is None:
                listed = list_shards(self.address, self.suffix)
                found = look_up_all([shard.address for shard in listed])
                self._files = [shard.checked(file) for shard, file in zip(listed, found, strict=True)]
            return [_RemoteArchive(file) for file in self._files]
        paths = list_files(self.address, lambda name: name.endswith(self.suffix), f"*{self.suffix}")
        return [_LocalArchive(each, self.suffix) for each in paths]

    def _scanned(self, archive: _LocalArchive | _RemoteArchive) -> S:
        """What is in an archive; of a remote one by an earlier scan, which outlives the archive in the cache."""
        if isinstance(archive, _LocalArchive):
            return self._scanned_here(archive)
        index = shared_cache().folder_of(archive.file) / self.index_file
        found = self._earlier(index, [])
        if found is None:
            with archive.use() as file:
                found = self._scan(file.path, archive.name)
            write_json(index, self._to_json(found))
        return found

    def _scanned_here(self, archive: _LocalArchive) -> S:
        """Of a large one, one of the node's processes scans, and the others wait for what it has found."""
        with archive.use() as file:
            state = file.state
        if state[0] < _SMALL_BYTES:
            return self._scan(Path(archive.name), archive.name)
        try:
            folder = make_cache_folder("scans")
        except OSError:  # it is for speed alone
            return self._scan(Path(archive.name), archive.name)
        key = hashlib.blake2b(os.fsencode(archive.name), digest_size=16).hexdigest()
        index = folder / f"{key}-{self.index_file}"
        with locked(index.with_suffix(".lock")):
            found = self._earlier(index, state)
            if found is None:
                found = self._scan(Path(archive.name), archive.name)
                with contextlib.suppress(ConfigError):
                    write_json(index, {"state": state, **self._to_json(found)})
        return found

    def _earlier(self, index: Path, state: list[int]) -> S | None:
        """What an earlier scan has found, of an archive in the same state."""
        try:
            content = read_json(index)
            return self._of_json(content) if content.get("state", []) == state else None
        except (ConfigError, AttributeError, KeyError, TypeError, ValueError):
            return None

    def _contents(self, index: Index, column: str, wanted: np.ndarray) -> list[bytes | None]:
        """The members of a column, read archive by archive."""
        archives = self._open()[0]
        contents: list[bytes | None] = [None] * len(wanted)
        order = np.argsort(wanted, kind="stable")
        parts = np.searchsorted(wanted[order], index.bounds)
        for number in np.flatnonzero(np.diff(parts)).tolist():
            with archives[number].use() as file:
                for position in order[parts[number] : parts[number + 1]].tolist():
                    place = index.places[column][wanted[position]].tolist()
                    contents[position] = self._content(file, archives[number].name, place)
        return contents


def _values(contents: list[bytes | None], kind: str) -> Any:
    """Members as the values of a column."""
    if kind == "binary":
        return contents
    if kind == "string":
        return [None if content is None else _text(content) for content in contents]
    return np.array([_number(content, kind) for content in contents], dtype=kind)


def _text(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def _number(content: bytes | None, kind: str) -> Any:
    try:
        return (np.int64 if kind == "int64" else np.float64)((content or b"0").decode()[:64])
    except (ValueError, OverflowError):
        return 0
