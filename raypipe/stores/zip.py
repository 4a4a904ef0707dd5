"""Class folders inside a zip: members `class/name.jpg`, stored or deflated, read by position, never extracted.

`zipfile` reads the central directory, which says nothing that is trusted.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular
from raypipe.stores.archive import ArchiveStore, Index, OpenFile, Scan, index_class_folders, is_image
from raypipe.stores.base import MAX_SAMPLE_BYTES

# Of two million files; `zipfile` takes some 700 bytes for each while it reads.
_MAX_DIRECTORY_BYTES = 256 << 20
_ENCRYPTED = 0x1 | 0x40 | 0x2000  # bits of a member's flags: by password, strongly, directory and all
_LOCAL_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<26xHH")  # length of the name, and of the extra field


class ZipStore(ArchiveStore):
    """A store in one zip, or in several, `NAME-{0000..0099}.zip`; see `ArchiveStore`.

    Classes and samples are those of a tar of class folders, see `raypipe.stores.tar.TarStore`; the folder
    `__MACOSX` does not count. A member that does not have its checksum is an image None.
    """

    suffix = ".zip"
    index_file = "zip-2.json"

    def _scan(self, path: Path, name: str) -> Scan:
        """Each member is [position of the local header, num_bytes, checksum, bytes in the file, method]."""
        try:
            with _DirectoryReader(io.FileIO(path, opener=open_regular)) as file, zipfile.ZipFile(file) as archive:
                infos, num_bytes = archive.infolist(), os.fstat(file.fileno()).st_size
        except Exception as error:  # zipfile lets half a dozen types through on bad directories
            reason = f"{type(error).__name__}: {error!s:.500}; it is truncated or no zip: copy it again"
            raise StoreError(f"{name} cannot be read as zip: {reason}") from error
        images: dict[str, list[int]] = {}
        for info in infos:
            key = str(PurePosixPath(info.filename))
            images.pop(key, None)  # the last of a name counts
            is_folder = info.filename.endswith("/")  # `is_dir` stumbles over an empty name
            if is_folder or stat.S_ISLNK(info.external_attr >> 16) or not is_image(PurePosixPath(key)):
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
