"""One shard of MDS: a file of samples, which may be compressed as a whole, and is then unpacked into memory.

uint32 n | uint32 offsets (n + 1) | … | samples, from one offset to the next
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.local_file import OpenFile

MAX_UNPACKED_BYTES = 1 << 30

# Name in an index → pyarrow's.
_CODECS = {"zstd": "zstd", "gz": "gzip"}


@dataclass(frozen=True)
class Shard:
    """One shard, as an index describes it.

    Attributes:
        name: its path below the folder of the index.
        num_samples: that it holds.
        num_bytes: of the file.
        codec: how it is compressed, such as `zstd:7`; empty = not.
        unpacked_bytes: its size, unpacked; only with a codec.
        unpacked_name: a file of the same, uncompressed, which need not be there; empty = none.
    """

    name: str
    num_samples: int
    num_bytes: int
    codec: str = ""
    unpacked_bytes: int = -1
    unpacked_name: str = ""


def check_shard(shard: Shard) -> None:
    """Raise ValueError where an index says what cannot be, or names a file outside its folder."""
    path = PurePosixPath(shard.name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in shard.name or "\\" in shard.name:
        raise ValueError(f"the shard {shard.name!r} is no file below this folder")
    if shard.num_samples < 0 or shard.num_bytes < 0:
        raise ValueError(f"{shard.name} with {shard.num_samples} samples in {shard.num_bytes} bytes")
    if not shard.codec:
        return
    if shard.codec.partition(":")[0] not in _CODECS:
        raise ValueError(f"{shard.name} with the compression {shard.codec!r}; known are {', '.join(_CODECS)}")
    if not 0 <= shard.unpacked_bytes <= MAX_UNPACKED_BYTES:
        raise ValueError(
            f"{shard.name}, which unpacks to {shard.unpacked_bytes:,} bytes: the limit is {MAX_UNPACKED_BYTES:,}"
        )


class OpenShard:
    """A shard whose samples are read by position: from an open file, or from what a compressed one unpacks to.

    Attributes:
        offsets: int64 of shape (num_samples + 1,), ascending.
        num_bytes: that it takes in memory.

    Args:
        name: of the shard, for errors.
        num_samples: that the index gives it.
        source: the file, or its content.
    """

    def __init__(self, name: str, num_samples: int, source: OpenFile | bytes) -> None:
        self._name, self._source = name, source
        self.num_bytes = len(source) if isinstance(source, bytes) else 0
        end = len(source) if isinstance(source, bytes) else os.fstat(source.descriptor).st_size
        table = np.frombuffer(self.part(0, 4 * (num_samples + 2)), "<u4", count=min(num_samples + 2, end // 4))
        needed = int(table[-1]) if len(table) == num_samples + 2 else 4 * (num_samples + 2)
        if needed > end:
            raise StoreError(f"{name} is truncated, or damaged: {end} bytes, needs {needed}; copy it again")
        self.offsets = table[1:].astype(np.int64)
        if table[0] != num_samples or self.offsets[0] < table.nbytes or (np.diff(self.offsets) < 0).any():
            raise StoreError(
                f"{name} is damaged, or another shard than the index describes: it begins with {table[0]} and "
                f"{self.offsets[0]}, for {num_samples} samples; copy it again"
            )

    def part(self, start: int, num_bytes: int) -> bytes:
        """As many bytes from `start` on as there are. Threads may share the shard; it may raise StoreError."""
        if isinstance(self._source, bytes):
            return self._source[start : start + num_bytes]
        try:
            return os.pread(self._source.descriptor, num_bytes, start)
        except OSError as error:
            raise StoreError(f"{self._name} cannot be read: {error}") from error


def open_file(path: str | Path, shard: Shard, name: str) -> OpenFile:
    """The file of a shard; StoreError, with its name for errors, where it cannot be opened or has another size."""
    try:
        file = OpenFile(Path(path))
    except OSError as error:
        raise StoreError(f"{name} cannot be opened: {error}; copy it again") from error
    num_bytes = os.fstat(file.descriptor).st_size
    if shard.num_bytes != num_bytes:
        raise StoreError(
            f"{name} is truncated, or damaged: {num_bytes} bytes, needs {shard.num_bytes}; copy it again"
        )
    return file


def unpacked(file: OpenFile, shard: Shard, name: str) -> bytes:
    """What a compressed shard unpacks to; StoreError where it is damaged."""
    packed_bytes = os.fstat(file.descriptor).st_size
    codec = _CODECS[shard.codec.partition(":")[0]]
    try:
        if packed_bytes > MAX_UNPACKED_BYTES:
            raise ValueError(f"{packed_bytes:,} bytes; the limit is {MAX_UNPACKED_BYTES:,}")
        with pa.CompressedInputStream(pa.BufferReader(file.path.read_bytes()), codec) as stream:
            content = bytes(stream.read(shard.unpacked_bytes + 1))  # a bomb unpacks no further
        if len(content) > shard.unpacked_bytes:
            raise ValueError(f"more than {shard.unpacked_bytes} bytes")
        return content
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{name} cannot be unpacked by {codec}: {error}; copy it again") from error
