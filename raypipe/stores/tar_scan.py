"""Scans of uncompressed tars: their samples, and where each member's bytes are.

`tarfile` reads a tar's headers once, with checks against hostile ones. Nothing is ever extracted, so members'
names have no effect on the disk.
"""

from __future__ import annotations

import io
import re
import tarfile
import zlib
from pathlib import PurePosixPath
from typing import Any

from raypipe.errors import StoreError
from raypipe.stores.class_folders import FILE, FOLDER, LINK, Entry, LeftOut
from raypipe.stores.memory_tree import MemoryTree
from raypipe.stores.tar_layouts import layout_of
from raypipe.stores.webdataset import MISSING, Place, Read, Scan

# Names have up to 4 KiB, extended attributes up to 64 KiB.
_MAX_HEADER_BYTES = 128 << 10
_ENDLESS_NUMBER = re.compile(rb"\d{256}")  # longer than the longest file name

_KINDS = {
    tarfile.FIFOTYPE: "a FIFO",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
}


def scan_tar(
    content: io.RawIOBase, read: Read, name: str, image_column: str, target_column: str
) -> Scan:
    """Return a tar's samples, and where their bytes are.

    Args:
        content: the tar, whose headers are read in order.
        read: reads the labels.
        name: its name, for errors.
        image_column, target_column: see `raypipe.stores.tar.TarStore`.

    Raises:
        StoreError: it is not a tar, is damaged, or has no samples.
    """
    try:
        return _scan(content, read, name, image_column, target_column)
    except (StoreError, UnfitError):
        raise
    except Exception as error:  # tarfile lets half a dozen types through
        raise StoreError(
            f"{name} cannot be read as tar: {type(error).__name__}: {error!s:.500}; it is compressed, and must "
            "then be named *.tar.gz, *.tar.bz2 or *.tar.xz, truncated, or not a tar: copy it again"
        ) from error


class UnfitError(Exception):
    """A tar's headers are too close together to be read one by one."""


def _entry_of(path: str, member: tarfile.TarInfo, tree: MemoryTree) -> Entry:
    """Return a member, with the place of its bytes; a hard link is the file that it names."""
    if member.isdir():
        return Entry(path, FOLDER, MISSING)
    if member.islnk():
        return Entry(path, FILE, tree.find(str(PurePosixPath(member.linkname))))
    if member.issym():
        return Entry(path, f"{LINK}{member.linkname}", MISSING)
    if not member.isreg():
        return Entry(path, _KINDS.get(member.type, "of an unknown kind"), MISSING)
    modified = zlib.crc32(repr(member.mtime).encode())
    place: Place = (member.offset_data, member.size, modified)
    return Entry(path, FILE, place)


def _parts_of(member: tarfile.TarInfo) -> list[list[int]]:
    """Return offset and length of each part of a sparse member; raise ReadError if they do not fit it."""
    parts: list[list[int]] = []
    end = 0
    stored: Any = member.sparse  # pairs, unlike what its annotation says
    for offset, length in stored or ():
        if not length:  # tarfile gives unused entries of the header too
            continue
        if length < 0 or offset < end or offset + length > member.size:
            raise tarfile.ReadError(
                f"a sparse member of wrong parts at byte {member.offset}"
            )
        end = offset + length
        parts.append([offset, length])
    return parts


def _scan(
    content: io.RawIOBase, read: Read, name: str, image_column: str, target_column: str
) -> Scan:
    """Read all headers of a tar, and its labels."""
    members: list[Entry] = []
    tree = MemoryTree(MISSING)
    sparse = dict[str, list[list[int]]]()
    left_out = LeftOut()
    with (
        _HeaderReader(content) as file,
        tarfile.open(fileobj=file, mode="r:") as tar,
    ):
        start = -1
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # a million of them would take gigabytes
            if member.size < 0 or tar.offset <= start:
                # tarfile would loop forever (CVE-2025-8194)
                raise tarfile.ReadError(
                    f"a member of {member.size} bytes at byte {member.offset}"
                )
            start = tar.offset
            member_path = PurePosixPath(member.name)
            if member_path.is_absolute() or ".." in member_path.parts:
                left_out["outside the tar by their names"] += 1
                continue
            if not member_path.parts:  # the folder itself
                continue
            if member.issparse():
                sparse[str(member.offset_data)] = _parts_of(member)
            entry = _entry_of(str(member_path), member, tree)
            tree.add(entry)
            members.append(entry)
        # tarfile mistakes a missing or broken header for the end; the real end mark is a block of zeros.
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(
                f"no valid member and no end mark at byte {tar.offset}"
            )
        scan = layout_of(name, members, tree, read, image_column, target_column)
    left_out.update(scan.left_out)
    return scan._replace(left_out=left_out, sparse=sparse)


class _HeaderReader(io.BufferedReader):
    """File object that limits what `tarfile` reads while it scans headers.

    `tarfile` reads the data of an extended header, such as a long name, as a whole, so a damaged size could make
    it read the rest of the file. A number of n digits takes it n² steps (CVE-2024-6232).
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(
                f"an extended header of {size} bytes at byte {self.tell()}"
            )
        content = super().read(size)
        if size > tarfile.BLOCKSIZE and _ENDLESS_NUMBER.search(content):
            raise tarfile.ReadError(
                f"an extended header at byte {self.tell() - len(content)} contains an endless number"
            )
        return content
