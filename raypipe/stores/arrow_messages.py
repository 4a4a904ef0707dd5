"""Sizes that the messages of an Arrow stream declare, before pyarrow reads them.

pyarrow unpacks a compressed buffer to any size that precedes it, and a column of nulls, or of one value, has
any number of rows without a byte.

    ffffffff | int32 length | metadata, a flatbuffer | body: the buffers
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from raypipe.storage.read_limit import check_read

_CONTINUES = b"\xff" * 4  # precedes the length since version 0.15
_DICTIONARY = 2  # kinds of messages
_BATCH = 3
_OLD_VERSION = 3  # may say that it is compressed in other metadata
_VALUE_BYTES = 8  # least size of a value in memory


def check_batches(where: str, file: Any) -> Iterator[None]:
    """Yield before each batch of a stream: the batch, and the dictionaries before it, are within the limit.

    Args:
        file: the stream, for this function only; only what decides the sizes is read.

    Raises:
        StoreError: a batch unpacks to more than the limit.
        Exception: the stream is damaged.
    """
    of_dictionaries = 0
    while True:
        head = file.read(4)
        if head == _CONTINUES:
            head = file.read(4)
        num_bytes = int.from_bytes(head, "little")
        if not num_bytes:
            return
        check_read(where, num_bytes)
        data = file.read(num_bytes)
        version, kind_at, batch, bytes_at, more, *_ = _fields(data, 0)
        kind = kind_at and data[kind_at]
        body_bytes = bytes_at and _number(data, bytes_at, "<q")
        start = file.tell()
        unpacked_bytes = 0
        if kind in (_DICTIONARY, _BATCH):
            if kind == _DICTIONARY:
                batch = _fields(data, batch)[1]
            is_old = version and _number(data, version, "<h") == _OLD_VERSION
            unpacked_bytes = _unpacked_bytes(data, batch, bool(is_old and more), file)
        if kind == _DICTIONARY:
            of_dictionaries += unpacked_bytes
        in_memory = max(body_bytes, unpacked_bytes, of_dictionaries)
        check_read(where, in_memory, body_bytes, "write smaller batches")
        if kind == _BATCH:
            yield
        file.seek(start + body_bytes)


def _unpacked_bytes(data: bytes, batch: int, may_be_packed: bool, file: Any) -> int:
    """Return the bytes of a batch's compressed buffers, and of its values, in memory."""
    _, values, buffers, compression, *_ = _fields(data, batch)
    num_bytes = _VALUE_BYTES * sum(_pairs(data, values)[:, 0].tolist())
    start = file.tell()
    if compression or may_be_packed:
        for place, stored_bytes in _pairs(data, buffers).tolist():
            file.seek(start + place)
            # -1: this one is not compressed
            size = int.from_bytes(file.read(8), "little", signed=True)
            num_bytes += max(0, size) if stored_bytes else 0
    return num_bytes


def _fields(data: bytes, place: int) -> list[int]:
    """Return the places of the fields of a table, to which an offset leads; 0 = a field has its default."""
    table = place + _number(data, place)
    start = table - _number(data, table, "<i")
    num = _number(data, start, "<H") // 2 - 2
    offsets = np.frombuffer(data, "<u2", num, start + 4).tolist()
    return [offset and table + offset for offset in offsets] + [0] * 5


def _pairs(data: bytes, place: int) -> np.ndarray:
    """Return a list of pairs, int64 (n, 2), to which an offset leads."""
    start = place + _number(data, place)
    num = _number(data, start)
    return np.frombuffer(data, "<i8", 2 * num, start + 4).reshape(-1, 2)


def _number(data: bytes, place: int, code: str = "<I") -> int:
    number: int = struct.unpack_from(code, data, place)[0]
    return number
