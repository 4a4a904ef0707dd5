"""Byte ranges of an object that are read together, kept in one local file, and read by offset in the object.

object     |  ----A----      --B--   |      bytes 512 to 9,000 and 12,000 to 15,000 are read
file       |----A------B--|                 its ranges one after the other
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile, look_up, open_object, short_hash
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_file import OpenFile
from raypipe.storage.retries import Threads

PART_BYTES = 8 << 20
"""Size of a ranged read. A process that dies loses up to _NUM_AHEAD of them."""
# Reads under way at a time, for the whole node: object stores serve 50 to 100 MB/s per connection.
_NUM_AHEAD = 16


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


def read_pieces(
    file: RemoteFile, ranges: Iterable[tuple[int, int]], part_bytes: int = 0
) -> Iterator[bytes]:
    """Yield the bytes of a file, local or remote, in some ranges, in order and in pieces.

    Args:
        ranges: start and end of each.
        part_bytes: size of a piece; 0 = PART_BYTES.

    Raises:
        StoreError: it has changed since the store was opened, or cannot be read.
    """
    part_bytes = part_bytes or PART_BYTES
    requests = [
        (min(part_bytes, end - first), first)
        for start, end in ranges
        for first in range(start, end, part_bytes)
    ]
    is_object = is_remote(file.address)

    def read(request: tuple[int, int]) -> bytes:
        num_bytes, start = request
        content = source.read_at(num_bytes, start)
        if len(content) != num_bytes:
            raise StoreError(
                f"{file.address} has become shorter than {start + num_bytes} bytes"
            )
        return content

    with open_object(file.address) as (source, current), Threads(_NUM_AHEAD) as pool:
        if is_object:
            file.check_same(current)
        for first in range(0, len(requests), _NUM_AHEAD):
            yield from pool.map(read, requests[first : first + _NUM_AHEAD])
    if is_object:  # nobody mixes bytes of two versions
        file.check_same(look_up(file.address))
