"""Parts of an object: byte ranges that are read together, kept in one local file, and read at their old places.

object     |  ----A----      --B--   |      bytes 512 to 9,000 and 12,000 to 15,000 are a part
file       |----A------B--|                 its ranges one after the other
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile, look_up, open_object
from raypipe.storage.local_file import OpenFile
from raypipe.storage.retries import in_threads, report_progress

# Size of one request: as of whole shards, see `storage.local_cache`.
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class ByteRanges:
    """A part of an object.

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
    def name(self) -> str:
        """The name of its file: equal for the same ranges of the same object."""
        text = f"{self.address} {self.file.num_bytes} {self.file.version} {self.ranges}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def fetch(self, target: Path) -> None:
        """Fetch the ranges into a local file of that size.

        Raises:
            StoreError: the object has changed since the store was opened, or cannot be read.
        """
        pieces: list[
            tuple[int, int, int]
        ] = []  # place in the file, start in the object, size
        place = 0
        for start, end in self.ranges:
            for first in range(start, end, _PIECE_BYTES):
                size = min(_PIECE_BYTES, end - first)
                pieces.append((place, first, size))
                place += size
        descriptor = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
        try:
            with open_object(self.address) as (source, current):
                self.file.check_same(current)

                def copy(piece: tuple[int, int, int]) -> None:
                    place, start, size = piece
                    data = source.read_at(size, start)
                    if len(data) != size:
                        raise StoreError(
                            f"{self.address} has become shorter than {start + size} bytes"
                        )
                    os.pwrite(descriptor, data, place)
                    report_progress()

                in_threads(copy, pieces)
            # never mix byte ranges of two versions of an object
            self.file.check_same(look_up(self.address))
        finally:
            os.close(descriptor)


class ByteRangesReader:
    """The local file of a part, read at the places that its bytes have in the object; closes with the object."""

    def __init__(self, path: Path, part: ByteRanges) -> None:
        self._file = OpenFile(path)
        self._starts = [start for start, _ in part.ranges]
        sizes = [end - start for start, end in part.ranges]
        self._places = [0, *accumulate(sizes)]

    def pread(self, num_bytes: int, start: int) -> bytes:
        """Return bytes of the object from one of the part's ranges, fewer at the range's end."""
        number = bisect_right(self._starts, start) - 1
        if number < 0:
            return b""
        place = self._places[number] + start - self._starts[number]
        return self._file.pread(
            max(0, min(num_bytes, self._places[number + 1] - place)), place
        )
