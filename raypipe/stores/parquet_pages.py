"""What a row group unpacks to, found in its pages' headers before anything is unpacked.

A footer may say what it likes: what is allocated goes by the header in front of each page, and by how often values
are repeated. So the stored bytes of the wanted columns are read first; their headers are added up; then pyarrow
reads from those bytes and from nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import StoreError

MAX_GROUP_BYTES = 1 << 29
"""What the wanted columns of one row group may unpack to, with the largest page beside them: half of 1 GiB, since
pyarrow doubles what it writes values to. Images hardly shrink: they may unpack to _GROWTH times what is stored."""

_GROWTH = 3  # the values, the largest page, which may be all of them, and what goes beside each
_MAX_STORED_BYTES = 4 << 30

_NEAR_BYTES = 64 << 10  # columns that are no further apart are read as one: a remote file takes long to answer
_PIECE_BYTES, _NUM_THREADS = 32 << 20, 4  # what a request asks for, as pyarrow does
_OLD_HEADER_BYTES = 100  # that old writers did not count, and pyarrow reads in addition (PARQUET-816)
_MAX_DEPTH = 8  # of what is nested in a page's header
_VALUE_BYTES = 21  # of a fixed width: a decimal, its levels, and whether it is null
_TEXT_BYTES = 41  # of a binary value, beside the value: offset, levels, a place in a hash table
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # kinds of pages
_HEADERS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}  # fields of a page's header: that of its kind
_REPEATED, _DELTA_BYTE_ARRAY = {2, 8}, 7  # encodings
# Types of Thrift's compact protocol. Of a field that has another one than it should have, pyarrow takes no notice.
_BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(3, 13)


def bounded(
    file: pa.NativeFile, metadata: pq.FileMetaData, row_group: int, leaves: Sequence[str]
) -> tuple[pa.PythonFile, list[str]]:
    """What pyarrow may read columns of a row group from, and which of them it has to leave in dictionaries.

    Raises:
        StoreError: they would take too much.
        ValueError: a page's header is damaged.
    """
    group, starts = metadata.row_group(row_group), tuple(f"{leaf}." for leaf in leaves)
    chunks = []
    for number in range(group.num_columns):
        column = metadata.schema.column(number)  # pyarrow goes by the schema's names and types, not by the chunk's
        if column.path in leaves or column.path.startswith(starts):
            _check_column(file.size(), metadata, row_group, column.path)
            chunks.append((group.column(number), column))
    ranges = _Ranges(file, [_range(chunk) for chunk, _ in chunks])
    columns = [_look(chunk, ranges, column) for chunk, column in chunks]
    total = max(c.page_bytes for c in columns) + sum(c.num_bytes for c in columns)
    _check(total, "unpacked", max(MAX_GROUP_BYTES, _GROWTH * ranges.num_bytes))
    repeated = [c for c in columns if c.repeated_bytes]
    fits = total + sum(c.repeated_bytes for c in repeated) <= MAX_GROUP_BYTES // 4
    return pa.PythonFile(ranges, "r"), [] if fits else [c.path for c in repeated]


def _check_column(num_bytes: int, metadata: pq.FileMetaData, row_group: int, path: str) -> None:
    """Raise OSError where a column's entry in the footer is damaged.

    `RowGroupMetaData.column` would end the process: pyarrow 26 does not catch what C++ throws there. Its reader
    does, and looks at the entry before it reads anything.
    """
    empty = _Empty(num_bytes)
    reader = pq.ParquetFile(pa.PythonFile(empty, "r"), metadata=metadata)
    try:
        reader.read_row_group(row_group, columns=[path], use_threads=False)
    except (pa.ArrowException, OSError):
        if not empty.was_read:
            raise


class _Empty:
    """A file that says how long it is, and has nothing. An error of its own would be kept by Arrow for ever."""

    closed = False

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self.was_read = num_bytes, False

    def read(self, num_bytes: int) -> bytes:
        self.was_read = True
        return b""

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        return self._num_bytes

    def tell(self) -> int:
        return self._num_bytes

    def close(self) -> None: ...


def _check(num_bytes: int, state: str, limit: int) -> None:
    if num_bytes > limit:
        raise StoreError(
            f"its columns may take {num_bytes:,} bytes {state}, limit is {limit:,}: write smaller row "
            "groups, such as pyarrow.parquet.write_table(…, row_group_size=1000)"
        )


@dataclass(frozen=True)
class _Column:
    """What a column takes: all its values; its largest page and dictionary while it is unpacked; and the values
    for which the dictionary stands, if they are written out."""

    path: str
    num_bytes: int
    page_bytes: int
    repeated_bytes: int


def _look(chunk: pq.ColumnChunkMetaData, ranges: _Ranges, column: pq.ColumnSchema) -> _Column:
    num_values = num_repeated = all_bytes = largest = dictionary = delta = 0
    for kind, num_bytes, num_of_page, encoding in _pages(ranges.part(*_range(chunk)), chunk.num_values):
        all_bytes += num_bytes
        if kind == _DICTIONARY:
            dictionary = max(dictionary, num_bytes)
            continue
        num_values, largest = num_values + num_of_page, max(largest, num_bytes)
        if encoding in _REPEATED:
            num_repeated += num_of_page
        elif encoding == _DELTA_BYTE_ARRAY:  # each value may begin as the one before, and be as long as all
            delta += num_of_page * num_bytes
    num_values = max(num_values, chunk.num_values)
    if column.physical_type == "BYTE_ARRAY":
        values, repeated = all_bytes + delta + num_values * _TEXT_BYTES, num_repeated * dictionary
    else:
        values, repeated = num_values * (_VALUE_BYTES + column.length), 0
    return _Column(chunk.path_in_schema, values, largest + dictionary, repeated)


def _range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """First byte and end of a column's pages, as pyarrow finds them."""
    start, first = chunk.data_page_offset, chunk.dictionary_page_offset
    start = first if first is not None and 0 < first < start else start
    if min(start, chunk.total_compressed_size) < 0:
        raise ValueError(f"column {chunk.path_in_schema!r} has {chunk.total_compressed_size} bytes at {start}")
    return start, start + chunk.total_compressed_size + _OLD_HEADER_BYTES


def _pages(data: memoryview, num_values: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, bytes unpacked, number of values and encoding of each page, until there are as many values."""
    at = seen = 0
    while seen < num_values and at < len(data):
        header: dict[tuple[int, ...], int] = {}
        at = _struct(data, at, (), header)
        kind, num_bytes, stored_bytes = (header.get((number,), -1) for number in (1, 2, 3))
        own = _HEADERS.get(kind, 0)
        num, encoding = header.get((own, 1), 0), header.get((own, 4 if kind == _DATA_V2 else 2), 0)
        if min(num_bytes, stored_bytes, num) < 0:
            raise ValueError(f"a page of {num_bytes} bytes, {stored_bytes} of them stored, and {num} values")
        at += stored_bytes
        seen += num if kind != _DICTIONARY else 0
        yield kind, num_bytes, num, encoding


class _Ranges:
    """A file that has nothing but some ranges of another, read at once."""

    def __init__(self, file: pa.NativeFile, ranges: list[tuple[int, int]]) -> None:
        self._size, self._at, self.closed = file.size(), 0, False
        joined: list[tuple[int, int]] = []
        for start, end in sorted(ranges):
            if joined and start <= joined[-1][1] + _NEAR_BYTES:
                start, end = joined[-1][0], max(joined.pop()[1], end)
            joined.append((start, min(end, self._size)))
        self.num_bytes = sum(end - start for start, end in joined)
        _check(self.num_bytes, "as stored", _MAX_STORED_BYTES)
        self._parts = {start: _read(file, start, end) for start, end in joined if start < end}

    def part(self, start: int, end: int) -> memoryview:
        for first, content in self._parts.items():
            if first <= start < first + len(content):
                return memoryview(content)[start - first : end - first]
        raise ValueError(f"its data would begin at byte {start} of {self._size}")

    def read_buffer(self, num_bytes: int) -> memoryview:
        part = self.part(self._at, self._at + num_bytes)
        self._at += len(part)
        return part

    def read(self, num_bytes: int) -> bytes:
        return bytes(self.read_buffer(num_bytes))

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self._at = at + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self.closed = True


def _read(file: pa.NativeFile, start: int, end: int) -> bytes:
    if end - start <= _PIECE_BYTES:
        return file.read_at(end - start, start)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        pieces = range(start, end, _PIECE_BYTES)
        return b"".join(pool.map(lambda at: file.read_at(min(_PIECE_BYTES, end - at), at), pieces))


# Thrift's compact protocol, as pyarrow reads it


def _struct(data: memoryview, at: int, path: tuple[int, ...], found: dict[tuple[int, ...], int]) -> int:
    """Add the integers of 32 bits of a struct, by the fields' numbers that lead there; return where it ends."""
    number = 0
    while kind := _byte(data, at):
        at += 1
        if kind >> 4:
            number += kind >> 4
        else:
            number, at = _integer(data, at)
        kind &= 15
        if kind == _I32:
            found[(*path, number)], at = _integer(data, at)
        elif kind == _STRUCT and len(path) < _MAX_DEPTH:
            at = _struct(data, at, (*path, number), found)
        elif kind not in (1, 2):  # a boolean is its kind
            at = _skip(data, at, kind, len(path))
    return at + 1


def _skip(data: memoryview, at: int, kind: int, depth: int) -> int:
    if depth > _MAX_DEPTH:
        raise ValueError("a page's header is nested too deeply")
    if kind == _STRUCT:
        return _struct(data, at, (0,) * (depth + 1), {})
    if kind in (_I16, _I32, _I64):
        return _varint(data, at)[1]
    if kind == _BINARY:
        num_bytes, at = _varint(data, at)
        return at + num_bytes
    if kind in (1, 2, _BYTE, _DOUBLE):
        return at + (8 if kind == _DOUBLE else 1)
    size = _byte(data, at)
    if kind in (_LIST, _SET):
        kinds, num, at = [size & 15], size >> 4, at + 1
        if num == 15:
            num, at = _varint(data, at)
    elif kind == _MAP:
        num, at = _varint(data, at)
        kinds = [_byte(data, at) >> 4, _byte(data, at) & 15] if num else []
        at += len(kinds[1:])
    else:
        raise ValueError(f"a page's header has a field of type {kind}")
    for _ in range(num):
        for each in kinds:
            _byte(data, at)  # there is one
            at = _skip(data, at, each, depth + 1)
    return at


def _byte(data: memoryview, at: int) -> int:
    if at >= len(data):
        raise ValueError("it ends within a page's header")
    return data[at]


def _integer(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    value &= 0xFFFFFFFF
    return (value >> 1) ^ -(value & 1), at


def _varint(message: memoryview, at: int) -> tuple[int, int]:
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
