"""An object in an object store: what identifies it, ranged reads of it, and its content as it is downloaded."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BufferedRandom, BufferedReader
from pathlib import Path

import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.file_lock import progress
from raypipe.storage.filesystem import explained, open_filesystem, open_input

_NUM_REQUESTS = 16  # under way at a time; a store may have thousands of objects
# A ranged read of a download: times _NUM_AHEAD, it is what a process that dies has read for nothing.
PART_BYTES = 8 << 20
# Reads of a download under way at a time: object stores give a connection some 50 to 100 MB/s.
_NUM_AHEAD = 4


@dataclass(frozen=True)
class RemoteFile:
    """An object as it was when its store was opened, or, before it was looked up, as a list of objects has it.

    Attributes:
        address: its URI.
        num_bytes: its size; -1 where that is not known.
        version: the object store's ETag, or the time of its last change: equal as long as the object is the same;
            "" before it was looked up.
        digest: `digest_of_file` of its content, where whoever wrote it has recorded that; else "".
    """

    address: str
    num_bytes: int = -1
    version: str = ""
    digest: str = ""

    def checked(self, found: RemoteFile) -> RemoteFile:
        """What is there, with the digest that it should have; raises StoreError where it has another size."""
        if self.num_bytes not in (-1, found.num_bytes):
            raise StoreError(
                f"{self.address} has {found.num_bytes} bytes, and was written with {self.num_bytes}: ingest it "
                "again"
            )
        return replace(found, digest=self.digest)

    def check_same(self, found: RemoteFile) -> None:
        """Raise StoreError if what is found at the address now is another object."""
        if (found.num_bytes, found.version) != (self.num_bytes, self.version):
            raise StoreError(
                f"{self.address} has changed since the store was opened: {self.num_bytes} bytes of version "
                f"{self.version} then, {found.num_bytes} of {found.version} now. Start a new run, or put the old "
                "object back"
            )


def look_up(address: str) -> RemoteFile:
    """What is at an address: one request.

    Raises:
        StoreError: nothing, or it cannot be reached.
    """
    with opened(address) as (_, found):
        return found


def look_up_all(addresses: list[str]) -> list[RemoteFile]:
    """What is at each address: one request each, many at a time; see `look_up`."""
    with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
        return list(pool.map(look_up, addresses))


@contextlib.contextmanager
def opened(address: str) -> Iterator[tuple[pa.NativeFile, RemoteFile]]:
    """An object, open for ranged reads, and what it is; within, errors of the file system are StoreErrors."""
    with explained(StoreError, f"{address} cannot be read"):
        filesystem, path = open_filesystem(address)
        try:
            file = open_input(filesystem, path)
        except FileNotFoundError:
            raise StoreError(f"{address} does not exist, or its bucket does not") from None
        with file:
            metadata = {name.lower(): value.decode() for name, value in (file.metadata() or {}).items()}
            version = metadata.get("etag") or str(filesystem.get_file_info(path).mtime_ns)
            yield file, RemoteFile(address, file.size(), version.strip('"'))


def download(wanted: RemoteFile, start: int) -> Iterator[bytes]:
    """Yield an object's bytes from `start` to its end, in order, several parts read at a time.

    Raises:
        StoreError: it is gone, is another one now, or cannot be read.
    """
    at_once = _NUM_AHEAD * PART_BYTES
    with opened(wanted.address) as (source, found), ThreadPoolExecutor(_NUM_AHEAD) as pool:
        wanted.check_same(found)
        for first in range(start, wanted.num_bytes, at_once):
            starts = range(first, min(first + at_once, wanted.num_bytes), PART_BYTES)
            sizes = [min(PART_BYTES, wanted.num_bytes - at) for at in starts]
            for num_bytes, data in zip(sizes, pool.map(source.read_at, sizes, starts), strict=True):
                if len(data) != num_bytes:
                    raise OSError("it has become shorter while it was read")
                yield data
                progress()
    wanted.check_same(look_up(wanted.address))  # ranges of two objects would make a third


def hash_of(file: BufferedReader | BufferedRandom) -> hashlib._Hash:
    """The hash of what follows in a file, to go on with."""
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))


def digest_of_file(path: Path) -> str:
    """blake2b of a file's content, 32 hex digits."""
    with path.open("rb") as file:
        return hash_of(file).hexdigest()
