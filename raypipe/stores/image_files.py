"""The content of image files, at local paths and URIs."""

from __future__ import annotations

import io
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property

from raypipe.errors import StoreError
from raypipe.storage.filesystem import errors_as, is_remote, open_filesystem
from raypipe.storage.local_file import open_regular, written_facts
from raypipe.storage.retries import in_threads
from raypipe.stores.base import MAX_SAMPLE_BYTES, hash_of_facts


def read_files(
    addresses: Sequence[str], sizes: Iterable[int] = itertools.repeat(-1)
) -> list[bytes | None]:
    """Return the contents of files; None for one that is not there, or over 512 MiB.

    Args:
        sizes: bytes of each remote file, -1 = unknown; another size than that raises StoreError.
    """
    files = zip(addresses, sizes, strict=False)
    if not any(map(is_remote, addresses)):
        return [_bytes_of(path) for path, _ in files]
    return in_threads(lambda file: _object(*file), files)


def _bytes_of(path: str) -> bytes | None:
    try:
        with io.BufferedReader(io.FileIO(path, opener=open_regular)) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes <= MAX_SAMPLE_BYTES:
                return file.read(num_bytes)
            return None
    except OSError:
        return None


def _object(address: str, num_bytes: int) -> bytes | None:
    if not is_remote(address):
        return _bytes_of(address)
    if num_bytes > MAX_SAMPLE_BYTES:
        return None
    with errors_as(StoreError, f"{address} cannot be read"):
        filesystem, path = open_filesystem(address)
        try:
            with filesystem.open_input_file(path) as file:
                size = file.size()
                if num_bytes not in (-1, size):
                    raise StoreError(
                        f"{address} has changed since the store was opened: {num_bytes} bytes then, {size} now. "
                        "Start a new run, or put the old object back"
                    )
                return file.read(size) if size <= MAX_SAMPLE_BYTES else None
        except FileNotFoundError:
            return None


def written_at(path: str) -> tuple[int, ...]:
    """Return `written_facts` of a file; a size of -1 if unknown. Only fingerprints need it, readers do not."""
    try:
        return written_facts(os.stat(path))  # noqa: PTH116  a Path takes three times as long
    except OSError:
        return (-1,)


class FileFacts(ABC):
    """Facts about the image files of a store: what tells them from others, and what changes when they are written.

    Attributes:
        identity: a hash of what is known without a look at any file.
    """

    identity: str

    @abstractmethod
    def look(self) -> list[tuple[int, ...]]:
        """Return `written_at` of the files."""

    @cached_property
    def _looked_at(self) -> list[tuple[int, ...]]:
        return self.look()

    @property
    def fingerprint(self) -> str:
        return hash_of_facts((self.identity, [facts[0] for facts in self._looked_at]))

    @property
    def written(self) -> str:
        """See `FileStore.written`."""
        return hash_of_facts(self._looked_at)
