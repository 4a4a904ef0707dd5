"""Sizes that the messages of an Arrow stream declare, before pyarrow reads them.

pyarrow unpacks a compressed buffer to any size that precedes it, and a column of nulls, or of one value, has
any number of rows without a byte.

    ffffffff | int32 length | metadata, a flatbuffer | body: the buffers
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

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
        message = _Table(file.read(num_bytes), 0).follow()
        kind = message.number(1, "<B")
        body_bytes = message.number(3, "<q")
        check_read(where, body_bytes, body_bytes)
        start = file.tell()
        if kind in (_DICTIONARY, _BATCH):
            unpacked_bytes = _unpacked_bytes(message, kind, file)
            if kind == _DICTIONARY:
                of_dictionaries += unpacked_bytes
            check_read(where, max(unpacked_bytes, of_dictionaries), body_bytes, _REMEDY)
            if kind == _BATCH:
                yield
        file.seek(start + body_bytes)


_REMEDY = "write smaller batches"


def _unpacked_bytes(message: _Table, kind: int, file: Any) -> int:
    """Return the bytes of a message's compressed buffers, and of its values, in memory."""
    batch = message.table(2)
    if kind == _DICTIONARY:
        batch = batch.table(1)
    num_bytes = _VALUE_BYTES * sum(batch.pairs(1)[:, 0].tolist())
    is_old = message.number(0, "<h") == _OLD_VERSION and message.place(4)
    if not is_old and not batch.place(3):
        return num_bytes
    start = file.tell()
    for place, stored_bytes in batch.pairs(2).tolist():
        if stored_bytes:
            file.seek(start + place)
            # -1: this one is not compressed
            num_bytes += max(0, int.from_bytes(file.read(8), "little", signed=True))
    return num_bytes


class _Table(NamedTuple):
    """A table of a flatbuffer: the bytes, and where it begins in them."""

    data: bytes
    start: int

    def place(self, field: int) -> int:
        """Return where a field is; 0 = it has its default."""
        offsets = self.start - self._read("<i", self.start)
        offset = 0
        if 6 + 2 * field <= self._read("<H", offsets):
            offset = self._read("<H", offsets + 4 + 2 * field)
        return offset and self.start + offset

    def number(self, field: int, code: str) -> int:
        place = self.place(field)
        return self._read(code, place) if place else 0

    def table(self, field: int) -> _Table:
        return _Table(self.data, self.place(field)).follow()

    def follow(self) -> _Table:
        """Return the table to which an offset leads."""
        return _Table(self.data, self.start + self._read("<I", self.start))

    def pairs(self, field: int) -> np.ndarray:
        """Return a list of pairs, int64 (n, 2)."""
        start = self.place(field)
        if not start:
            return np.empty((0, 2), np.int64)
        start += self._read("<I", start)
        num = self._read("<I", start)
        return np.frombuffer(self.data, "<i8", 2 * num, start + 4).reshape(-1, 2)

    def _read(self, code: str, start: int) -> int:
        value: int = struct.unpack_from(code, self.data, start)[0]
        return value
