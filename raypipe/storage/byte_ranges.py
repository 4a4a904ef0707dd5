"""Byte ranges of an object that are read together, kept in one local file, and read by offset in the object.

object     |  ----A----      --B--   |      bytes 512 to 9,000 and 12,000 to 15,000 are read
file       |----A------B--|                 its ranges one after the other
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile, open_unchanged, short_hash
from raypipe.storage.local_file import OpenFile
from raypipe.storage.retries import in_threads, report_progress

# Twice as for whole shards, see `storage.download`: a group of a tar of 8 MiB, with its headers, is one request.
_REQUEST_BYTES = 16 << 20


@dataclass(frozen=True)
class ByteRanges:
    """Ranges of an object.

    Attributes:
        file: the object as it was when its store was opened.
        ranges: start and end of each range, ascending, without overlaps.
    """

    file: RemoteFile
    ranges: tuple[tuple[int, int], ...]

    @property
    def address(self) -> str:
        return self.file.address

    @cached_property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self.ranges)

    @cached_property
    def key(self) -> str:
        """A name that is equal for the same ranges of the same object."""
        return short_hash(f"{self.file.key} {self.ranges}")

    def fetch(self, descriptor: int) -> None:
        """Fetch the ranges into a local file.

        Raises:
            StoreError: the object has changed since the store was opened, or cannot be read.
        """
        with open_unchanged(self.file) as source:

            def copy(request: tuple[int, int, int]) -> None:
                offset, start, size = request
                content = source.read_at(size, start)
                if len(content) != size:
                    raise StoreError(
                        f"{self.address} has become shorter than {start + size} bytes"
                    )
                os.pwrite(descriptor, content, offset)
                report_progress()

            in_threads(copy, self._requests())

    def _requests(self) -> Iterator[tuple[int, int, int]]:
        """Yield the requests that fetch the ranges: offset in the local file, start in the object, and size."""
        offset = 0
        for start, end in self.ranges:
            for first in range(start, end, _REQUEST_BYTES):
                size = min(_REQUEST_BYTES, end - first)
                yield offset, first, size
                offset += size


class ByteRangesReader:
    """The local file of ranges, read by the offsets that its bytes have in the object; closes with the object."""

    def __init__(self, path: Path, byte_ranges: ByteRanges) -> None:
        self._file = OpenFile(path)
        self._starts = [start for start, _ in byte_ranges.ranges]
        sizes = [end - start for start, end in byte_ranges.ranges]
        # offsets of the ranges in the local file, and its size
        self._offsets = [0, *accumulate(sizes)]

    def pread(self, num_bytes: int, start: int) -> bytes:
        """Return bytes of the object from one of the ranges, fewer at the range's end."""
        number = bisect_right(self._starts, start) - 1
        if number < 0:
            return b""
        offset = self._offsets[number] + start - self._starts[number]
        num_in_range = max(0, self._offsets[number + 1] - offset)
        return self._file.pread(min(num_bytes, num_in_range), offset)
