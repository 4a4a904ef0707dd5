"""Scans of uncompressed tars: their samples, and where each member's bytes are.

`tarfile` reads a tar's headers once, with checks against hostile ones. Nothing is ever extracted, so members'
names have no effect on the disk.
"""

from __future__ import annotations

import io
import re
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from raypipe.errors import StoreError
from raypipe.stores.class_folders import BY_FOLDER, LeftOut, suffix_of
from raypipe.stores.class_tar import find_files
from raypipe.stores.memory_tree import Link, MemoryTree, Node, Special, TreeFile
from raypipe.stores.webdataset import MISSING, Place, Read, Scan, find_samples

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


def _member_of(member: tarfile.TarInfo, tree: MemoryTree) -> Node:
    """Return what a member is, with the place of its bytes; a hard link is the file that it names."""
    if member.isdir():
        return None
    if member.islnk():
        return tree.find(str(PurePosixPath(member.linkname))) or TreeFile(MISSING)
    if member.issym():
        return Link(member.linkname)
    if not member.isreg():
        return Special(_KINDS.get(member.type, "of an unknown kind"))
    modified = zlib.crc32(repr(member.mtime).encode())
    return TreeFile((member.offset_data, member.size, modified))


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
    members: list[tuple[str, Node]] = []
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
            node = _member_of(member, tree)
            tree.add(str(member_path), node)
            members.append((str(member_path), node))
        # tarfile mistakes a missing or broken header for the end; the real end mark is a block of zeros.
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(
                f"no valid member and no end mark at byte {tar.offset}"
            )
        scan = layout_of(name, members, tree, read, image_column, target_column)
    return scan._replace(left_out=left_out + scan.left_out, sparse=sparse)


def layout_of(
    name: str,
    members: Sequence[tuple[str, Node]],
    tree: MemoryTree,
    read: Read,
    image_column: str,
    target_column: str,
) -> Scan:
    """Return the samples of a tar or a zip, by the layout that all of its members fit.

    Args:
        members: names and nodes, in order; `tree` has the same.
    """
    entries = [(path, _place_of(path, node, tree)) for path, node in members if node]
    arguments = name, entries, read, image_column, target_column
    scan = find_samples(*arguments) if target_column != BY_FOLDER else None
    if (
        scan is None
        and image_column == "image"
        and target_column in ("label", BY_FOLDER, "")
    ):
        scan = find_files(name, members, tree)
    if scan is None and not target_column:
        scan = find_samples(*arguments, needs_labels=False)
    if scan is None:
        suffixes = sorted(
            {suffix_of(path) for path, place in entries if not isinstance(place, str)}
            - {""}
        )
        has = f"; its members are {', '.join(suffixes):.200}" if suffixes else ""
        raise StoreError(
            f"{name} has no labels: the layout is class/image.jpg, or WebDataset's pairs key.jpg and key.cls (or "
            f"key.json), or an image and a text for each key{has}. If one of them has the labels, set "
            "store.target_column to its suffix; '' reads images without labels"
        )
    return scan


def _place_of(
    path: str, node: TreeFile | Link | Special, tree: MemoryTree
) -> Place | str:
    """Return the place of a member's bytes, a link's included; if there are none, the kind of member in words."""
    if isinstance(node, Special):
        return node.kind
    file = tree.find(path) if isinstance(node, Link) else node
    if file is None or file.value == MISSING:
        return "links to no member"
    place: Place = file.value
    return place


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
