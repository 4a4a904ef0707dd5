"""TFRecord files of `tf.train.Example`, plain or gzip-compressed, without TensorFlow.

    uint64 length | uint32 masked CRC32C of the length | data | uint32 masked CRC32C of the data

All features of the first records, 64 and 64 MiB of them, become columns: one value in each is a number, text or
bytes, several are a list. Raw pixels are images if features have their height and width.
Numbers stay as they are stored: `image/class/label` of TF-Slim's ImageNet begins at 1.
"""

from __future__ import annotations

import functools
import gzip
import io
import itertools
import logging
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.files import read_whole
from raypipe.storage.read_limit import check_read
from raypipe.stores.addresses import PART_OF, list_files
from raypipe.stores.base import MAX_SAMPLE_BYTES
from raypipe.stores.lmdb_values import is_image
from raypipe.stores.sources.format_source import (
    NUM_PROBED,
    Asked,
    Source,
    beside,
    explained,
    library,
    opened,
    others,
    size_of,
    stored_as,
)

logger = logging.getLogger(__name__)

_SUFFIX = re.compile(r"\.(tfrecords?|tfrec)(-\d+-of-\d+)?(\.gz)?$", re.IGNORECASE)
_USUAL = {
    "image": ("image/encoded", "image_raw", "jpg", "jpeg", "png", "img"),
    "label": ("image/class/label", "image/label", "class", "cls", "target"),
}
_COUNTED_FROM_1 = "image/class/label"
_PROBED_BYTES = 64 << 20  # records up to here show the kind of each feature
# Usual names of the sides of raw pixels.
_HEIGHTS = ("height", "image/height", "image_height", "rows")
_WIDTHS = ("width", "image/width", "image_width", "cols", "columns")
_CHANNELS = (1, 3)
_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_COPIES = 3  # a record's bytes, the Example and its features
_GZIP = b"\x1f\x8b"

# tensorflow/core/example/{feature,example}.proto, under a name that TensorFlow does not take.
_PROTO = """
name: "raypipe.proto" package: "raypipe" syntax: "proto3"
message_type { name: "Bytes" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Floats" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64s" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  oneof_decl { name: "kind" }
  field { name: "bytes" number: 1 label: LABEL_OPTIONAL oneof_index: 0 type_name: ".raypipe.Bytes" }
  field { name: "float" number: 2 label: LABEL_OPTIONAL oneof_index: 0 type_name: ".raypipe.Floats" }
  field { name: "int64" number: 3 label: LABEL_OPTIONAL oneof_index: 0 type_name: ".raypipe.Int64s" }
}
message_type {
  name: "Entry"
  field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "value" number: 2 label: LABEL_OPTIONAL type_name: ".raypipe.Feature" }
}
message_type {
  name: "Features" field { name: "feature" number: 1 label: LABEL_REPEATED type_name: ".raypipe.Entry" }
}
message_type {
  name: "Example" field { name: "features" number: 1 label: LABEL_OPTIONAL type_name: ".raypipe.Features" }
}
"""

_Record = tuple[str, dict[str, list[Any]], int]
"""Its place, for errors, its features by name, none if the record is bad, and its number of bytes."""


def is_tfrecord(name: str) -> bool:
    """Return whether a file's name is one of TFRecord files: *.tfrecord*, *.tfrec, NAME-00000-of-01024."""
    numbered = PART_OF.match(name)
    if numbered is not None and numbered.end() == len(name):
        return True
    return bool(_SUFFIX.search(name))


def open_tfrecord(address: str, asked: Asked) -> Source:
    """Open TFRecord files, in the order of their names.

    A record over 512 MiB, with a wrong checksum, or that is no Example, is a sample without an image.
    """
    paths = [file.address for file in list_files(address, is_tfrecord, "TFRecord")]
    probed = _probe(address, itertools.chain.from_iterable(map(_records, paths)))
    kinds = {name: facts.kind() for name, facts in sorted(probed.items())}
    names = stored_as(paths[0], kinds, asked, _USUAL)
    if kinds[names["image"]] == "text":
        kinds[names["image"]] = "bytes"
    _check_images(paths[0], names["image"], probed[names["image"]])
    left_out = {
        name for name in others(kinds, names) if kinds[name] == "lists of bytes"
    }
    if left_out:
        logger.warning(
            "%s: left out, as lists of bytes fit no column: %s",
            address,
            ", ".join(sorted(left_out)),
        )
    if names.get("label") == _COUNTED_FROM_1:
        logger.warning(
            "%s: labels are kept as they are stored; in TF-Slim's ImageNet %r begins at 1",
            address,
            _COUNTED_FROM_1,
        )
    names |= {name: name for name in others(kinds, names) if name not in left_out}
    columns = {column: (name, kinds[name]) for column, name in names.items()}
    records = itertools.chain.from_iterable(map(_records, paths))
    samples = _samples(map(_told, records), columns, set(kinds))
    return Source(samples, _classes_of(paths[0], names.get("label", "")))


@dataclass
class _Facts:
    """Facts about a feature in the first records.

    Attributes:
        num_bytes: sizes of its values other than encoded images.
        are_pixels: whether such values had as many bytes as height and width say.
        is_missing: whether a record lacks it.
    """

    is_list: bool = False
    has_values: bool = False
    has_bytes: bool = False
    has_others: bool = False
    has_images: bool = False
    are_pixels: bool = False
    is_missing: bool = False
    num_bytes: set[int] = field(default_factory=set)

    def add(self, values: Sequence[Any], features: Mapping[str, list[Any]]) -> None:
        self.is_list |= len(values) > 1
        self.has_values |= bool(values)
        self.is_missing |= not values
        for value in values:
            if not isinstance(value, bytes):
                self.has_others = True
                continue
            self.has_bytes = True
            self.has_others |= not _is_text(value)
            if is_image(value):
                self.has_images = True
            else:
                self.num_bytes.add(len(value))
                self.are_pixels |= bool(_shape_of(value, features))

    def kind(self) -> str:
        """Return what the feature is."""
        if not self.has_bytes:
            if self.is_list or not self.has_values:
                return "lists"
            return "numbers, or none" if self.is_missing else "numbers"
        kind = "bytes" if self.has_others else "text"
        return f"lists of {kind}" if self.is_list else kind


def _probe(address: str, records: Iterator[_Record]) -> dict[str, _Facts]:
    """Return the features that the first records have; none of their values stays in memory."""
    probed: dict[str, _Facts] = {}
    num_records = num_good = num_bytes = 0
    for _, features, record_bytes in records:
        num_records += 1
        num_bytes += record_bytes
        num_good += bool(features)
        for name in features.keys() - probed.keys():
            probed[name] = _Facts(is_missing=num_good > 1)
        for name, facts in probed.items():
            if features:
                facts.add(features.get(name, []), features)
        if num_records >= NUM_PROBED and num_bytes >= _PROBED_BYTES:
            break
    if not probed:
        raise StoreError(
            f"{address} has no tf.train.Example with features among its first {num_records} records"
        )
    return probed


def _check_images(path: str, name: str, facts: _Facts) -> None:
    """Raise StoreError if the values are raw pixels whose height and width no feature has."""
    is_known = facts.has_images or facts.are_pixels or not facts.has_others
    if not is_known and len(facts.num_bytes) == 1 and min(facts.num_bytes) >= 64:
        raise StoreError(
            f"{path}: the feature {name!r} has {facts.num_bytes.pop():,} bytes in each record, and they are not an "
            "encoded image: raw pixels need the features height and width, and have 1 or 3 channels. Set "
            "store.image_column, or yield the pixels from your own function, MODULE:NAME"
        )


def _shape_of(
    value: bytes, features: Mapping[str, list[Any]]
) -> tuple[int, int, int] | None:
    """Return height, width and channels of raw pixels, by other features; None for anything else."""
    sides = []
    for usual in (_HEIGHTS, _WIDTHS):
        found = (features[name] for name in usual if name in features)
        sides.append(next((side for [side] in found if isinstance(side, int)), 0))
    height, width = sides
    for channels in _CHANNELS:
        if value and height > 0 and height * width * channels == len(value):
            return height, width, channels
    return None


def _samples(
    records: Iterator[_Record], columns: dict[str, tuple[str, str]], known: set[str]
) -> Iterator[dict[str, Any]]:
    known = set(known)
    for where, features, _ in records:
        if later := sorted(features.keys() - known):
            known.update(later)
            logger.warning(
                "%s: left out, as none of the first records has them: %s. Convert from your own function, "
                "MODULE:NAME, to keep them",
                where,
                ", ".join(later),
            )
        yield _sample(where, features, columns)


def _records(path: str) -> Iterator[_Record]:
    """Yield the records of a file; raise StoreError if a length is damaged, or the file is truncated."""
    with opened(path) as file, explained(path):
        content, max_bytes, stored_bytes = _unpacked(file)
        for number in itertools.count():
            header = content.read(_HEADER.size)
            if not header:
                return
            num_bytes = _length(header, path, number)
            data: bytes | None = None
            where = f"{path}, record {number}"
            if num_bytes <= max_bytes:
                check_read(f"{where}, in parts,", _COPIES * num_bytes, stored_bytes)
                data = content.read(num_bytes)
            else:
                _pass_over(content, num_bytes)
            checksum = content.read(_CRC.size)
            is_cut = data is not None and len(data) < num_bytes
            if len(checksum) < _CRC.size or is_cut:
                raise StoreError(
                    f"{path} is truncated in record {number}, of {num_bytes} bytes; copy it again"
                )
            features: dict[str, list[Any]] = {}
            if data is not None and checksum == _checksum(data):
                features = _features(data)
            yield where, features, num_bytes


def _told(record: _Record) -> _Record:
    """Return a record; a bad one is said."""
    where, features, _ = record
    if not features:
        logger.warning(
            "%s: its checksum is wrong, it is over 512 MiB, or no Example", where
        )
    return record


def _unpacked(file: io.BufferedReader) -> tuple[Any, int, int]:
    """Return the records of a file as a file, unpacked, the most bytes of one, and the file's size."""
    head = file.peek(_HEADER.size)[: _HEADER.size]
    stored_bytes = size_of(file)
    # a length may look like gzip
    is_plain = head[8:] == _checksum(head[:8])
    if is_plain or not head.startswith(_GZIP):
        return file, min(MAX_SAMPLE_BYTES, stored_bytes), stored_bytes
    return gzip.GzipFile(fileobj=file), MAX_SAMPLE_BYTES, stored_bytes


def _length(header: bytes, path: str, number: int) -> int:
    """Return the number of bytes of a record; raise StoreError if its header is damaged or cut off."""
    if len(header) < _HEADER.size:
        raise StoreError(
            f"{path} is truncated in the header of record {number}; copy it again"
        )
    if header[8:] != _checksum(header[:8]):
        damage = "is damaged" if number else "is no TFRecord file, or is damaged"
        raise StoreError(
            f"{path} {damage}: the checksum of the length of record {number} is wrong"
        )
    return _HEADER.unpack(header)[0]


def _pass_over(file: Any, num_bytes: int) -> None:
    while num_bytes and (passed := file.read(min(num_bytes, 1 << 20))):
        num_bytes -= len(passed)


def _features(data: bytes) -> dict[str, list[Any]]:
    try:
        entries = _example().FromString(data).features.feature
        kinds = {entry.key: entry.value.WhichOneof("kind") for entry in entries}
        return {
            entry.key: list(getattr(entry.value, kinds[entry.key]).value)
            if kinds[entry.key]
            else []
            for entry in entries
        }
    except Exception:  # protobuf's own, or of text that is not UTF-8
        return {}


def _is_text(value: Any) -> bool:
    try:
        text = value.decode()
    except (UnicodeDecodeError, AttributeError):
        return False
    return all(letter.isprintable() or letter.isspace() for letter in text)


def _sample(
    where: str, features: dict[str, list[Any]], columns: dict[str, tuple[str, str]]
) -> dict[str, Any]:
    if not features:
        return {"image": None}
    sample = {
        column: _value(where, name, kind, features.get(name, []))
        for column, (name, kind) in columns.items()
    }
    image = sample["image"]
    if image and not is_image(image) and (shape := _shape_of(image, features)):
        sample["image"] = np.frombuffer(image, np.uint8).reshape(shape)
    return sample


def _value(where: str, name: str, kind: str, values: list[Any]) -> Any:
    try:
        if kind == "lists of text":
            return [value.decode() for value in values]
        if kind == "lists":
            return values
        if len(values) > 1:
            raise ValueError(f"{len(values)} values")
        value = values[0] if values else None
        if kind == "numbers, or none":
            return math.nan if value is None else float(value)
        if kind == "text" and value is not None:
            return value.decode()
        return value
    except (ValueError, AttributeError) as error:
        raise StoreError(
            f"{where}: the feature {name!r} was {kind}, one in each of the first records, and is not here: "
            f"{error}. Convert the records that you want from your own function, MODULE:NAME"
        ) from None


def _classes_of(path: str, label: str) -> tuple[str, ...] | None:
    """Return the class names that TensorFlow Datasets writes next to its files, LABEL.labels.txt."""
    if label and "/" not in label:
        content = read_whole(beside(path, f"{label}.labels.txt"))
    else:
        content = None
    if content is not None:
        return tuple(content.decode(errors="replace").splitlines()) or None
    return None


def _checksum(data: bytes) -> bytes:
    """Return a checksum as TFRecord stores it."""
    crc = _crc32c()(data)
    return _CRC.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _crc32c() -> Callable[[bytes], int]:
    return library("google_crc32c", "TFRecord").value


@functools.cache
def _example() -> Any:
    """Return the class of an Example."""
    from google.protobuf import (
        descriptor_pb2,
        descriptor_pool,
        message_factory,
        text_format,
    )

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("raypipe.Example")
    )
