"""Writes tars in the WebDataset layout, see `raypipe.stores.webdataset`, one new file each."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raypipe.errors import StoreError
from raypipe.stores.base import IMAGE_SUFFIXES
from raypipe.stores.metadata import NAME, Metadata
from raypipe.stores.record import DEFAULT_COLUMNS, Fingerprint, RecordLayout
from raypipe.stores.webdataset import LABEL_SUFFIX

# What an image's bytes start with → its suffix.
_MAGIC = {
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"RIFF": "webp",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II": "tif",
    b"MM": "tif",
}


class TarWriter:
    """Writes one new tar: for each sample its image, `cls`, and a member for each other column that is not None.

    Members of a sample are sorted, and the file depends on the samples alone, not on when, where or by whom it was
    written. Integers and floats are written in ASCII, strings in UTF-8. Columns with their types and the class
    names are in the first member, `__raypipe__`, which WebDataset skips.

    Args:
        path: the file to make; it must not exist.
        columns: all columns, name → one of `raypipe.stores.record.COLUMN_TYPES`, in order; None for
            `image` and `label` alone. Their names become suffixes, in lower case.
        classes: class names, position = label; None where there are none.
        first_key: the key of the first sample, a number; the others count on.

    Raises:
        StoreError: a column's name can be no suffix.
    """

    def __init__(
        self,
        path: str | Path,
        columns: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
        first_key: int = 0,
    ) -> None:
        self._path = Path(path)
        self._layout = RecordLayout(DEFAULT_COLUMNS if columns is None else columns)
        self._classes = None if classes is None else tuple(classes)
        self._fingerprint = Fingerprint(self._layout.types, classes)
        self._first_key, self._count = first_key, 0
        self._suffixes = _suffixes(self._layout.types)

    def __enter__(self) -> TarWriter:
        try:
            self._file = self._path.open("xb")
        except OSError as error:
            raise StoreError(f"{self._path} cannot be made: {error}") from error
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)
        # Room for what it will say in the end, a longer count.
        self._metadata_bytes = len(self._metadata()) + 20
        self._add(NAME, self._metadata().ljust(self._metadata_bytes))
        return self

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add one sample with exactly the declared columns; None is allowed in binary and string ones."""
        self._fingerprint.add(self._layout.pack(sample))
        members = {}
        for name, value in sample.items():
            if value is not None:
                suffix = _image_suffix(value) if name == "image" else self._suffixes[name]
                members[suffix] = _encoded(value, self._layout.types[name])
        if not members:
            raise StoreError(f"{self._path}: a sample of which all columns are None leaves no trace in a tar")
        for suffix in sorted(members):
            self._add(f"{self._first_key + self._count:09d}.{suffix}", members[suffix])
        self._count += 1

    def __exit__(self, *exc: object) -> None:
        finished = False
        try:
            if exc[0] is None:
                self._finish()
                finished = True
        except (tarfile.TarError, OSError) as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error
        finally:
            if not finished:
                self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._file.close()

    def _finish(self) -> None:
        self._tar.close()
        self._file.seek(tarfile.BLOCKSIZE)  # where the data of the first member is
        self._file.write(self._metadata().ljust(self._metadata_bytes))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _metadata(self) -> bytes:
        return Metadata(self._count, self._layout.types, self._classes, self._fingerprint.hexdigest()).to_json()

    def _add(self, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        try:
            self._tar.addfile(member, io.BytesIO(content))
        except (tarfile.TarError, OSError) as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error
        self._tar.members.clear()  # type: ignore[attr-defined]  # a million of them would take gigabytes


def _suffixes(types: Mapping[str, str]) -> dict[str, str]:
    """Column → suffix of its members."""
    taken = {LABEL_SUFFIX, *(suffix[1:] for suffix in IMAGE_SUFFIXES)}
    suffixes = {"label": LABEL_SUFFIX}
    for name in types:
        if name in DEFAULT_COLUMNS:
            continue
        suffix = name.lower()
        if not name.isprintable() or not name or "/" in name or suffix in taken:
            raise StoreError(
                f"column {name!r} cannot be written to a tar, where its name is the suffix of its members: it is "
                "another's, that of images or labels, or has characters that no suffix has. Rename it"
            )
        taken.add(suffix)
        suffixes[name] = suffix
    return suffixes


def _image_suffix(image: bytes) -> str:
    # Bytes that are no image at all are stored as they came, under the name that is expected.
    return next((suffix for magic, suffix in _MAGIC.items() if image.startswith(magic)), "jpg")


def _encoded(value: Any, kind: str) -> bytes:
    if kind == "int64":
        return str(int(value)).encode()
    if kind == "float64":
        return repr(float(value)).encode()
    return value.encode() if kind == "string" else bytes(value)
