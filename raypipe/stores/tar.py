"""An ImageFolder inside an uncompressed tar: members `class/name.jpg`, maybe below folders that all share.

One scan of the headers makes an index; samples are then read by position. Nothing is ever extracted,
so what the members' names say has no effect on the disk.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import weakref
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.base import Columns
from raypipe.stores.checks import IMAGE_SUFFIXES, MAX_SAMPLE_BYTES, check_columns, check_indices

# Names are up to 4 KiB, extended attributes up to 64 KiB.
_MAX_HEADER_BYTES = 128 << 10
_ENDLESS_NUMBER = re.compile(rb"\d{256}")  # more than a file name may be long
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class TarStore:
    """A store in one tar file.

    Classes are the folders that hold images, in the order of their names; samples are sorted by class,
    then by member name. Of members with one name, the last counts, as in extraction. Links, hidden
    files, absolute names and names with `..` do not count.

    Args:
        address: the file; a relative one is made absolute, since other processes have other folders.
    """

    def __init__(self, address: str | Path) -> None:
        self.address = str(Path(address).absolute())
        self._opened: _Index | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address,)

    @property
    def columns(self) -> tuple[str, ...]:
        return ("image", "label")

    @property
    def classes(self) -> tuple[str, ...]:
        return self._open().classes

    @property
    def groups(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        """Hash over the members' names, sizes and times of change."""
        return self._open().fingerprint

    def __len__(self) -> int:
        return len(self._open().labels)

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples, see `Store.read`. A member over 1 GiB is an image None."""
        index = self._open()
        wanted = check_indices(indices, len(index.labels), self.address)
        check_columns(columns, self.columns, self.address)
        result: Columns = {}
        for name in columns:
            result[name] = index.labels[wanted] if name == "label" else index.read_images(wanted)
        return result

    def close(self) -> None:
        self._opened = None

    def _open(self) -> _Index:
        if self._opened is None:
            self._opened = _Index(self.address)
        return self._opened


class _Index:
    """An open tar, and where in it the samples are. The file closes with the object."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            members = _scan(path)
        except (tarfile.TarError, OSError) as error:
            raise StoreError(f"{path} cannot be read as tar: {error}; {_advice(path)}") from error
        except Exception as error:  # tarfile lets half a dozen types through on bad headers
            reason = f"damaged header: {type(error).__name__}: {error}"
            raise StoreError(f"{path} cannot be read as tar: {reason}; {_advice(path)}") from error
        found = _by_class(path, members)
        self.classes = tuple(sorted({label for label, _ in found}))
        class_labels = {name: label for label, name in enumerate(self.classes)}
        samples = [members[name] for _, name in found]
        self.labels = np.array([class_labels[label] for label, _ in found], dtype=np.int64)
        self._offsets = np.array([member[0] for member in samples], dtype=np.int64)
        self._sizes = np.array([member[1] for member in samples], dtype=np.int64)
        digest = hashlib.blake2b(digest_size=16)
        for (_, name), (_, num_bytes, mtime) in zip(found, samples, strict=True):
            digest.update(f"{name}\0{num_bytes}\0{mtime}\n".encode(errors="surrogateescape"))
        self.fingerprint = digest.hexdigest()

    def read_images(self, wanted: np.ndarray) -> list[bytes | None]:
        images: list[bytes | None] = []
        places = zip(self._offsets[wanted].tolist(), self._sizes[wanted].tolist(), strict=True)
        for offset, num_bytes in places:
            if num_bytes > MAX_SAMPLE_BYTES:
                images.append(None)
                continue
            # pread leaves the file's position alone, so threads and forks may share the file.
            image = os.pread(self._file, num_bytes, offset)
            if len(image) < num_bytes:
                raise StoreError(f"{self._path} has become shorter than {offset + num_bytes} bytes; copy it again")
            images.append(image)
        return images


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


def _scan(path: str) -> dict[str, tuple[int, int, float]]:
    """Return name → (position of the data, num_bytes, mtime) of all members that may be samples."""
    members: dict[str, tuple[int, int, float]] = {}
    with _HeaderReader(io.FileIO(path)) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        start = -1
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # a million of them would take gigabytes
            if member.size < 0 or tar.offset <= start:  # tarfile would go round for ever (CVE-2025-8194)
                raise tarfile.ReadError(f"a member of {member.size} bytes at byte {member.offset}")
            start = tar.offset
            # A name replaced later by a link or a folder is that link or folder, so no sample.
            name = str(PurePosixPath(member.name))
            members.pop(name, None)
            if member.isreg() and not member.issparse() and _may_be_sample(PurePosixPath(name)):
                members[name] = (member.offset_data, member.size, member.mtime)
        # tarfile takes a missing or a broken header for the end; the real one is a block of zeros.
        assert tar.fileobj is not None
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no valid member and no end mark at byte {tar.offset}")
    return members


def _may_be_sample(name: PurePosixPath) -> bool:
    if name.suffix.lower() not in IMAGE_SUFFIXES or name.is_absolute():
        return False
    return not any(part.startswith(".") for part in name.parts)  # hidden, or `..`


def _by_class(path: str, members: dict[str, tuple[int, int, float]]) -> list[tuple[str, str]]:
    """Return (class, name) of all samples, sorted."""
    parts = {name: name.split("/") for name in members if "/" in name}
    if not parts:
        where = "only images at its top, so their labels are unknown" if members else "no images"
        raise StoreError(
            f"{path} has {where}: the layout is class/image.jpg, maybe below common folders "
            "(WebDataset shards are not read yet)"
        )
    depth = 0
    # A folder that all share is a wrapper such as `train/`, as long as a class folder is left below it.
    while len({names[depth] for names in parts.values()}) == 1 and min(map(len, parts.values())) > depth + 2:
        depth += 1
    return sorted((names[depth], name) for name, names in parts.items())


def _advice(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            start = file.read(8)
    except OSError:
        return "check the path"
    for magic, method in _COMPRESSED.items():
        if start.startswith(magic):
            return f"it is compressed by {method}, which allows no random access: uncompress it first"
    return "it is truncated or no tar: copy it again"
