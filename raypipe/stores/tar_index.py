"""What is in a tar: a scan of its headers, which trusts nothing in them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tarfile
from pathlib import Path, PurePosixPath

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular
from raypipe.stores.members import Members, is_image
from raypipe.stores.metadata import NAME
from raypipe.stores.webdataset import Grouper, Samples

# Names are up to 4 KiB, extended attributes up to 64 KiB.
_MAX_HEADER_BYTES = 128 << 10
_MAX_NAME_BYTES = 6 << 10
_ENDLESS_NUMBER = re.compile(rb"\d{256}")  # more than a file name may be long
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def scan(path: Path, name: str, image_column: str = "image", label_column: str = "label") -> Members | Samples:
    """Read all headers of a tar, and the labels of a WebDataset's.

    Args:
        path: the file.
        name: of the tar, for errors.
        image_column: see `raypipe.stores.webdataset.Grouper`.
        label_column: see there.

    Returns:
        The samples, where it has the WebDataset layout; else the images, name → (position of the data, num_bytes,
        mtime).

    Raises:
        StoreError: it is no tar, is compressed, damaged or truncated; or see `Grouper.result`.
    """
    try:
        return _scan(path, name, image_column, label_column)
    except StoreError:
        raise
    except (tarfile.TarError, OSError) as error:
        raise StoreError(f"{name} cannot be read as tar: {error}; {_advice(path)}") from error
    except Exception as error:  # tarfile lets half a dozen types through on bad headers
        reason = f"damaged header: {type(error).__name__}: {error}"
        raise StoreError(f"{name} cannot be read as tar: {reason}; {_advice(path)}") from error


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


def _scan(path: Path, name: str, image_column: str, label_column: str) -> Members | Samples:
    images: Members = {}
    with _HeaderReader(io.FileIO(path, opener=open_regular)) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        # Data is read by pread, which leaves the position of the scan alone.
        grouper = Grouper(name, image_column, label_column, lambda at, num: os.pread(file.fileno(), num, at))
        start = -1
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # a million of them would take gigabytes
            if member.size < 0 or tar.offset <= start:  # tarfile would go round for ever (CVE-2025-8194)
                raise tarfile.ReadError(f"a member of {member.size} bytes at byte {member.offset}")
            is_first, start = start < 0, tar.offset
            path_in_tar, is_file = PurePosixPath(member.name), member.isreg() and not member.issparse()
            if is_first and is_file and member.name == NAME:
                grouper.note(member.offset_data, member.size)
                continue
            if is_file:
                grouper.add(path_in_tar, (member.offset_data, member.size, member.mtime))
            if grouper.is_certain:
                images.clear()
                continue
            # A name replaced later by a link or a folder is that link or folder, so no sample.
            images.pop(str(path_in_tar), None)
            if is_file and is_image(path_in_tar):
                images[str(path_in_tar)] = (member.offset_data, member.size, member.mtime)
        # tarfile takes a missing or a broken header for the end; the real one is a block of zeros.
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no valid member and no end mark at byte {tar.offset}")
        samples = grouper.result()
    return images if samples is None else samples


def member_at(descriptor: int, position: int) -> str:
    """The name of the member whose data begin at a position."""
    # A long name stands before the header proper, in an extended one: three blocks or more.
    for num_bytes in range(3 * tarfile.BLOCKSIZE, min(_MAX_NAME_BYTES, position) + 1, tarfile.BLOCKSIZE):
        headers = io.BytesIO(os.pread(descriptor, num_bytes, position - num_bytes))
        with contextlib.suppress(Exception), tarfile.open(fileobj=headers, mode="r:") as tar:  # or it is no header
            member = tar.next()
            if member is not None and member.offset_data == num_bytes:
                return member.name
    header = os.pread(descriptor, tarfile.BLOCKSIZE, position - tarfile.BLOCKSIZE)
    return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name


def _advice(path: Path) -> str:
    try:
        with io.FileIO(path, opener=open_regular) as file:
            start = file.read(8)
    except OSError:
        return "check the path"
    for magic, method in _COMPRESSED.items():
        if start.startswith(magic):
            return f"it is compressed by {method}, which allows no random access: uncompress it first"
    return "it is truncated or no tar: copy it again"
