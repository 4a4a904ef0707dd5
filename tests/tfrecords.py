"""TFRecord files by a writer of the tests' own, for what no other writer writes; and their checksums."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import google_crc32c

Feature = bytes | int | float | list[int]


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + checksum(length) + data + checksum(data)


def checksum(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(value: Feature) -> bytes:
    if isinstance(value, bytes):
        return field(1, field(1, value))
    if isinstance(value, float):
        return field(2, field(1, struct.pack("<f", value)))
    numbers = [value] if isinstance(value, int) else value
    return field(3, field(1, b"".join(map(varint, numbers))))


def example(features: Mapping[str, Feature]) -> bytes:
    entries = (field(1, field(1, name.encode()) + field(2, feature(value))) for name, value in features.items())
    return field(1, b"".join(entries))


def write(path: Path, examples: Iterable[Mapping[str, Feature]]) -> Path:
    path.write_bytes(b"".join(record(example(features)) for features in examples))
    return path
