"""Downloads of whole objects, by concurrent reads of ranges, which continue where a killed process stopped."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile, hash_of, look_up, open_object
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_file import OpenFile, boot_id
from raypipe.storage.retries import Threads, report_progress

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""Size of a ranged read. A process that dies loses up to _NUM_AHEAD of them."""
UNTOUCHED_NS = 0
"""Modification time of a file that is unchanged since its download."""
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


def download(file: RemoteFile, folder: Path) -> None:
    """Download an object to `folder`/data, or continue a partial download.

    Bytes are written in order, so that the file's length is the progress, and hashed as they arrive. After a
    failure, such as a full disk, the partial file stays for the next attempt.
    """
    # The name has the boot id: after a power failure, any part of an older file may be missing.
    partial = folder / f"partial-{boot_id()}"
    logger.info("fetching %s, %.1f MiB", file.address, file.num_bytes / 2**20)
    for old in {folder / "data", *folder.glob("partial-*")} - {partial}:
        old.unlink(missing_ok=True)
    with partial.open("ab+") as target:
        target.seek(0)
        digest = hash_of(target)
        for piece in _read_remote(file, target.tell()):
            target.write(piece)
            target.flush()
            digest.update(piece)
        os.utime(target.fileno(), ns=(UNTOUCHED_NS, UNTOUCHED_NS))
        os.fsync(target.fileno())
    if file.digest and digest.hexdigest() != file.digest:
        partial.unlink()
        raise StoreError(
            f"{file.address} is damaged: its checksum is {digest.hexdigest()}, but it was written with "
            f"{file.digest}; convert it again"
        )
    partial.replace(folder / "data")


def _read_remote(file: RemoteFile, start: int) -> Iterator[bytes]:
    """Yield an object's bytes from `start` to its end, in order, with several concurrent reads."""
    window = _NUM_AHEAD * PART_BYTES
    with open_object(file.address) as (source, current), Threads(_NUM_AHEAD) as pool:
        file.check_same(current)
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
    # never mix byte ranges of two versions of an object
    file.check_same(look_up(file.address))
