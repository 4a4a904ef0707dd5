"""An object in an object store, as it is now: what identifies it, and ranged reads of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.filesystem import explained, open_filesystem, open_input

_NUM_REQUESTS = 16  # under way at a time; a store may have thousands of objects


@dataclass(frozen=True)
class RemoteFile:
    """An object as it was when its store was opened.

    Attributes:
        address: its URI.
        num_bytes: its size.
        version: the object store's ETag, or the time of its last change: equal as long as the object is the same.
        digest: blake2b of its content, 32 hex digits, where whoever wrote it has recorded that; else "".
    """

    address: str
    num_bytes: int
    version: str
    digest: str = ""

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
