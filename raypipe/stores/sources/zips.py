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

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.read_limit import check_read
from raypipe.stores.addresses import list_files
from raypipe.stores.base import NAME, as_text
from raypipe.stores.class_folders import (
    BY_FOLDER,
    check_classes,
    find_classes,
    tell_left_out,
)
from raypipe.stores.memory_tree import Link, MemoryTree, TreeFile
from raypipe.stores.sources.format_source import Asked, Source, explained, opened
from raypipe.stores.webdataset import (
    TEXT_SUFFIXES,
    Indexed,
    Place,
    Scan,
    as_names,
    find_samples,
    index_samples,
)

logger = logging.getLogger(__name__)

_MAX_RATIO = 1100  # deflate reaches 1,032
_MAX_LINK_BYTES = 4096


@dataclass(frozen=True)
class _Zip:
    """An open zip."""

    path: str
    archive: zipfile.ZipFile

    def read(self, member: zipfile.ZipInfo | None) -> bytes | None:
        """Return the bytes of a member; None for no member, and, with a warning, for damaged bytes."""
        if member is None:
            return None
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
        return (self.read(self.archive.infolist()[position]) or b"")[:num_bytes]


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
    source = None
    if asked.label != BY_FOLDER:
        source = _pairs(zips, asked)
    if (
        source is None
        and asked.image == "image"
        and asked.label in ("label", BY_FOLDER, "")
    ):
        source = _class_folders(address, zips, asked)
    if source is None and not asked.label:
        source = _pairs(zips, asked, needs_labels=False)
    if source is None:
        raise StoreError(
            f"{address} has no labels: the layout is class/image.jpg, or WebDataset's pairs key.jpg and key.cls "
            "(or key.json). If another suffix has the labels, set store.target_column to it; '' = only images"
        )
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


def _class_folders(address: str, zips: Sequence[_Zip], asked: Asked) -> Source | None:
    """Return the samples of class folders; None if there are none."""
    layout = find_classes([_tree_of(zipped) for zipped in zips], address)
    if not any(itertools.chain.from_iterable(layout.samples)):
        return None
    nums = np.sum([list(map(len, by_class)) for by_class in layout.samples], 0).tolist()
    num_by_class = dict(zip(layout.classes, nums, strict=True))
    told = check_classes(address, asked.label, [layout.doubts], num_by_class)
    num_samples = sum(nums)
    tell_left_out(address, num_samples, layout.left_out, *told)

    def samples() -> Iterator[dict[str, Any]]:
        for zipped, by_class in zip(zips, layout.samples, strict=True):
            for label, of_class in enumerate(by_class):
                for path, member in of_class:
                    image = zipped.read(member)
                    yield {"image": image, "label": label, NAME: path}

    return Source(samples(), layout.classes, num_samples)


def _tree_of(zipped: _Zip) -> MemoryTree:
    tree = MemoryTree(missing=None)
    for member in zipped.archive.infolist():
        name = str(PurePosixPath(member.filename))
        if name == ".":
            continue
        if member.is_dir():
            tree.add(name, None)
        elif (
            stat.S_ISLNK(member.external_attr >> 16)
            and member.file_size <= _MAX_LINK_BYTES
        ):
            tree.add(name, Link(os.fsdecode(zipped.read(member) or b"")))
        else:
            tree.add(name, TreeFile(member))
    return tree


def _pairs(
    zips: Sequence[_Zip], asked: Asked, needs_labels: bool = True
) -> Source | None:
    """Return the samples of pairs; None if a zip has none."""
    scans = list[Scan]()
    for zipped in zips:
        # the position of a member is its number
        entries: list[tuple[str, Place | str]] = [
            (member.filename, (number, member.file_size, 0.0))
            for number, member in enumerate(zipped.archive.infolist())
            if not (member.is_dir() or stat.S_ISLNK(member.external_attr >> 16))
        ]
        scan = find_samples(
            zipped.path, entries, zipped.pread, asked.image, asked.label, needs_labels
        )
        if scan is None:
            return None
        scans.append(scan)
    indexed = index_samples([zipped.path for zipped in zips], scans)
    tell_left_out(zips[0].path, sum(indexed.nums), indexed.left_out)
    return Source(_samples_of_pairs(zips, indexed), num_samples=sum(indexed.nums))


def _samples_of_pairs(
    zips: Sequence[_Zip], indexed: Indexed
) -> Iterator[dict[str, Any]]:
    """Yield the samples of each zip."""
    columns = dict(indexed.columns)
    labels = columns.pop("label", None)
    numbers = itertools.count()
    for zipped, keys in zip(zips, indexed.keys, strict=True):
        members = zipped.archive.infolist()
        for name, number in zip(as_names(keys), numbers, strict=False):
            sample: dict[str, Any] = {NAME: name}
            for column, places in columns.items():
                position = int(places[number][0])
                content = zipped.read(members[position] if position >= 0 else None)
                is_text = column in TEXT_SUFFIXES
                sample[column] = as_text(content) if is_text else content
            if labels is not None:
                sample["label"] = labels[number]
            yield sample
