"""The unpacked size of a row group, from its pages' headers, before anything is unpacked.

A footer cannot be trusted: how much is allocated depends on the header of each page, and on how often values are
repeated. So the stored bytes of the wanted columns are read first, and their headers are added up; then pyarrow
reads from those bytes and from nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import StoreError
from raypipe.storage.patience import Threads

MAX_GROUP_BYTES = 1 << 29
"""What the wanted columns of one row group may unpack to, with the largest page beside them: half of 1 GiB, since
pyarrow doubles what it writes values to. Images hardly shrink: they may unpack to _GROWTH times what is stored."""

_GROWTH = 3  # the values, the largest page, which may be all of them, and what goes beside each
_MAX_STORED_BYTES = 4 << 30

_PIECE_BYTES, _NUM_THREADS = 32 << 20, 4  # what a request asks for, as pyarrow does
_OLD_HEADER_BYTES = 100  # that old writers did not count, and pyarrow reads in addition (PARQUET-816)
_MAX_DEPTH = 8  # of what is nested in a page's header
_VALUE_BYTES = 21  # of a fixed width: a decimal, its levels, and whether it is null
_TEXT_BYTES = 41  # of a binary value, beside the value: offset, levels, a place in a hash table
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3  # kinds of pages
_HEADERS = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}  # fields of a page's header: that of its kind
_REPEATED, _DELTA_BYTE_ARRAY = {2, 8}, 7  # encodings
# Types of Thrift's compact protocol. Of a field that has another one than it should have, pyarrow takes no notice.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _STRUCT = *range(1, 9), 12


def bounded(
    file: pa.NativeFile, metadata: pq.FileMetaData, row_group: int, leaves: Sequence[str]
) -> tuple[pa.PythonFile, list[str]]:
    """What pyarrow may read columns of a row group from, and which of them it has to leave in dictionaries.

    StoreError where they would take too much, ValueError where a page's header is damaged.
    """
    group, starts, size = metadata.row_group(row_group), tuple(f"{leaf}." for leaf in leaves), file.size()
    chunks, ranges = [], {}
    for number in range(group.num_columns):
        column = metadata.schema.column(number)  # pyarrow goes by the schema's names and types, not by the chunk's
        if column.path in leaves or column.path.startswith(starts):
            _check_column(size, metadata, row_group, column.path)
            chunk = group.column(number)
            ranges[column.path] = _range(chunk, size)
            chunks.append((chunk, column))
    num_bytes = sum(end - start for start, end in ranges.values())
    _check(num_bytes, "as stored", _MAX_STORED_BYTES)
    with Threads(_NUM_THREADS) as pool:
        reads = {
            start: [
                pool.submit(file.read_at, min(_PIECE_BYTES, end - at), at)
                for at in range(start, end, _PIECE_BYTES)
            ]
            for start, end in ranges.values()
        }
        parts = {start: b"".join(read.result() for read in of_range) for start, of_range in reads.items()}
    sizes = [_sizes(chunk, memoryview(parts[ranges[column.path][0]]), column) for chunk, column in chunks]
    total = max(largest for _, largest, _ in sizes) + sum(values for values, _, _ in sizes)
    _check(total, "unpacked", max(MAX_GROUP_BYTES, _GROWTH * num_bytes))
    fits = total + sum(repeated for _, _, repeated in sizes) <= MAX_GROUP_BYTES // 4
    repeating = [column.path for (_, column), (_, _, repeated) in zip(chunks, sizes, strict=True) if repeated]
    return pa.PythonFile(_Parts(size, parts), "r"), [] if fits else repeating


def _check_column(num_bytes: int, metadata: pq.FileMetaData, row_group: int, path: str) -> None:
    """Raise OSError where a column's entry in the footer is damaged.

    `RowGroupMetaData.column` would end the process: pyarrow 26 does not catch what C++ throws there. Its reader
    does, and looks at the entry before it reads anything.
    """
    empty = _Parts(num_bytes, {})
    reader = pq.ParquetFile(pa.PythonFile(empty, "r"), metadata=metadata)
    try:
        reader.read_row_group(row_group, columns=[path], use_threads=False)
    except (pa.ArrowException, OSError):
        if not empty.was_read:
            raise


class _Parts:
    """A file that says how long it is, and has some parts, by their first bytes. What it lacks reads as nothing,
    since an error of its own would be kept by Arrow for ever."""

    closed = False

    def __init__(self, num_bytes: int, parts: dict[int, bytes]) -> None:
        self._num_bytes, self._parts, self._at, self.was_read = num_bytes, parts, 0, False

    def read(self, num_bytes: int) -> memoryview:
        start = max((start for start in self._parts if start <= self._at), default=0)
        first = self._at - start
        found = memoryview(self._parts.get(start, b""))[first : first + num_bytes]
        self._at, self.was_read = self._at + len(found), True
        return found

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        self._at = at + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None: ...


def _check(num_bytes: int, state: str, limit: int) -> None:
    if num_bytes > limit:
        raise StoreError(
            f"its columns may take {num_bytes:,} bytes {state}, limit is {limit:,}: write smaller row "
            "groups, such as pyarrow.parquet.write_table(…, row_group_size=1000)"
        )


def _sizes(chunk: pq.ColumnChunkMetaData, data: memoryview, column: pq.ColumnSchema) -> tuple[int, int, int]:
    """The bytes of all values of a column; of its largest page and dictionary, while it is unpacked; and of the
    values for which the dictionary stands, if they are written out."""
    num_values = num_repeated = all_bytes = largest = dictionary = delta = 0
    for kind, num_bytes, num_of_page, encoding in _pages(data, chunk.num_values):
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
    return values, largest + dictionary, repeated


def _range(chunk: pq.ColumnChunkMetaData, size: int) -> tuple[int, int]:
    """First byte and end of a column's pages in a file of a size, as pyarrow finds them."""
    start, first = chunk.data_page_offset, chunk.dictionary_page_offset
    start = first if first is not None and 0 < first < start else start
    if not 0 <= start < size or chunk.total_compressed_size < 0:
        raise ValueError(f"column {chunk.path_in_schema!r} has {chunk.total_compressed_size} bytes at {start}")
    return start, min(start + chunk.total_compressed_size + _OLD_HEADER_BYTES, size)


def _pages(data: memoryview, num_values: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, bytes unpacked, number of values and encoding of each page, until there are as many values."""
    reader, seen = _Thrift(data), 0
    while seen < num_values and reader.at < len(data):
        header = reader.value(_STRUCT)
        kind, num_bytes, stored_bytes = (_integer(header, number) for number in (1, 2, 3))
        own = header.get(_HEADERS.get(kind))
        num, encoding = (_integer(own, number, 0) for number in (1, 4 if kind == _DATA_V2 else 2))
        if min(num_bytes, stored_bytes, num) < 0:
            raise ValueError(f"a page of {num_bytes} bytes, {stored_bytes} of them stored, and {num} values")
        reader.at += stored_bytes
        seen += num if kind != _DICTIONARY else 0
        yield kind, num_bytes, num, encoding


def _integer(fields: Any, number: int, default: int = -1) -> int:
    """An integer of a struct's fields, where both are what they should be."""
    value = fields.get(number) if isinstance(fields, dict) else None
    return value if isinstance(value, int) else default


class _Thrift:
    """Values in Thrift's compact protocol, as pyarrow reads them; `at` is where the next one begins."""

    def __init__(self, data: memoryview) -> None:
        self._data, self.at = data, 0

    def value(self, kind: int, depth: int = 0) -> Any:
        """Of a struct the fields that are structs or integers of 32 bits, by number; of these an integer; of all
        others None. Page headers have no lists, sets or maps."""
        if depth > _MAX_DEPTH:
            raise ValueError("a page's header is nested too deeply")
        if kind == _STRUCT:
            fields, number = {}, 0
            while head := self._byte():
                number = number + (head >> 4) if head >> 4 else self._zigzag()
                if head & 15 not in (_TRUE, _FALSE):  # a boolean is its kind
                    fields[number] = self.value(head & 15, depth + 1)
            return fields
        if kind == _I32:
            return self._zigzag()
        if kind in (_BYTE, _DOUBLE):
            self.at += 1 if kind == _BYTE else 8
        elif kind in (_I16, _I64):
            self._varint()
        elif kind == _BINARY:
            num_bytes = self._varint()
            self.at += num_bytes
        else:
            raise ValueError(f"a page's header has a field of type {kind}")
        return None

    def _zigzag(self) -> int:
        value = self._varint() & 0xFFFFFFFF
        return (value >> 1) ^ -(value & 1)

    def _varint(self) -> int:
        """A number in 64 bits without a sign."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & (1 << 64) - 1
        raise ValueError("a number of more than ten bytes")

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise ValueError("it ends within a page's header")
        self.at += 1
        return self._data[self.at - 1]
