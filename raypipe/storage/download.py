"""The download of one object to a ShardFolder, which goes on where it was broken off."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.file_lock import progress
from raypipe.storage.remote_file import RemoteFile, look_up, opened
from raypipe.storage.shard_folder import ShardFolder, hash_into

# A ranged read: times _NUM_AHEAD, it is what a process that dies has read for nothing.
PART_BYTES = 8 << 20
# Reads under way at a time: object stores give a connection some 50 to 100 MB/s.
_NUM_AHEAD = 4


def fetch(wanted: RemoteFile, folder: ShardFolder) -> None:
    """Download an object to `folder.data`. The caller holds a lock: nobody else writes to the folder.

    It is written in order, so that its length tells how far it came, and hashed as it arrives.

    Raises:
        StoreError: it is gone, is another one now, cannot be read, or does not have the digest that was recorded;
            or the disk is full. What has arrived stays, for the next one who tries.
    """
    digest = hashlib.blake2b(digest_size=16)
    with _on_disk(folder.path):
        folder.reserve(wanted)
        target = cast(BinaryIO, folder.partial.open("ab+", buffering=0))
    with target:
        with _on_disk(folder.path):
            target.seek(0)
            hash_into(digest, target)
        with opened(wanted.address) as (source, found):
            wanted.check_same(found)
            for data in _parts(source, target.tell(), wanted.num_bytes):
                with _on_disk(folder.path):
                    _append(target, data)
                digest.update(data)
                progress()
        wanted.check_same(look_up(wanted.address))  # ranges of two objects would make a third
        with _on_disk(folder.path):
            os.fsync(target.fileno())
    if wanted.digest and digest.hexdigest() != wanted.digest:
        folder.clear()
        raise StoreError(
            f"{wanted.address} has the checksum {digest.hexdigest()}, and was written with {wanted.digest}: it is "
            "damaged; ingest it again"
        )
    with _on_disk(folder.path):
        folder.finish(wanted, digest.hexdigest())


def _parts(source: pa.NativeFile, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes from `start` to `end`, in order, while those that follow are being read."""
    ranges = ((first, min(PART_BYTES, end - first)) for first in range(start, end, PART_BYTES))
    under_way: deque[tuple[int, Future[bytes]]] = deque()
    pool = ThreadPoolExecutor(_NUM_AHEAD)
    try:
        while True:
            for first, num_bytes in itertools.islice(ranges, _NUM_AHEAD - len(under_way)):
                under_way.append((num_bytes, pool.submit(source.read_at, num_bytes, first)))
            if not under_way:
                return
            num_bytes, part = under_way.popleft()
            data = part.result()
            if len(data) != num_bytes:
                raise OSError("it has become shorter while it was read")
            yield data
    finally:
        pool.shutdown(cancel_futures=True)


def _append(file: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


@contextlib.contextmanager
def _on_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be written to: {error}; make room, lower RAYPIPE_CACHE_BYTES, or set RAYPIPE_CACHE "
            "to another disk"
        ) from error
