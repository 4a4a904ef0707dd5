"""TFRecord files of `tf.train.Example`, as a source for `raypipe ingest`.

One scan of a file finds its records, see `raypipe.stores.tfrecord_index`; then they are read by position, and
each one's checksum is checked. Every process scans for itself, so what is trained on is better ingested first.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular
from raypipe.stores.addresses import PART_OF, list_files
from raypipe.stores.base import MAX_SAMPLE_BYTES, Columns, check_columns, check_indices, part_of
from raypipe.stores.example import features_of, kind_of, only_bytes, only_int
from raypipe.stores.tfrecord_index import CRC_BYTES, Records, is_intact, scan

_SUFFIX = re.compile(r"\.(tfrecords?|tfrec)(\.gz)?$", re.IGNORECASE)
# What the images and labels of ImageNet and TF-Slim are called, then of others.
_IMAGE_FEATURES, _LABEL_FEATURES = ("image/encoded", "image", "image_raw"), ("image/class/label", "label")
_NUM_THREADS = 4


def is_tfrecord(name: str) -> bool:
    """Whether a file's name is one of TFRecord files: *.tfrecord, *.tfrecords, *.tfrec, NAME-00000-of-01024."""
    part = PART_OF.match(name)
    return bool(_SUFFIX.search(name)) or (part is not None and part.end() == len(name))


class TFRecordStore:
    """A store in TFRecord files, sorted by name. Labels are as they stand: ImageNet's begin at 1.

    Args:
        address: a file, a folder, or a pattern of files, see `raypipe.stores.addresses`; a relative path is made
            absolute, since other processes have other folders.
        image_column: the feature that becomes `image`; empty = `image/encoded`, `image` or `image_raw`.
        label_column: the feature that becomes `label`; empty = `image/class/label` or `label`, or, where there
            is none, a store without labels.
    """

    def __init__(self, address: str | Path, image_column: str = "", label_column: str = "") -> None:
        self.address = str(Path(address).absolute())
        self._features = (image_column, label_column)
        self._opened: _Opened | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, *self._features)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._open().features)

    @property
    def classes(self) -> None:
        return None

    @property
    def groups(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        """Hash over the lengths and checksums of all records, and over the features' names."""
        opened = self._open()
        names = repr(sorted(opened.features.items())).encode()
        digests = b"".join(records.digest for records in opened.files)
        return hashlib.blake2b(names + digests, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self._open().offsets[-1])

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples, see `Store.read`.

        A record over 512 MiB, or whose checksum is wrong, or that is no Example with one image, is an image None
        and a label 0. An Example without its label raises StoreError.
        """
        opened = self._open()
        wanted = check_indices(indices, len(self), self.address)
        check_columns(columns, opened.features, self.address)
        images: list[bytes | None] = [None] * len(wanted)
        labels = np.zeros(len(wanted), np.int64)
        order = np.argsort(wanted, kind="stable")
        bounds = np.searchsorted(wanted[order], opened.offsets)
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            file = opened.files[number]
            positions = order[bounds[number] : bounds[number + 1]].tolist()
            rows = [int(wanted[position] - opened.offsets[number]) for position in positions]
            for position, row, record in zip(positions, rows, _read(file, rows), strict=True):
                images[position], labels[position] = opened.sample(file, row, record)
        result = {"image": images, "label": labels}
        return {name: result[name] for name in columns}

    def sample_name(self, index: int) -> str:
        """A sample's file, and its record in it."""
        opened = self._open()
        number, record = part_of(opened.offsets, index)
        return f"{opened.files[number].path}, record {record}"

    def close(self) -> None:
        self._opened = None

    def _open(self) -> _Opened:
        if self._opened is None:
            paths = list_files(self.address, is_tfrecord, "TFRecord")
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                files = list(pool.map(scan, paths))
            offsets = np.cumsum([0] + [len(records.starts) for records in files], dtype=np.int64)
            if not offsets[-1]:
                raise StoreError(f"{self.address} has no records")
            self._opened = _Opened(files, offsets, _chosen(self.address, files, *self._features))
        return self._opened


@dataclass(frozen=True)
class _Opened:
    """What is known of the files: `offsets` int64 of shape (num_files + 1,); `features`, column → its name."""

    files: list[Records]
    offsets: np.ndarray
    features: dict[str, str]

    def sample(self, file: Records, row: int, record: bytes | None) -> tuple[bytes | None, int]:
        if record is None:
            return None, 0
        try:
            features = features_of(record)
            image = only_bytes(features[self.features["image"]])
        except (ValueError, KeyError):  # no image in it, or an Example of an unknown kind
            return None, 0
        if "label" not in self.features:
            return image, 0
        name = self.features["label"]
        try:
            return image, only_int(features[name])
        except (ValueError, KeyError) as error:
            raise StoreError(
                f"{file.path}, record {row}, has no label in {name!r} ({error}); training on a made-up one would "
                "not be noticed"
            ) from None


def _read(file: Records, rows: Iterable[int]) -> list[bytes | None]:
    """The data of records, None for those that are too long or damaged."""
    found: list[bytes | None] = []
    try:
        descriptor = open_regular(file.path)
        try:
            for row in rows:
                start, length = int(file.starts[row]), int(file.lengths[row])
                if length > MAX_SAMPLE_BYTES:
                    found.append(None)
                    continue
                data = os.pread(descriptor, length + CRC_BYTES, start)
                record = data[:length]
                found.append(record if is_intact(record, data[length:]) else None)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"{file.path} cannot be read: {error}") from error
    return found


def _chosen(address: str, files: list[Records], image: str, label: str) -> dict[str, str]:
    """Which features become the columns, by the first record that is intact."""
    for file in files:
        for row in range(min(len(file.starts), 16)):
            (record,) = _read(file, [row])
            try:
                kinds = {name: kind_of(value) for name, value in features_of(record or b"").items()}
            except ValueError:
                continue
            if kinds:
                return _columns(f"{file.path}, record {row}", kinds, image, label)
    raise StoreError(f"{address} has no tf.train.Example with features among its first records: none can be read")


def _columns(where: str, kinds: Mapping[str, str], image: str, label: str) -> dict[str, str]:
    there = ", ".join(f"{name} ({kind or 'empty'})" for name, kind in sorted(kinds.items()))[:1000]
    chosen: dict[str, str] = {}
    for column, given, usual, kind in (
        ("image", image, _IMAGE_FEATURES, "bytes"),
        ("label", label, _LABEL_FEATURES, "int64"),
    ):
        names = [name for name in ([given] if given else usual) if kinds.get(name) == kind]
        if names:
            chosen[column] = names[0]
        elif given or column == "image":
            raise StoreError(
                f"{where} has no feature of {kind} {given or ' or '.join(usual)!r} for {column}, only: {there}; "
                f"set {column}_column"
            )
    return chosen
