"""Uncompressed tars and zips, as stores; what both have in common is in `raypipe.stores.archive`.

A scan of a tar's headers, or of a zip's central directory, by `tarfile` and `zipfile`, trusts nothing in them.
"""

from __future__ import annotations

import io
import os
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular
from raypipe.stores.archive import (
    ArchiveStore,
    Index,
    OpenFile,
    Scan,
    index_class_folders,
    is_sample,
    sample_suffixes,
)
from raypipe.stores.base import MAX_SAMPLE_BYTES
from raypipe.stores.webdataset import Place, find_samples, index_samples

# Of a tar, names are up to 4 KiB, extended attributes up to 64 KiB.
_MAX_HEADER_BYTES = 128 << 10
_ENDLESS_NUMBER = re.compile(rb"\d{256}")  # more than a file name may be long

# Of a zip of two million files; `zipfile` takes some 700 bytes for each while it reads.
_MAX_DIRECTORY_BYTES = 256 << 20
_ENCRYPTED = 0x1 | 0x40 | 0x2000  # bits of a member's flags: by password, strongly, directory and all
_LOCAL_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<26xHH")  # length of the name, and of the extra field


class TarStore(ArchiveStore):
    """A store in one tar, in several, `NAME-{0000..0099}.tar`, or in a folder of `*.tar`; see `ArchiveStore`.

    Class folders: members `class/image.jpg`. Classes are the folders that hold images, in the order of their
    names; samples are sorted by shard, by class, then by member name. Of members of a tar with one name, the last
    counts, as in extraction. Links, hidden files, absolute names and names with `..` do not count.

    WebDataset: members `key.jpg`, `key.cls`, … , see `raypipe.stores.webdataset`. Samples are in the order of the
    tars and of their members. A tar is of this layout if any sample has a label as it has them, or if text or JSON
    stands beside every image.

    Args:
        address: see `ArchiveStore`.
        image_column: of WebDataset: the suffix of the images; "image" = any that is one of images.
        label_column: of WebDataset: the suffix of the labels, or their field in the JSON; "label" = `cls`, or the
            field `label`.
    """

    suffix = ".tar"
    index_file = "tar-5.json"
    advice = "compressed, which allows no random access, or truncated or no tar: uncompress it, or copy it again"

    def __init__(self, address: str | Path, image_column: str = "image", label_column: str = "label") -> None:
        super().__init__(address, image_column, label_column)

    def _scan(self, path: Path, name: str) -> Scan:
        """Read all headers of a tar, and the labels of a WebDataset's."""
        found: list[tuple[str, Place | None]] = []
        with (
            _HeaderReader(io.FileIO(path, opener=open_regular)) as file,
            tarfile.open(fileobj=file, mode="r:") as tar,
        ):
            start = -1
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # a million of them would take gigabytes
                if member.size < 0 or tar.offset <= start:  # tarfile would go round for ever (CVE-2025-8194)
                    raise tarfile.ReadError(f"a member of {member.size} bytes at byte {member.offset}")
                is_file = member.isreg() and not member.issparse()
                start = tar.offset
                place = (member.offset_data, member.size, member.mtime) if is_file else None
                found.append((str(PurePosixPath(member.name)), place))
            # tarfile takes a missing or a broken header for the end; the real one is a block of zeros.
            assert tar.fileobj is not None
            tar.fileobj.seek(tar.offset)
            if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"no valid member and no end mark at byte {tar.offset}")
            samples = find_samples(name, found, file.fileno(), *self._options)
        if samples is not None:
            return {"samples": samples}
        images: dict[str, Place] = {}
        suffixes = sample_suffixes(member_name for member_name, place in found if place)
        for member_name, place in found:
            images.pop(member_name, None)  # the last of a name counts, and if it is a link, none
            if place and is_sample(PurePosixPath(member_name), suffixes):
                images[member_name] = place
        return {"members": images}

    def _index(self, names: Sequence[str], scans: Sequence[Scan]) -> Index:
        has_samples = ["samples" in scan for scan in scans]
        if all(has_samples):
            return index_samples(names, scans)
        if any(has_samples):
            first, other = names[has_samples.index(True)], names[has_samples.index(False)]
            raise StoreError(
                f"{first} has the WebDataset layout, and {other} has not, or no labels: all tars of one store "
                "have one layout"
            )
        if self._options != ("image", "label"):
            raise StoreError(f"{self.address} is not of the WebDataset layout, so it has no {self._options}")
        return index_class_folders(self.address, scans, 2, ", or that of WebDataset, key.jpg beside key.cls")

    @staticmethod
    def content(file: OpenFile, name: str, place: list[int]) -> bytes | None:
        offset, num_bytes = place[:2]
        if not 0 <= num_bytes <= MAX_SAMPLE_BYTES:
            return None
        # pread leaves the file's position alone, so threads and forks may share the file.
        content = os.pread(file.descriptor, num_bytes, offset)
        if len(content) < num_bytes:
            raise StoreError(f"{name} has become shorter than {offset + num_bytes} bytes; copy it again")
        return content

    @staticmethod
    def member(file: OpenFile, place: list[int]) -> str:
        # Of a name beyond 100 characters, or of an extended header's, this has the beginning.
        position = place[0]
        header = os.pread(file.descriptor, tarfile.BLOCKSIZE, position - tarfile.BLOCKSIZE)
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name


class _HeaderReader(io.BufferedReader):
    """A tar as `tarfile` reads it while it looks for headers.

    What follows a header and belongs to it, such as a long name, is read whole: a damaged size would take the
    rest of the file for it. And for a number of n digits `tarfile` takes n² steps (CVE-2024-6232).
    """

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header of {size} bytes at byte {self.tell()}")
        content = super().read(size)
        if size > tarfile.BLOCKSIZE and _ENDLESS_NUMBER.search(content):
            raise tarfile.ReadError(
                f"an extended header at byte {self.tell() - len(content)} is nothing but a number"
            )
        return content


class ZipStore(ArchiveStore):
    """A store in one zip, or in several, `NAME-{0000..0099}.zip`; see `ArchiveStore`.

    Classes and samples are those of a tar of class folders, see `TarStore`; the folder
    `__MACOSX` does not count. A member that does not have its checksum is an image None.
    """

    suffix = ".zip"
    index_file = "zip-3.json"
    advice = "truncated or no zip: copy it again"

    def _scan(self, path: Path, name: str) -> Scan:
        """Each member is [position of the local header, num_bytes, checksum, bytes in the file, method]."""
        with _DirectoryReader(io.FileIO(path, opener=open_regular)) as file, zipfile.ZipFile(file) as archive:
            infos, num_bytes = archive.infolist(), os.fstat(file.fileno()).st_size
        images: dict[str, list[int]] = {}
        suffixes = sample_suffixes(info.filename for info in infos)
        for info in infos:
            key = str(PurePosixPath(info.filename))
            images.pop(key, None)  # the last of a name counts
            is_folder = info.filename.endswith("/")  # `is_dir` stumbles over an empty name
            if is_folder or stat.S_ISLNK(info.external_attr >> 16) or not is_sample(PurePosixPath(key), suffixes):
                continue
            if info.flag_bits & _ENCRYPTED or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                how = "encrypted" if info.flag_bits & _ENCRYPTED else f"compressed by method {info.compress_type}"
                raise StoreError(
                    f"{name}: {key!r} is {how}, which is not read: make the zip anew (zip -0), without a password"
                )
            if not 0 <= info.header_offset <= num_bytes - _LOCAL_HEADER.size - info.compress_size:
                raise StoreError(f"{name}: {key!r} would end behind the zip's end: it is truncated, copy it again")
            # Of a size beyond all limits only that is kept: it may have 64 bits.
            size = min(info.file_size, MAX_SAMPLE_BYTES + 1)
            images[key] = [info.header_offset, size, info.CRC, info.compress_size, info.compress_type]
        return {"members": images}

    def _index(self, names: Sequence[str], scans: Sequence[Scan]) -> Index:
        return index_class_folders(self.address, scans, 5)

    @staticmethod
    def content(file: OpenFile, name: str, place: list[int]) -> bytes | None:
        position, num_bytes, checksum, stored_bytes, method = place
        if max(num_bytes, stored_bytes) > MAX_SAMPLE_BYTES:
            return None
        # pread leaves the file's position alone, so threads and forks may share the file.
        header = os.pread(file.descriptor, _LOCAL_HEADER.size, position)
        if header[:4] == _LOCAL_MAGIC and len(header) == _LOCAL_HEADER.size:
            # The extra field may be longer than that in the directory.
            start = position + len(header) + sum(_LOCAL_HEADER.unpack(header))
            content = os.pread(file.descriptor, stored_bytes, start)
            if method == zipfile.ZIP_DEFLATED:
                content = _inflated(content, num_bytes)
            if len(content) == num_bytes and zlib.crc32(content) == checksum:
                return content
        if os.fstat(file.descriptor).st_size < position + _LOCAL_HEADER.size + stored_bytes:
            raise StoreError(f"{name} has become shorter than {position + stored_bytes} bytes; copy it again")
        return None

    @staticmethod
    def member(file: OpenFile, place: list[int]) -> str:
        num_bytes, _ = _LOCAL_HEADER.unpack(os.pread(file.descriptor, _LOCAL_HEADER.size, place[0]))
        name = os.pread(file.descriptor, num_bytes, place[0] + _LOCAL_HEADER.size)
        return name.decode(errors="backslashreplace")


class _DirectoryReader(io.BufferedReader):
    """A zip as `zipfile` reads it while it looks for the directory, whose size may be damaged."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:  # to the end, for the directory's end mark
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a directory of {size} bytes; the limit is {_MAX_DIRECTORY_BYTES}")
        return super().read(size)


def _inflated(data: bytes, num_bytes: int) -> bytes:
    try:
        # One byte more than it should have shows that it has more; a bomb inflates no further.
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, num_bytes + 1)
    except zlib.error:
        return b""
