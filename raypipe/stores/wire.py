"""Protocol buffers as they stand in bytes: the fields of a message, one after the other, none kept.

`tf.train.Example` is all that is read with it. A parser would make objects of every feature of a record, from
bytes that nobody has looked at; here one that says nothing true costs no more than its own bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MAX_FIELDS = 100_000  # of one message: a list of numbers is one field, unless it is written as in 2008
_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


def fields(message: memoryview) -> Iterator[tuple[int, int, int | memoryview]]:
    """Yield number, wire type, and value of each field: an int for VARINT, else bytes.

    Raises:
        ValueError: it is no such message, or has more than 100,000 fields.
    """
    at = num_fields = 0
    while at < len(message):
        num_fields += 1
        if num_fields > _MAX_FIELDS:
            raise ValueError(f"more than {_MAX_FIELDS:,} fields")
        tag, at = varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = varint(message, at)
            yield number, kind, value
            continue
        if kind == BYTES:
            num_bytes, at = varint(message, at)
        elif kind in _FIXED_BYTES:
            num_bytes = _FIXED_BYTES[kind]
        else:
            raise ValueError(f"a field of wire type {kind}")
        if num_bytes > len(message) - at:
            raise ValueError(f"a field of {num_bytes} bytes, where {len(message) - at} are left")
        yield number, kind, message[at : at + num_bytes]
        at += num_bytes


def varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at `at`, in 64 bits without a sign, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ValueError("it ends within a number")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("a number of more than ten bytes")


def signed(value: int) -> int:
    """The int64 whose bits these are."""
    return value - (1 << 64) if value >> 63 else value
