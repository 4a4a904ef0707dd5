"""What is in a zip: its central directory, which says nothing that is trusted."""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular
from raypipe.stores.base import MAX_SAMPLE_BYTES
from raypipe.stores.members import Members, is_image

# Of two million files; `zipfile` takes some 700 bytes for each while it reads.
_MAX_DIRECTORY_BYTES = 256 << 20
_ENCRYPTED = 0x1 | 0x40 | 0x2000  # bits of a member's flags: by password, strongly, directory and all
_LOCAL_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<26xHH")  # length of the name, and of the extra field


def scan(path: Path, name: str) -> Members:
    """Read the central directory of a zip.

    Args:
        path: the file.
        name: of the zip, for errors.

    Returns:
        The images: name → (position of the local header, num_bytes, checksum, bytes in the file, method).

    Raises:
        StoreError: it is no zip, is damaged or truncated, or has an image that is encrypted or compressed by
            another method than deflate.
    """
    try:
        with _DirectoryReader(io.FileIO(path, opener=open_regular)) as file, zipfile.ZipFile(file) as archive:
            infos, num_bytes = archive.infolist(), os.fstat(file.fileno()).st_size
    except Exception as error:  # zipfile lets half a dozen types through on bad directories
        reason = f"{type(error).__name__}: {error!s:.500}; it is truncated or no zip: copy it again"
        raise StoreError(f"{name} cannot be read as zip: {reason}") from error
    images: Members = {}
    for info in infos:
        key = str(PurePosixPath(info.filename))
        images.pop(key, None)  # the last of a name counts
        is_folder = info.filename.endswith("/")  # `is_dir` stumbles over an empty name
        if is_folder or stat.S_ISLNK(info.external_attr >> 16) or not is_image(PurePosixPath(key)):
            continue
        if info.flag_bits & _ENCRYPTED:
            raise StoreError(f"{name}: {key!r} is encrypted, which is not read: make the zip without a password")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise StoreError(
                f"{name}: {key!r} is compressed by method {info.compress_type}; stored and deflated members are "
                "read: make the zip anew (zip -0)"
            )
        if not 0 <= info.header_offset <= num_bytes - _LOCAL_HEADER.size - info.compress_size:
            raise StoreError(f"{name}: {key!r} would end behind the zip's end: it is truncated, copy it again")
        # Of a size beyond all limits only that is kept: it may have 64 bits.
        size = min(info.file_size, MAX_SAMPLE_BYTES + 1)
        images[key] = (info.header_offset, size, info.CRC, info.compress_size, info.compress_type)
    return images


class _DirectoryReader(io.BufferedReader):
    """A zip as `zipfile` reads it while it looks for the directory, whose size may be damaged."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:  # to the end, for the directory's end mark
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > _MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a directory of {size} bytes; the limit is {_MAX_DIRECTORY_BYTES}")
        return super().read(size)


def member_at(descriptor: int, position: int) -> str:
    """The name in the local header at a position."""
    num_bytes, _ = _LOCAL_HEADER.unpack(os.pread(descriptor, _LOCAL_HEADER.size, position))
    return os.pread(descriptor, num_bytes, position + _LOCAL_HEADER.size).decode(errors="backslashreplace")


def content_of(descriptor: int, name: str, place: list[int]) -> bytes | None:
    """A member, by a row of numbers as `scan` has them; None where it is damaged or over 512 MiB.

    Raises:
        StoreError: the file ends before it.
    """
    position, num_bytes, checksum, stored_bytes, method = place
    if max(num_bytes, stored_bytes) > MAX_SAMPLE_BYTES:
        return None
    # pread leaves the file's position alone, so threads and forks may share the file.
    header = os.pread(descriptor, _LOCAL_HEADER.size, position)
    if header[:4] == _LOCAL_MAGIC and len(header) == _LOCAL_HEADER.size:
        # The extra field may be longer than that in the directory.
        start = position + len(header) + sum(_LOCAL_HEADER.unpack(header))
        content = _inflated(os.pread(descriptor, stored_bytes, start), method, num_bytes)
        if len(content) == num_bytes and zlib.crc32(content) == checksum:
            return content
    if os.fstat(descriptor).st_size < position + _LOCAL_HEADER.size + stored_bytes:
        raise StoreError(f"{name} has become shorter than {position + stored_bytes} bytes; copy it again")
    return None


def _inflated(data: bytes, method: int, num_bytes: int) -> bytes:
    if method == zipfile.ZIP_STORED:
        return data
    try:
        # One byte more than it should have shows that it has more; a bomb inflates no further.
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, num_bytes + 1)
    except zlib.error:
        return b""
