"""TFRecord files of `tf.train.Example`, a source of `raypipe convert`, which reads them once, in order.

uint64 length | uint32 masked CRC32C of the length | data | uint32 masked CRC32C of the data
"""

from __future__ import annotations

import functools
import io
import itertools
import logging
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raypipe.errors import StoreError
from raypipe.lookup import to_install
from raypipe.storage.local_file import open_regular
from raypipe.stores.addresses import PART_OF, list_files
from raypipe.stores.base import MAX_SAMPLE_BYTES, RENAMED, missing

logger = logging.getLogger(__name__)

_SUFFIX = re.compile(r"\.(tfrecords?|tfrec)(\.gz)?$", re.IGNORECASE)
# What the images and labels of ImageNet and TF-Slim are called, then of others; and the lists that hold them.
_USUAL = {"image": ("image/encoded", "image", "image_raw"), "label": ("image/class/label", "label")}
_KINDS = {"image": "bytes", "label": "int64"}
_MAX_BAD = 16  # records at the start, before one must tell what the features are

_HEADER, _CRC = struct.Struct("<QI"), struct.Struct("<I")

# As much as is read of tensorflow/core/example/{feature,example}.proto, with a name that TensorFlow does not take.
_PROTO = """
name: "raypipe.proto" package: "raypipe" syntax: "proto3"
message_type { name: "Bytes" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Int64s" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type {
  name: "Feature"
  field { name: "bytes" number: 1 label: LABEL_OPTIONAL type_name: ".raypipe.Bytes" }
  field { name: "int64" number: 3 label: LABEL_OPTIONAL type_name: ".raypipe.Int64s" }
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


def is_tfrecord(name: str) -> bool:
    """Whether a file's name is one of TFRecord files: *.tfrecord, *.tfrecords, *.tfrec, NAME-00000-of-01024."""
    part = PART_OF.match(name)
    return bool(_SUFFIX.search(name)) or (part is not None and part.end() == len(name))


def tfrecord_samples(
    address: str | Path, image_column: str = "", label_column: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield the samples of TFRecord files, sorted by name. Labels are kept as stored: ImageNet's begin at 1.

    A record over 512 MiB, with a wrong checksum, or that is not an Example with one image, is {"image": None}, and
    a warning names it.

    Args:
        address: a file, a folder, or a pattern of files, see `raypipe.stores.addresses`.
        image_column: the feature that becomes `image`; empty = `image/encoded`, `image` or `image_raw`.
        label_column: the feature that becomes `label`; empty = `image/class/label` or `label`, or, where there
            is none, no labels.
    """
    paths = [file.address for file in list_files(str(Path(address).absolute()), is_tfrecord, "TFRecord")]
    names: dict[str, str] = {}
    num = 0
    for where, features in (record for path in paths for record in _records(path)):
        num += 1
        if features and not names:
            names = _chosen(where, features, {"image": image_column, "label": label_column})
        if num == _MAX_BAD and not names:
            break
        yield _sample(where, features, names)
    if not names:
        first = f"tf.train.Example with features among its first {num} records: none can be read"
        raise StoreError(f"{address} has no {first if num else 'records'}")


def _records(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each record's place, for errors, and its features by name; none if the record is bad."""
    crc32c, example = _library()
    try:
        with io.BufferedReader(io.FileIO(path, opener=open_regular)) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            for number in itertools.count():
                at = file.tell()
                if at == num_bytes:
                    return
                header = file.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    raise StoreError(f"{path} is truncated within a header at byte {at}; copy it again")
                size, checksum = _HEADER.unpack(header)
                if _masked(crc32c(header[:8])) != checksum:
                    what = "is damaged" if at else "is no TFRecord file, or one that is compressed (gunzip it)"
                    raise StoreError(
                        f"{path} {what}: the checksum of the length at byte {at} is wrong; copy it again"
                    )
                if size > num_bytes - file.tell() - _CRC.size:
                    raise StoreError(
                        f"{path} is truncated: a record of {size} bytes at byte {at} of {num_bytes}; copy it again"
                    )
                features: dict[str, Any] = {}
                if size > MAX_SAMPLE_BYTES:
                    file.seek(size + _CRC.size, os.SEEK_CUR)
                else:
                    data = file.read(size)
                    if file.read(_CRC.size) == _CRC.pack(_masked(crc32c(data))):
                        features = _features(example, data)
                yield f"{path}, record {number}", features
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}; check the path") from error


def _features(example: Any, data: bytes) -> dict[str, Any]:
    try:
        return {entry.key: entry.value for entry in example.FromString(data).features.feature}
    except Exception:  # protobuf's own, or of text that is no UTF-8
        return {}


def _sample(where: str, features: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    found = {
        column: list(getattr(features[name], _KINDS[column]).value) if name in features else []
        for column, name in names.items()
    }
    unforeseen = () if "label" in names else _USUAL["label"]
    if any(name in features and features[name].HasField(_KINDS["label"]) for name in unforeseen):
        raise StoreError(f"{where}, has a label, and the first record has none: name the feature by label_column")
    if len(found.get("image", ())) != 1:
        logger.warning("%s: its checksum is wrong, it is over 512 MiB, or no Example with one image", where)
        return {"image": None}
    if len(found.get("label", [0])) != 1:
        raise StoreError(
            f"{where}, has no label in {names['label']!r}, or several; training on a made-up one would not be "
            "noticed"
        )
    return {column: values[0] for column, values in found.items()}


def _chosen(where: str, features: Mapping[str, Any], given: dict[str, str]) -> dict[str, str]:
    """Column → the name of its feature, by one record."""
    kinds = {
        name: next((kind for kind in _KINDS.values() if one.HasField(kind)), "other")
        for name, one in features.items()
    }
    chosen: dict[str, str] = {}
    for column, name in given.items():
        names = [name] if name else _USUAL[column]
        found = [each for each in names if kinds.get(each) == _KINDS[column]]
        if found:
            chosen[column] = found[0]
        elif name or column == "image":
            there = dict(sorted(kinds.items()))
            raise StoreError(
                missing(where, " or ".join(names), there, RENAMED[column], f"{_KINDS[column]} feature")
            )
    return chosen


def _masked(crc: int) -> int:
    """A checksum as TFRecord stores it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.cache
def _library() -> tuple[Any, Any]:
    """CRC32C of bytes, and the class of an Example, without TensorFlow."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
        from google_crc32c import value
    except ImportError:
        raise StoreError(f"TFRecord needs google-crc32c: {to_install('tfrecord')}") from None
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
    return value, message_factory.GetMessageClass(pool.FindMessageTypeByName("raypipe.Example"))
