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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import join_address, split_address
from raypipe.storage.read_limit import check_read
from raypipe.stores.addresses import PART_OF, list_files
from raypipe.stores.base import (
    MAX_SAMPLE_BYTES,
    ColumnValues,
    others,
    stored_names,
)
from raypipe.stores.lmdb_values import is_image
from raypipe.stores.sources.format_source import (
    NUM_PROBED,
    Asked,
    Source,
    library,
    opened,
    size_of,
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
_SIDES = range(1, 1 << 16)
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
    kinds = {name: _kind_of(traits) for name, traits in sorted(probed.items())}
    names = stored_names(paths[0], kinds, asked._asdict(), _USUAL)
    label = names.get("label", "")
    if kinds[names["image"]] == "text":
        kinds[names["image"]] = "bytes"
    if kinds.get(label) == "numbers, or none":
        kinds[label] = "numbers"  # NaN would be no label
    _check_images(paths[0], names["image"], probed[names["image"]])
    for name in others(kinds, names):
        if kinds[name] == "lists of bytes":
            logger.warning(
                "%s: left out, as lists of bytes fit no column: %s", address, name
            )
        else:
            names[name] = name
    if label == _COUNTED_FROM_1:
        logger.warning(
            "%s: labels are kept as they are stored; in TF-Slim's ImageNet %r begins at 1",
            address,
            _COUNTED_FROM_1,
        )
    columns = {column: (name, kinds[name]) for column, name in names.items()}
    records = itertools.chain.from_iterable(map(_records, paths))
    samples = _samples(records, columns, set(kinds))
    return Source(samples, _classes_of(paths[0], label))


def _traits_of(values: Sequence[Any], features: Mapping[str, list[Any]]) -> set[Any]:
    """Return what the values of a feature are, in words; and the sizes of those that are not an image."""
    traits = set[Any]()
    if len(values) != 1:
        traits.add("lists" if values else "missing")
    for value in values:
        if not isinstance(value, bytes):
            traits.add("number")
            continue
        traits.add("text" if _is_text(value) else "binary")
        is_picture = is_image(value) or _shape_of(value, features)
        traits.add("image" if is_picture else len(value))
    return traits


def _kind_of(traits: set[Any]) -> str:
    """Return what a feature is."""
    are_lists = "lists" in traits
    if traits & {"text", "binary"}:
        kind = "bytes" if traits & {"number", "binary"} else "text"
        return f"lists of {kind}" if are_lists else kind
    if are_lists or "number" not in traits:
        return "lists"
    return "numbers, or none" if "missing" in traits else "numbers"


def _probe(address: str, records: Iterator[_Record]) -> dict[str, set[Any]]:
    """Return the traits of the features of the first records; none of their values stays in memory."""
    probed: dict[str, set[Any]] = {}
    num_records = num_good = num_bytes = 0
    for _, features, record_bytes in records:
        for name in [*probed, *features] if features else ():
            traits = probed.setdefault(name, {"missing"} if num_good else set())
            traits |= _traits_of(features.get(name, []), features)
        num_records += 1
        num_good += bool(features)
        num_bytes += record_bytes
        if num_records >= NUM_PROBED and num_bytes >= _PROBED_BYTES:
            break
    if not probed:
        raise StoreError(
            f"{address} has no tf.train.Example with features among its first {num_records} records"
        )
    return probed


def _check_images(path: str, name: str, traits: set[Any]) -> None:
    """Raise StoreError if the values are raw pixels whose height and width no feature has."""
    sizes = [trait for trait in traits if isinstance(trait, int)]
    if (
        "image" not in traits
        and "binary" in traits
        and len(sizes) == 1 <= sizes[0] // 64
    ):
        raise StoreError(
            f"{path}: the feature {name!r} has {sizes[0]:,} bytes in each record, and they are not an "
            "encoded image: raw pixels need the features height and width, and have 1 or 3 channels. Set "
            "store.image_column, or yield the pixels from your own function, MODULE:NAME"
        )


def _shape_of(
    value: bytes, features: Mapping[str, list[Any]]
) -> tuple[int, int, int] | None:
    """Return height, width and channels of raw pixels, by other features; None for anything else."""
    heights = [features[name][0] for name in _HEIGHTS if features.get(name)]
    widths = [features[name][0] for name in _WIDTHS if features.get(name)]
    for shape in itertools.product(heights, widths, _CHANNELS):
        are_sides = all(side in _SIDES for side in shape)
        if are_sides and math.prod(shape) == len(value):
            return shape
    return None


def _samples(
    records: Iterator[_Record], columns: dict[str, tuple[str, str]], known: set[str]
) -> Iterator[ColumnValues]:
    for where, features, _ in records:
        if not features:
            logger.warning(
                "%s: its checksum is wrong, it is over 512 MiB, or no Example", where
            )
            yield {"image": None}
            continue
        if later := sorted(features.keys() - known):
            known |= features.keys()
            logger.warning(
                "%s: left out, as none of the first records has them: %s. Convert from your own function, "
                "MODULE:NAME, to keep them",
                where,
                ", ".join(later),
            )
        sample = {
            column: _value(where, name, kind, features.get(name, []))
            for column, (name, kind) in columns.items()
        }
        image = sample["image"]
        if image and not is_image(image) and (shape := _shape_of(image, features)):
            sample["image"] = np.frombuffer(image, np.uint8).reshape(shape)
        yield sample


def _records(path: str) -> Iterator[_Record]:
    """Yield the records of a file; raise StoreError if a length is damaged, or the file is truncated."""
    with opened(path) as file:
        head = file.peek(_HEADER.size)[: _HEADER.size]
        stored_bytes = size_of(file)
        content: Any = file
        max_bytes = min(MAX_SAMPLE_BYTES, stored_bytes)
        # a length may look like gzip
        if head.startswith(_GZIP) and head[8:] != _checksum(head[:8]):
            content = gzip.GzipFile(fileobj=file)
            max_bytes = MAX_SAMPLE_BYTES
        for number in itertools.count():
            header = content.read(_HEADER.size)
            if not header:
                return
            num_bytes = _length(header, path, number)
            where = f"{path}, record {number}"
            data = b""
            if num_bytes <= max_bytes:
                check_read(f"{where}, in parts,", _COPIES * num_bytes, stored_bytes)
                data = content.read(num_bytes)
            else:
                content.seek(num_bytes, io.SEEK_CUR)
            checksum = content.read(_CRC.size)
            if len(checksum) < _CRC.size:
                raise StoreError(
                    f"{path} is truncated in record {number}, of {num_bytes} bytes; copy it again"
                )
            is_whole = checksum == _checksum(data)
            yield where, _features(data) if is_whole else {}, num_bytes


def _length(header: bytes, path: str, number: int) -> int:
    """Return the number of bytes of a record; raise StoreError if its header is damaged or cut off."""
    if header[8:] != _checksum(header[:8]):
        damage = "is damaged" if number else "is no TFRecord file, or is damaged"
        raise StoreError(
            f"{path} {damage}, or is truncated: the checksum of the length of record {number} is wrong"
        )
    return _HEADER.unpack(header)[0]


def _features(data: bytes) -> dict[str, list[Any]]:
    try:
        features: dict[str, list[Any]] = {}
        for entry in _example().FromString(data).features.feature:
            kind = entry.value.WhichOneof("kind")
            features[entry.key] = list(getattr(entry.value, kind).value) if kind else []
        return features
    except Exception:  # protobuf's own, or of text that is not UTF-8
        return {}


def _is_text(value: Any) -> bool:
    try:
        text = value.decode()
    except (UnicodeDecodeError, AttributeError):
        return False
    return all(letter.isprintable() or letter.isspace() for letter in text)


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
    if "/" in label:
        return None
    content = (
        read_whole(join_address(split_address(path)[0], f"{label}.labels.txt")) or b""
    )
    return tuple(content.decode(errors="replace").splitlines()) or None


def _checksum(data: bytes) -> bytes:
    """Return a checksum as TFRecord stores it."""
    crc = library("google_crc32c", "TFRecord").value(data)
    return _CRC.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


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
