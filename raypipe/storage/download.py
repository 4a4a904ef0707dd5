"""Downloads of whole objects and of ranges, by concurrent reads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.storage.byte_ranges import ByteRanges
from raypipe.storage.files import RemoteFile, digest_of_file, open_unchanged
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_file import OpenFile
from raypipe.storage.retries import Threads, report_progress

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""Size of a ranged read of what is unpacked."""
# Reads under way at a time, for the whole node: object stores serve 50 to 100 MB/s per connection.
_NUM_AHEAD = 16


def read_pieces(file: RemoteFile) -> Iterator[bytes]:
    """Yield a file's content, local or remote, in order."""
    if is_remote(file.address):
        yield from _read_remote(file)
        return
    source = OpenFile(file.address)
    start = 0
    while piece := source.pread(PART_BYTES, start):
        start += len(piece)
        yield piece


def fetch(file: RemoteFile | ByteRanges, path: Path, descriptor: int) -> None:
    """Fetch an object, or ranges of one, into a local file.

    Args:
        path, descriptor: the file, and its open descriptor.

    Raises:
        StoreError: the object has changed since the store was opened, cannot be read, or is damaged.
    """
    if isinstance(file, ByteRanges):
        file.fetch(descriptor)
        return
    logger.info("fetching %s, %.1f MiB", file.address, file.num_bytes / 2**20)
    ByteRanges(file, ((0, file.num_bytes),)).fetch(descriptor)
    digest = digest_of_file(path) if file.digest else ""
    if digest != file.digest:
        raise StoreError(
            f"{file.address} is damaged: its checksum is {digest}, but it was written with {file.digest}; "
            "convert it again"
        )


def _read_remote(file: RemoteFile) -> Iterator[bytes]:
    """Yield an object's bytes, in order, with several concurrent reads."""
    window = _NUM_AHEAD * PART_BYTES
    with open_unchanged(file) as source, Threads(_NUM_AHEAD) as pool:
        for first in range(0, file.num_bytes, window):
            starts = range(first, min(first + window, file.num_bytes), PART_BYTES)
            sizes = [min(PART_BYTES, file.num_bytes - offset) for offset in starts]
            for num_bytes, data in zip(
                sizes, pool.map(source.read_at, sizes, starts), strict=True
            ):
                if len(data) != num_bytes:
                    raise OSError("the object became shorter during the download")
                yield data
                report_progress()
