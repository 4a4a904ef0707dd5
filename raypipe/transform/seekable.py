"""Seekable JPEGs: baseline files that the kernel enters at any row of MCUs, with a checksum of the whole file.

    check_checksum    finds damage anywhere in a seekable JPEG, also without the kernel
    is_seekable       whether a file is one

csrc/jpeg_seek.h has the layout, and `raypipe.commands.copies` makes them. To all other programs such a file is a
JPEG with restart markers.
"""

from __future__ import annotations

import operator
import zlib

from raypipe.errors import SampleError

_TAG = b"raypipe seekable"
_SEGMENTS = (2, 20)  # where the segment begins: first, or behind JFIF's
_CHECKSUM_BYTES = 4


def check_checksum(data: bytes | memoryview) -> None:
    """Raise SampleError where a seekable JPEG is not as it was written; any other file passes."""
    at = _find_checksum(data)
    if at is not None and data[at : at + _CHECKSUM_BYTES] != _checksum(data, at):
        raise SampleError(
            f"damaged JPEG: its checksum is wrong ({len(data)} bytes). If another program has edited the file "
            "since it was made seekable, convert the original again"
        )


def is_seekable(data: bytes) -> bool:
    """True if this is a seekable JPEG, damaged or not."""
    return _find_checksum(data) is not None


def _find_checksum(data: bytes | memoryview) -> int | None:
    """Return where the checksum begins; None: it is not a seekable JPEG. Half of the tag may be damaged."""
    for segment in _SEGMENTS:
        at = segment + 4
        if 2 * sum(map(operator.eq, data[at : at + len(_TAG)], _TAG)) >= len(_TAG):
            return at + len(_TAG)
    return None


def _checksum(data: bytes | memoryview, at: int) -> bytes:
    """CRC-32 of all but the checksum."""
    view = memoryview(data)
    return zlib.crc32(view[at + _CHECKSUM_BYTES :], zlib.crc32(view[:at])).to_bytes(
        _CHECKSUM_BYTES, "big"
    )
