"""Where the records of a TFRecord file are: one scan of their lengths, all of whose checksums must be right.

uint64 length | uint32 masked CRC32C of the length | data | uint32 masked CRC32C of the data
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular

_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
HEADER_BYTES, CRC_BYTES = _LENGTH.size + _CRC.size, _CRC.size
_MASK_DELTA = 0xA282EAD8
_COMPRESSED = {
    b"\x1f\x8b": "GZIP",
    b"\x78\x01": "ZLIB",
    b"\x78\x5e": "ZLIB",
    b"\x78\x9c": "ZLIB",
    b"\x78\xda": "ZLIB",
}


@dataclass(frozen=True)
class Records:
    """The records of one file.

    Attributes:
        path: the file.
        starts, lengths: int64 of shape (n,): where the data of each begin, and how many bytes they are.
        digest: blake2b over their lengths and checksums.
    """

    path: str
    starts: np.ndarray
    lengths: np.ndarray
    digest: bytes


def scan(path: str) -> Records:
    """Find the records of a file.

    Raises:
        StoreError: it cannot be read, is compressed, damaged or truncated, or google-crc32c is missing.
    """
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}; check the path") from error
    try:
        return _scan(path, descriptor, crc32c())
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    finally:
        os.close(descriptor)


def _scan(path: str, descriptor: int, crc: Callable[[bytes], int]) -> Records:
    num_bytes = os.fstat(descriptor).st_size
    starts, lengths = array("q"), array("q")
    digest = hashlib.blake2b(digest_size=16)
    at, header = 0, os.pread(descriptor, HEADER_BYTES, 0)
    while at < num_bytes:
        if len(header) < HEADER_BYTES:
            raise StoreError(f"{path} is truncated within a header at byte {at}; copy it again")
        length = header[: _LENGTH.size]
        if masked(crc(length)) != _CRC.unpack_from(header, _LENGTH.size)[0]:
            method = _COMPRESSED.get(header[:2], "") if at == 0 else ""
            if method:
                raise StoreError(
                    f"{path} is compressed by {method}, which allows no random access: write it again without, "
                    "or, if by GZIP, uncompress it by gunzip"
                )
            what = "is no TFRecord file" if at == 0 else "is damaged"
            raise StoreError(f"{path} {what}: the checksum of the length at byte {at} is wrong; copy it again")
        (size,) = _LENGTH.unpack(length)
        start = at + HEADER_BYTES
        if size > num_bytes - start - CRC_BYTES:
            raise StoreError(
                f"{path} is truncated: a record of {size} bytes at byte {at} of {num_bytes}; copy it again"
            )
        starts.append(start)
        lengths.append(size)
        # The checksum of this record's data and the next one's header stand side by side.
        between = os.pread(descriptor, CRC_BYTES + HEADER_BYTES, start + size)
        digest.update(length + between[:CRC_BYTES])
        at, header = start + size + CRC_BYTES, between[CRC_BYTES:]
    return Records(path, np.array(starts, np.int64), np.array(lengths, np.int64), digest.digest())


def is_intact(data: bytes, checksum: bytes) -> bool:
    """Whether a record's data have their checksum, the 4 bytes behind them."""
    return len(checksum) == CRC_BYTES and masked(crc32c()(data)) == _CRC.unpack(checksum)[0]


def masked(crc: int) -> int:
    """A checksum as TFRecord stores it."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def crc32c() -> Callable[[bytes], int]:
    """The checksum's function, of an optional library."""
    try:
        from google_crc32c import value
    except ImportError:
        raise StoreError("TFRecord needs google-crc32c: pip install 'raypipe[tfrecord]'") from None
    return value
