"""Uncompressed tars: class folders, as ImageFolder has them, or the WebDataset layout.

A scan of the headers makes an index, and trusts nothing in them. The layout is in `raypipe.stores.webdataset`.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular
from raypipe.stores.archive import ArchiveStore, Index, OpenFile, Scan, index_class_folders, is_image
from raypipe.stores.base import MAX_SAMPLE_BYTES
from raypipe.stores.webdataset import Place, find_samples, index_samples

# Names are up to 4 KiB, extended attributes up to 64 KiB.
_MAX_HEADER_BYTES = 128 << 10
_ENDLESS_NUMBER = re.compile(rb"\d{256}")  # more than a file name may be long


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
    index_file = "tar-4.json"

    def __init__(self, address: str | Path, image_column: str = "image", label_column: str = "label") -> None:
        super().__init__(address, image_column, label_column)

    def _scan(self, path: Path, name: str) -> Scan:
        try:
            return _scan(path, name, *self._options)
        except StoreError:
            raise
        except Exception as error:  # tarfile lets half a dozen types through on bad headers
            known = isinstance(error, tarfile.TarError | OSError)
            reason = error if known else f"damaged header: {type(error).__name__}: {error}"
            raise StoreError(
                f"{name} cannot be read as tar: {reason}; it is compressed, which allows no random access, or "
                "truncated or no tar: uncompress it, or copy it again"
            ) from error

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


def _scan(path: Path, name: str, image_column: str, label_column: str) -> Scan:
    """Read all headers of a tar, and the labels of a WebDataset's; name is for errors."""
    found: list[tuple[str, Place | None]] = []
    with _HeaderReader(io.FileIO(path, opener=open_regular)) as file, tarfile.open(fileobj=file, mode="r:") as tar:
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
        read = lambda at, num: os.pread(file.fileno(), num, at)  # noqa: E731
        samples = find_samples(name, found, image_column, label_column, read)
    if samples is not None:
        return {"samples": samples}
    images: dict[str, Place] = {}
    for member_name, place in found:
        images.pop(member_name, None)  # the last of a name counts, and if it is a link, none
        if place and is_image(PurePosixPath(member_name)):
            images[member_name] = place
    return {"members": images}
