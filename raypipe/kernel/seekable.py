"""Seekable JPEGs: baseline files that the kernel enters at any row of MCUs, with a checksum of the whole file.

    is_intact      finds damage anywhere in a seekable JPEG, also without the extension
    is_seekable    whether a file is one

csrc/jpeg_seek.h has the layout. To all other programs such a file is a JPEG with restart markers.
"""

from __future__ import annotations

import operator
import zlib

_TAG = b"raypipe seekable"
_SEGMENTS = (2, 20)  # where the segment begins: first, or behind JFIF's
_CHECKSUM_BYTES = 4


def is_intact(data: bytes | memoryview) -> bool:
    """False where a seekable JPEG is not as it was written; any other file is intact."""
    start = _find_checksum(data)
    if start is None:
        return True
    return data[start : start + _CHECKSUM_BYTES] == _checksum(data, start)


def is_seekable(data: bytes) -> bool:
    """True if this is a seekable JPEG, damaged or not."""
    return _find_checksum(data) is not None


def _find_checksum(data: bytes | memoryview) -> int | None:
    """Return where the checksum begins; None: it is not a seekable JPEG. Half of the tag may be damaged."""
    for segment in _SEGMENTS:
        tag_start = segment + 4
        if 2 * sum(
            map(operator.eq, data[tag_start : tag_start + len(_TAG)], _TAG)
        ) >= len(_TAG):
            return tag_start + len(_TAG)
    return None


def _checksum(data: bytes | memoryview, start: int) -> bytes:
    """CRC-32 of all but the checksum."""
    view = memoryview(data)
    return zlib.crc32(
        view[start + _CHECKSUM_BYTES :], zlib.crc32(view[:start])
    ).to_bytes(_CHECKSUM_BYTES, "big")
