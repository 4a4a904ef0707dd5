"""Zips of class folders, `class/image.jpg`: a source of `raypipe convert`, which reads them once."""

from __future__ import annotations

import io
import logging
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular
from raypipe.stores.addresses import list_files
from raypipe.stores.base import MAX_SAMPLE_BYTES
from raypipe.stores.folder import archive_samples, class_samples

logger = logging.getLogger(__name__)


class ZipSamples:
    """The samples of one or several zips, by zip, by class, then by name; the rules for members are those of tars.

    A member that is damaged, or over 512 MiB, is {"image": None}, and a warning names it.

    Args:
        address: a local file, or several files, `NAME-{0000..0099}.zip`.

    Attributes:
        classes: class names, position = label.
    """

    def __init__(self, address: str | Path) -> None:
        files = list_files(str(Path(address).absolute()), lambda name: name.endswith(".zip"), "*.zip")
        self._paths = [file.address for file in files]
        self._members = [_members(path) for path in self._paths]
        self.classes, self._samples = class_samples(str(address), self._members)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for path, members, samples in zip(self._paths, self._members, self._samples, strict=True):
            with _opened(path) as archive:
                for label, name in samples:
                    yield {"image": _content(archive, members[name], path), "label": label}


def _opened(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(io.BufferedReader(io.FileIO(path, opener=open_regular)))
    except Exception as error:  # zipfile lets half a dozen types through
        reason = f"{type(error).__name__}: {error!s:.500}; it is truncated or not a zip: copy it again"
        raise StoreError(f"{path} cannot be read as zip: {reason}") from error


def _members(path: str) -> dict[str, zipfile.ZipInfo]:
    """Return name → member for the members that are samples."""
    with _opened(path) as archive:
        infos = archive.infolist()
    return archive_samples((str(PurePosixPath(info.filename)), info if _is_file(info) else None) for info in infos)


def _is_file(info: zipfile.ZipInfo) -> bool:
    return not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16)


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str) -> bytes | None:
    where = f"{path}, {info.filename!r}"
    try:
        if info.file_size <= MAX_SAMPLE_BYTES:
            return archive.read(info)
        reason = "it is over 512 MiB"
    except (RuntimeError, NotImplementedError) as error:  # a password, or an unknown compression
        raise StoreError(
            f"{where}: cannot be read: {error}; make the zip again, without a password (zip -0)"
        ) from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = str(error)
    logger.warning("%s: %s", where, reason)
    return None
