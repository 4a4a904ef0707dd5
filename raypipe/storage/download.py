"""Downloads of whole objects, by concurrent reads of ranges, which continue where a killed process stopped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from io import BufferedRandom

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile, hash_of, open_unchanged
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_file import OpenFile
from raypipe.storage.retries import Threads, report_progress

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""Size of a ranged read. A process that dies loses up to _NUM_AHEAD of them."""
# Reads under way at a time, for the whole node: object stores serve 50 to 100 MB/s per connection.
_NUM_AHEAD = 16


def read_pieces(file: RemoteFile) -> Iterator[bytes]:
    """Yield a file's content, local or remote, in order."""
    if is_remote(file.address):
        yield from _read_remote(file, 0)
        return
    source = OpenFile(file.address)
    start = 0
    while piece := source.pread(PART_BYTES, start):
        start += len(piece)
        yield piece


def download(file: RemoteFile, target: BufferedRandom) -> None:
    """Download an object, or continue a partial download, which a file has from its start on.

    Bytes are written in order, so that the file's length is the progress, and hashed as they arrive. After a
    failure, such as a full disk, they stay for the next attempt.
    """
    logger.info("fetching %s, %.1f MiB", file.address, file.num_bytes / 2**20)
    digest = hash_of(target)
    for piece in _read_remote(file, target.tell()):
        target.write(piece)
        target.flush()
        digest.update(piece)
    if file.digest and digest.hexdigest() != file.digest:
        target.truncate(0)
        raise StoreError(
            f"{file.address} is damaged: its checksum is {digest.hexdigest()}, but it was written with "
            f"{file.digest}; convert it again"
        )


def _read_remote(file: RemoteFile, start: int) -> Iterator[bytes]:
    """Yield an object's bytes from `start` to its end, in order, with several concurrent reads."""
    window = _NUM_AHEAD * PART_BYTES
    with open_unchanged(file) as source, Threads(_NUM_AHEAD) as pool:
        for first in range(start, file.num_bytes, window):
            starts = range(first, min(first + window, file.num_bytes), PART_BYTES)
            sizes = [min(PART_BYTES, file.num_bytes - offset) for offset in starts]
            for num_bytes, data in zip(
                sizes, pool.map(source.read_at, sizes, starts), strict=True
            ):
                if len(data) != num_bytes:
                    raise OSError("the object became shorter during the download")
                yield data
                report_progress()
