"""Zips of class folders, `class/image.jpg`, or of WebDataset's pairs, by the rules of folders and of tars.

Nothing is extracted. A zip is refused, by the name of the member, for names that lead out of it, encryption, and
sizes that no images have.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from raypipe.errors import StoreError
from raypipe.storage.read_limit import check_read
from raypipe.stores.addresses import list_files
from raypipe.stores.base import NAME, ColumnValues, as_text
from raypipe.stores.class_folders import FILE, FOLDER, LINK, Entry, tell_left_out
from raypipe.stores.memory_tree import MemoryTree
from raypipe.stores.sources.format_source import Asked, Source, explained, opened
from raypipe.stores.tar_layouts import index_tars, layout_of
from raypipe.stores.webdataset import MISSING, TEXT_SUFFIXES, Indexed, Scan, as_names

logger = logging.getLogger(__name__)

_MAX_RATIO = 1100  # deflate reaches 1,032
_MAX_LINK_BYTES = 4096


@dataclass(frozen=True)
class _Zip:
    """An open zip."""

    path: str
    archive: zipfile.ZipFile

    def read(self, number: int) -> bytes | None:
        """Return the bytes of a member; None for no member, -1, and, with a warning, for damaged bytes."""
        if number < 0:
            return None
        member = self.archive.infolist()[number]
        try:
            return self.archive.read(member)
        except NotImplementedError as error:
            raise StoreError(
                f"{self.path}: {member.filename!r:.200} cannot be unpacked: {error}; zip the folder again (zip -0)"
            ) from None
        except Exception as error:  # half a dozen types
            logger.warning("%s: %r: %s", self.path, member.filename, error)
            return None

    def pread(self, num_bytes: int, position: int) -> bytes:
        """Return the first bytes of the member of a number; none of a damaged one."""
        return (self.read(position) or b"")[:num_bytes]


def open_zips(address: str, asked: Asked) -> Source:
    """Open one zip, several, `NAME-{0000..0099}.zip`, or those of a folder, in the order of folders or of tars."""
    paths = [
        file.address
        for file in list_files(
            address, lambda name: name.lower().endswith(".zip"), "*.zip"
        )
    ]
    stack = contextlib.ExitStack()
    zips: list[_Zip] = []
    for path in paths:
        with explained(path):
            archive = stack.enter_context(
                zipfile.ZipFile(stack.enter_context(opened(path)))
            )
            _check(path, archive.infolist())
            zips.append(_Zip(path, archive))
    indexed = index_tars(paths, [_scan(zipped, asked) for zipped in zips], asked.label)
    if not asked.label:
        indexed.columns.pop("label", None)
        indexed = indexed._replace(classes=None)
    num_samples = sum(indexed.nums)
    tell_left_out(address, num_samples, indexed.left_out, *indexed.told)
    source = Source(_samples(zips, indexed), indexed.classes, num_samples)
    return source.closing(stack)


def _check(path: str, members: Sequence[zipfile.ZipInfo]) -> None:
    """Raise StoreError for what no zip of images has; the parts of names are parted by slashes from here on."""
    for member in members:
        where = f"{path}: {member.filename!r:.200}"
        member.filename = member.filename.replace("\\", "/")  # Windows writes those
        name = PurePosixPath(member.filename)
        if name.is_absolute() or ".." in name.parts:
            raise StoreError(
                f"{where} leads out of the zip: zip the folder again, from within it (zip -r)"
            )
        if member.flag_bits & 1:
            raise StoreError(
                f"{where} is encrypted: zip the folder again, without a password"
            )
        check_read(where, member.file_size)
        if member.file_size > _MAX_RATIO * (member.compress_size + 1):
            raise StoreError(
                f"{where} unpacks to {member.file_size:,} bytes from {member.compress_size:,}: a zip bomb"
            )
    ordered = sorted(members, key=lambda member: member.header_offset)
    for member, following in itertools.pairwise(ordered):
        if member.header_offset + member.compress_size > following.header_offset:
            raise StoreError(
                f"{path}: {member.filename!r:.200} overlaps {following.filename!r:.200}: a zip bomb"
            )


def _scan(zipped: _Zip, asked: Asked) -> Scan:
    """Return the samples of a zip; the position of a member is its number."""
    members: list[Entry] = []
    for number, member in enumerate(zipped.archive.infolist()):
        name = str(PurePosixPath(member.filename))
        is_link = stat.S_ISLNK(member.external_attr >> 16)
        entry = Entry(name, FILE, (number, member.file_size, 0))
        if member.is_dir():
            entry = Entry(name, FOLDER, MISSING)
        elif is_link and member.file_size <= _MAX_LINK_BYTES:
            target = os.fsdecode(zipped.read(number) or b"")
            entry = Entry(name, f"{LINK}{target}", MISSING)
        if name != ".":
            members.append(entry)
    tree = MemoryTree(MISSING, members)
    return layout_of(zipped.path, members, tree, zipped.pread, *asked)


def _samples(zips: Sequence[_Zip], indexed: Indexed) -> Iterator[ColumnValues]:
    """Yield the samples of each zip."""
    columns = dict(indexed.columns)
    labels = columns.pop("label", None)
    owners = itertools.chain.from_iterable(map(itertools.repeat, zips, indexed.nums))
    names = as_names(indexed.keys)
    for number, (zipped, name) in enumerate(zip(owners, names, strict=True)):
        sample: dict[str, Any] = {NAME: name}
        for column, places in columns.items():
            content = zipped.read(int(places[number][0]))
            sample[column] = as_text(content) if column in TEXT_SUFFIXES else content
        if labels is not None:
            sample["label"] = labels[number]
        yield sample
