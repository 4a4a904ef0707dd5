"""TFRecord files of `tf.train.Example`, as a source for `raypipe ingest`.

    uint64 length | uint32 masked CRC32C of the length | data | uint32 masked CRC32C of the data

One scan of a file finds its records; then they are read by position, and each one's checksum is checked. Every
process scans for itself, so what is trained on is better ingested first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular
from raypipe.stores.addresses import PART_OF, list_files
from raypipe.stores.base import MAX_SAMPLE_BYTES, Columns, FileStore, part_of

_SUFFIX = re.compile(r"\.(tfrecords?|tfrec)(\.gz)?$", re.IGNORECASE)
# What the images and labels of ImageNet and TF-Slim are called, then of others; and the lists that hold them.
_USUAL = {"image": ("image/encoded", "image", "image_raw"), "label": ("image/class/label", "label")}
_KINDS = {"image": "bytes", "label": "int64"}
_NUM_THREADS = 4

_HEADER, _CRC = struct.Struct("<QI"), struct.Struct("<I")
_COMPRESSED = {b"\x1f\x8b": "GZIP", **dict.fromkeys((b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), "ZLIB")}

# tensorflow/core/example/{feature,example}.proto, as protobuf's compiler describes it.
_LIST = '{{ name: "{}" field {{ name: "value" number: 1 label: LABEL_REPEATED type: {} }} }}'
_FIELD = 'field {{ name: "{}" number: {} label: LABEL_OPTIONAL type_name: ".raypipe.{}" {} }}'
_PROTO = f"""
name: "raypipe.proto" package: "raypipe" syntax: "proto3"
message_type {_LIST.format("BytesList", "TYPE_BYTES")}
message_type {_LIST.format("FloatList", "TYPE_FLOAT")}
message_type {_LIST.format("Int64List", "TYPE_INT64")}
message_type {{
  name: "Feature" oneof_decl {{ name: "kind" }}
  {_FIELD.format("bytes_list", 1, "BytesList", "oneof_index: 0")}
  {_FIELD.format("float_list", 2, "FloatList", "oneof_index: 0")}
  {_FIELD.format("int64_list", 3, "Int64List", "oneof_index: 0")}
}}
message_type {{
  name: "Features"
  field {{ name: "feature" number: 1 label: LABEL_REPEATED type_name: ".raypipe.Features.FeatureEntry" }}
  nested_type {{
    name: "FeatureEntry" options {{ map_entry: true }}
    field {{ name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }}
    {_FIELD.format("value", 2, "Feature", "")}
  }}
}}
message_type {{ name: "Example" {_FIELD.format("features", 1, "Features", "")} }}
"""


def is_tfrecord(name: str) -> bool:
    """Whether a file's name is one of TFRecord files: *.tfrecord, *.tfrecords, *.tfrec, NAME-00000-of-01024."""
    part = PART_OF.match(name)
    return bool(_SUFFIX.search(name)) or (part is not None and part.end() == len(name))


class TFRecordStore(FileStore["_Opened"]):
    """A store in TFRecord files, sorted by name. Labels are as they stand: ImageNet's begin at 1.

    A record over 512 MiB, or whose checksum is wrong, or that is no Example with one image, is an image None
    and a label 0. An Example without its label raises StoreError.

    Args:
        address: a file, a folder, or a pattern of files, see `raypipe.stores.addresses`; a relative path is made
            absolute, since other processes have other folders.
        image_column: the feature that becomes `image`; empty = `image/encoded`, `image` or `image_raw`.
        label_column: the feature that becomes `label`; empty = `image/class/label` or `label`, or, where there
            is none, a store without labels.
    """

    def __init__(self, address: str | Path, image_column: str = "", label_column: str = "") -> None:
        super().__init__(address, image_column, label_column)

    def _open(self) -> _Opened:
        paths = [file.address for file in list_files(self.address, is_tfrecord, "TFRecord")]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            files = list(pool.map(_scan, paths))
        offsets = np.cumsum([0] + [len(file.starts) - 1 for file in files], dtype=np.int64)
        if not offsets[-1]:
            raise StoreError(f"{self.address} has no records")
        return _Opened(files, offsets, _chosen(self.address, files, *self._options))


@dataclass(frozen=True)
class _File:
    """One file: where the data of its records begin, int64, and where those of one more would; and a hash over the
    records' lengths and checksums."""

    path: str
    starts: np.ndarray
    digest: bytes


@dataclass(frozen=True)
class _Opened:
    """What is known of the files: `offsets` int64 of shape (num_files + 1,); `features`, column → its name."""

    files: list[_File]
    offsets: np.ndarray
    features: dict[str, str]
    classes = groups = None

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.features)

    @property
    def fingerprint(self) -> str:
        """Hash over the lengths and checksums of all records, and over the features' names."""
        names = repr(sorted(self.features.items())).encode()
        return hashlib.blake2b(names + b"".join(file.digest for file in self.files), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        images: list[bytes | None] = [None] * len(indices)
        labels = np.zeros(len(indices), np.int64)
        order = np.argsort(indices, kind="stable")
        bounds = np.searchsorted(indices[order], self.offsets)
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            file = self.files[number]
            with _reading(file.path) as descriptor:
                for position in order[bounds[number] : bounds[number + 1]].tolist():
                    row = int(indices[position] - self.offsets[number])
                    images[position], labels[position] = _sample(file, descriptor, row, self.features)
        result = {"image": images, "label": labels}
        return {name: result[name] for name in columns}

    def sample_name(self, index: int) -> str:
        number, record = part_of(self.offsets, index)
        return f"{self.files[number].path}, record {record}"


def _scan(path: str) -> _File:
    """Find the records of a file by their lengths, all of whose checksums must be right.

    Raises:
        StoreError: it cannot be read, is compressed, damaged or truncated, or a library is missing.
    """
    starts, digest = [_HEADER.size], hashlib.blake2b(digest_size=16)
    crc32c = _crc32c()
    with _reading(path) as descriptor:
        num_bytes, at = os.fstat(descriptor).st_size, 0
        header = os.pread(descriptor, _HEADER.size, 0)
        while at < num_bytes:
            if len(header) < _HEADER.size:
                raise StoreError(f"{path} is truncated within a header at byte {at}; copy it again")
            size, checksum = _HEADER.unpack(header)
            if _masked(crc32c(header[:8])) != checksum:
                method = _COMPRESSED.get(header[:2], "") if at == 0 else ""
                if method:
                    raise StoreError(
                        f"{path} is compressed by {method}, which allows no random access: write it again "
                        "without, or, if by GZIP, uncompress it by gunzip"
                    )
                what = "is no TFRecord file" if at == 0 else "is damaged"
                raise StoreError(f"{path} {what}: the checksum of the length at byte {at} is wrong; copy it again")
            if size > num_bytes - at - _HEADER.size - _CRC.size:
                raise StoreError(
                    f"{path} is truncated: a record of {size} bytes at byte {at} of {num_bytes}; copy it again"
                )
            # The checksum of this record's data and the next one's header stand side by side.
            between = os.pread(descriptor, _CRC.size + _HEADER.size, at + _HEADER.size + size)
            digest.update(header[:8] + between[: _CRC.size])
            at, header = at + _HEADER.size + size + _CRC.size, between[_CRC.size :]
            starts.append(at + _HEADER.size)
    return _File(path, np.array(starts, np.int64), digest.digest())


@contextlib.contextmanager
def _reading(path: str) -> Iterator[int]:
    try:
        descriptor = open_regular(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}; check the path") from error


def _features(file: _File, descriptor: int, row: int) -> Any:
    """The features of a record by name; none where it is too long, damaged, or no Example."""
    start = int(file.starts[row])
    size = int(file.starts[row + 1]) - start - _CRC.size - _HEADER.size
    if size > MAX_SAMPLE_BYTES:
        return {}
    data = os.pread(descriptor, size + _CRC.size, start)
    if data[size:] != _CRC.pack(_masked(_crc32c()(data[:size]))):
        return {}
    try:
        return _example_class().FromString(data[:size]).features.feature
    except Exception:  # protobuf's own, or of text that is no UTF-8
        return {}


def _sample(file: _File, descriptor: int, row: int, names: dict[str, str]) -> tuple[bytes | None, int]:
    """Image and label of a record."""
    features = _features(file, descriptor, row)
    found = {
        column: getattr(features[name], f"{_KINDS[column]}_list").value if name in features else []
        for column, name in names.items()
    }
    if len(found["image"]) != 1:
        return None, 0
    if "label" in names and len(found["label"]) != 1:
        raise StoreError(
            f"{file.path}, record {row}, has no label in {names['label']!r}, or several; training on a made-up "
            "one would not be noticed"
        )
    return found["image"][0], found["label"][0] if "label" in names else 0


def _chosen(address: str, files: list[_File], image: str, label: str) -> dict[str, str]:
    """Which features become the columns, by the first record that has any."""
    firsts = ((file, row) for file in files for row in range(min(len(file.starts) - 1, 16)))
    for file, row in firsts:
        with _reading(file.path) as descriptor:
            if features := _features(file, descriptor, row):
                break
    else:
        raise StoreError(
            f"{address} has no tf.train.Example with features among its first records: none can be read"
        )
    kinds = {name: (one.WhichOneof("kind") or "empty").removesuffix("_list") for name, one in features.items()}
    chosen: dict[str, str] = {}
    for column, name in (("image", image), ("label", label)):
        names = [name] if name else _USUAL[column]
        found = [each for each in names if kinds.get(each) == _KINDS[column]]
        if found:
            chosen[column] = found[0]
        elif name or column == "image":
            there = ", ".join(f"{each} ({kind})" for each, kind in sorted(kinds.items()))
            raise StoreError(
                f"{file.path}, record {row} has no feature of {_KINDS[column]} {' or '.join(names)!r} for "
                f"{column}, only: {there:.1000}; set {column}_column"
            )
    return chosen


def _masked(crc: int) -> int:
    """A checksum as TFRecord stores it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c() -> Callable[[bytes], int]:
    try:
        from google_crc32c import value
    except ImportError:
        raise StoreError("TFRecord needs google-crc32c: pip install 'raypipe[tfrecord]'") from None
    return value


@functools.cache
def _example_class() -> Any:
    """tf.train.Example, without TensorFlow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("raypipe.Example"))
