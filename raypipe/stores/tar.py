"""Uncompressed tars as stores: WebDataset's, or of class folders.

`tarfile` scans a tar's headers once, with checks against hostile ones, and samples are then read by position.
Nothing is ever extracted, so members' names have no effect on the disk.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from raypipe.errors import ConfigError, StoreError
from raypipe.storage.files import RemoteFile, look_up, read_json, write_json
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_cache import shared_cache
from raypipe.storage.local_file import OpenFile, locked, make_cache_folder, open_regular
from raypipe.storage.patience import in_threads
from raypipe.stores.addresses import list_files
from raypipe.stores.base import (
    MAX_SAMPLE_BYTES,
    Columns,
    FileStore,
    as_text,
    by_part,
    hash_of_facts,
    join_fingerprints,
    part_of,
)
from raypipe.stores.class_folders import BY_FOLDER, LeftOut, suffix_of, tell_left_out
from raypipe.stores.class_tar import Member, find_files, have_class_folders, index_files
from raypipe.stores.memory_tree import File, Link, MemoryTree, Special
from raypipe.stores.webdataset import TEXT_SUFFIXES, Place, Scan, find_samples, index_samples

_NUM_FETCHES = 4  # tars that are fetched and scanned at a time
# A scan takes about 80 us per member: at most a few seconds for a local tar below this size.
_SMALL_BYTES = 64 << 20
_SCAN_FILE = "tar-8.json"  # name in the cache, with the version of its layout
# Names have up to 4 KiB, extended attributes up to 64 KiB.
_MAX_HEADER_BYTES = 128 << 10
_ENDLESS_NUMBER = re.compile(rb"\d{256}")  # longer than the longest file name


MISSING: Place = (-1, -1, 0.0)
"""The place of a link that leads to no member."""
_KINDS = {tarfile.FIFOTYPE: "a FIFO", tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device"}


class TarStore(FileStore["_Opened"]):
    """A store in one tar, in several, `NAME-{0000..0099}.tar`, or in a folder of `*.tar`, local or remote.

    Members are `key.jpg`, `key.cls`, … , in the order of the tars and of their members, see
    `raypipe.stores.webdataset`; or `class/image.jpg`, in the order of the tars and of their names, see
    `raypipe.stores.class_folders`. Links lead to members of their tar. Hidden files, absolute names and names with
    `..` do not count.

    Remote tars are read through the node's cache, see `storage.local_cache`. Each node fetches and scans all of
    them once; it caches the result, for large local tars too. The fingerprint is a hash over the members' names,
    sizes and modification times. A member over 512 MiB is None.

    Args:
        address: see above, or a URI; a relative path is made absolute, since processes differ in their working
            folder.
        image_column: the suffix of the images; "image" = any image suffix.
        target_column: the suffix of the labels, or their field in the JSON; "label" = `cls`, the field `label`, or
            the suffix `label`; "folder" = the class folders in any case; empty = no label is needed.
    """

    def __init__(self, address: str | Path, image_column: str = "image", target_column: str = "label") -> None:
        super().__init__(address, image_column, target_column)

    def close(self) -> None:
        super().close()
        if self._listing:
            shared_cache().close([archive.file for archive in self._listing])

    def _open(self) -> _Opened:
        archives = self._listing
        if archives is None:
            files = list_files(self.address, lambda name: name.endswith(".tar"), "*.tar")
            archives = in_threads(_find, files)
            if is_remote(self.address):
                self._listing = archives
        scans = in_threads(self._scanned, archives, _NUM_FETCHES)
        opened = _Opened(archives, scans, self._options[1])
        if not self._identity:  # other processes were sent the store by one that said so
            tell_left_out(self.address, len(opened), opened.left_out)
        return opened

    def _scanned(self, archive: _Archive) -> Scan:
        """Return a tar's scan; those of remote and large tars are cached on the node for all its processes."""
        if isinstance(archive.file, RemoteFile):
            version: tuple[Any, ...] = astuple(archive.file)
        else:
            status = os.fstat(archive.file.descriptor)
            if status.st_size < _SMALL_BYTES:
                return self._checked_scan(Path(archive.name), archive.name)
            version = archive.name, status.st_size, status.st_mtime_ns, status.st_ino
        try:
            folder = make_cache_folder("scans")
        except OSError:  # the cache only saves time
            return self._checked_scan(archive.open().path, archive.name)
        kept = folder / f"{hash_of_facts((version, self._options))}-{_SCAN_FILE}"
        with locked(kept.with_suffix(".lock")):  # one process scans, and the others wait
            with contextlib.suppress(ConfigError, KeyError, TypeError):
                return read_json(kept)["scan"]
            scan = self._checked_scan(archive.open().path, archive.name)
            with contextlib.suppress(ConfigError):
                write_json(kept, {"scan": scan})
        return scan

    def _checked_scan(self, path: Path, name: str) -> Scan:
        try:
            return _scan(path, name, *self._options)
        except StoreError:
            raise
        except Exception as error:  # tarfile lets half a dozen types through
            raise StoreError(
                f"{name} cannot be read as tar: {type(error).__name__}: {error!s:.500}; it is compressed, which "
                "allows no random access, truncated, or not a tar: uncompress it, or copy it again"
            ) from error


@dataclass(frozen=True)
class _Archive:
    """A tar. A local tar stays open, so that reads and scan see the same file; a remote one is cached."""

    name: str
    file: OpenFile | RemoteFile

    def open(self) -> OpenFile:
        return self.file if isinstance(self.file, OpenFile) else shared_cache().get(self.file, OpenFile)


class _Opened:
    """The tars of a store, and the index of their samples."""

    groups = None
    classes: tuple[str, ...] | None = None

    def __init__(self, archives: Sequence[_Archive], scans: Sequence[Scan], target_column: str) -> None:
        self._archives = archives
        self._sparse = [scan["sparse"] for scan in scans]
        names, digests = [archive.name for archive in archives], [scan["digest"] for scan in scans]
        self.left_out = sum((LeftOut(scan["left_out"]) for scan in scans), LeftOut())
        if have_class_folders(names, scans):
            indexed = index_files(names, scans, target_column == "label")
            self._index, self.classes, nums = indexed.columns, indexed.classes, indexed.nums
            self.left_out += indexed.left_out
            digests += [indexed.facts] if indexed.facts else []
        else:
            self._index, not_in_all = index_samples(names, scans)
            self.left_out += not_in_all
            nums = [scan["num"] for scan in scans]
        self._bounds = np.cumsum([0, *nums])
        self.columns = tuple(self._index)
        self.fingerprint = join_fingerprints(digests)
        labels = self._index.get("label")
        self.label_is_class = labels is None or (labels.dtype == np.int64 and labels.ndim == 1)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        return {name: self._read(name, indices) for name in columns}

    def _read(self, column: str, indices: np.ndarray) -> Any:
        places = self._index[column]
        if column == "label":
            return places[indices]
        contents: list[bytes | None] = [None] * len(indices)
        for number, positions in by_part(indices, self._bounds):
            archive = self._archives[number]
            file = archive.open()
            for position, place in zip(positions.tolist(), places[indices[positions]].tolist(), strict=True):
                contents[position] = _content(file, archive.name, *place, self._sparse[number])
        return list(map(as_text, contents)) if column in TEXT_SUFFIXES else contents

    def sample_name(self, index: int) -> str:
        archive = self._archives[part_of(self._bounds, index)[0]]
        start = int(self._index["image"][index][0]) - tarfile.BLOCKSIZE
        if start < 0:  # there is no image
            return archive.name
        # A name beyond 100 characters, or in an extended header, is cut off here.
        header = os.pread(archive.open().descriptor, tarfile.BLOCKSIZE, start)
        return f"{archive.name}, {tarfile.TarInfo.frombuf(header, 'utf-8', 'surrogateescape').name}"


def _find(listed: RemoteFile) -> _Archive:
    address = listed.address
    if is_remote(address):
        return _Archive(address, listed.checked(look_up(address)))
    try:
        return _Archive(address, OpenFile(Path(address)))
    except OSError as error:
        raise StoreError(f"{address} cannot be read as tar: {error}; check the path") from error


def _content(
    file: OpenFile, name: str, start: int, num_bytes: int, sparse: Mapping[str, list[list[int]]]
) -> bytes | None:
    """Return the bytes of a member; None for no member, or for more than 512 MiB."""
    if not 0 <= num_bytes <= MAX_SAMPLE_BYTES:
        return None
    # pread does not move the file's position, so threads and forks may share the file.
    parts = sparse.get(str(start)) if sparse else None
    if parts is None:
        content = os.pread(file.descriptor, num_bytes, start)
    else:
        content = _with_holes(file.descriptor, start, num_bytes, parts)
    if len(content) < num_bytes:
        raise StoreError(f"{name} has become shorter than {start + num_bytes} bytes; copy it again")
    return content


def _with_holes(descriptor: int, start: int, num_bytes: int, parts: Sequence[Sequence[int]]) -> bytes:
    """Return the bytes of a sparse member, whose parts are stored one after the other; fewer if one is cut off."""
    content = bytearray(num_bytes)
    for offset, length in parts:
        part = os.pread(descriptor, length, start)
        if len(part) < length:
            return part
        content[offset : offset + length] = part
        start += length
    return bytes(content)


def _member_of(member: tarfile.TarInfo, tree: MemoryTree) -> Member:
    """Return what a member is, with the place of its bytes; a hard link is the file that it names."""
    if member.isdir():
        return None
    if member.islnk():
        return tree.find(str(PurePosixPath(member.linkname))) or File(MISSING)
    if member.issym():
        return Link(member.linkname)
    if not member.isreg():
        return Special(_KINDS.get(member.type, "of an unknown kind"))
    return File((member.offset_data, member.size, member.mtime))


def _parts_of(member: tarfile.TarInfo) -> list[list[int]]:
    """Return offset and length of each part of a sparse member; raise ReadError if they are not in order."""
    parts, end = [], 0
    for offset, length in member.sparse or ():
        if not length:  # tarfile gives unused entries of the header too
            continue
        if length < 0 or offset < end:
            raise tarfile.ReadError(f"a sparse member of wrong parts at byte {member.offset}")
        end = offset + length
        parts.append([offset, length])
    if end > member.size:
        raise tarfile.ReadError(f"a sparse member of more than {member.size} bytes at byte {member.offset}")
    return parts


def _scan(path: Path, name: str, image_column: str, target_column: str) -> Scan:
    """Read all headers of a tar, and its labels."""
    members: list[tuple[str, Member]] = []
    tree, sparse, left_out = MemoryTree(MISSING), dict[str, list[list[int]]](), LeftOut()
    with (
        _HeaderReader(io.FileIO(path, opener=open_regular)) as file,
        tarfile.open(fileobj=file, mode="r:") as tar,
    ):
        start = -1
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # a million of them would take gigabytes
            if member.size < 0 or tar.offset <= start:  # tarfile would loop forever (CVE-2025-8194)
                raise tarfile.ReadError(f"a member of {member.size} bytes at byte {member.offset}")
            start = tar.offset
            member_path = PurePosixPath(member.name)
            if member_path.is_absolute() or ".." in member_path.parts:
                left_out["outside the tar by their names"] += 1
                continue
            if not member_path.parts:  # the folder itself
                continue
            if member.issparse():
                sparse[str(member.offset_data)] = _parts_of(member)
            node = _member_of(member, tree)
            tree.add(str(member_path), node)
            members.append((str(member_path), node))
        # tarfile mistakes a missing or broken header for the end; the real end mark is a block of zeros.
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no valid member and no end mark at byte {tar.offset}")
        scan = _layout_of(name, members, tree, file.fileno(), image_column, target_column)
    return {**scan, "left_out": left_out + LeftOut(scan.get("left_out")), "sparse": sparse}


def _layout_of(
    name: str,
    members: Sequence[tuple[str, Member]],
    tree: MemoryTree,
    descriptor: int,
    image_column: str,
    target_column: str,
) -> Scan:
    """Return a tar's samples, by the layout that all of its members fit."""
    entries = [(path, _place_of(path, node, tree)) for path, node in members]
    arguments = name, entries, descriptor, image_column, target_column
    scan = find_samples(*arguments) if target_column != BY_FOLDER else None
    if scan is None and image_column == "image" and target_column in ("label", BY_FOLDER, ""):
        scan = find_files(name, members, tree)
    if scan is None and not target_column:
        scan = find_samples(*arguments, needs_labels=False)
    if scan is not None and "files" not in scan:
        placeless = (node for (_, node), (_, place) in zip(members, entries, strict=True) if place is None)
        scan["left_out"] += LeftOut(
            node.kind if isinstance(node, Special) else "links to no member" for node in placeless if node
        )
    if scan is None:
        suffixes = sorted({suffix_of(path) for path, place in entries if place} - {""})
        has = f"; its members are {', '.join(suffixes):.200}" if suffixes else ""
        raise StoreError(
            f"{name} has no labels: the layout is class/image.jpg, or WebDataset's pairs key.jpg and key.cls (or "
            f"key.json), or an image and a text for each key{has}. If one of them has the labels, set "
            "store.target_column to its suffix; '' reads images without labels"
        )
    return scan


def _place_of(path: str, node: Member, tree: MemoryTree) -> Place | None:
    """Return the place of a member's bytes, a link's included; None if it has none."""
    file = tree.find(path) if isinstance(node, Link) else node
    return file.value if isinstance(file, File) and file.value != MISSING else None


class _HeaderReader(io.BufferedReader):
    """File object that limits what `tarfile` reads while it scans headers.

    `tarfile` reads the data of an extended header, such as a long name, as a whole, so a damaged size could make
    it read the rest of the file. A number of n digits takes it n² steps (CVE-2024-6232).
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header of {size} bytes at byte {self.tell()}")
        content = super().read(size)
        if size > tarfile.BLOCKSIZE and _ENDLESS_NUMBER.search(content):
            raise tarfile.ReadError(
                f"an extended header at byte {self.tell() - len(content)} contains an endless number"
            )
        return content
