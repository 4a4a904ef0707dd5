"""Shards of MDS: files of samples. A compressed shard is unpacked into memory as a whole.

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

# Name in an index → name in pyarrow.
_CODECS = {"zstd": "zstd", "gz": "gzip"}


@dataclass(frozen=True)
class Shard:
    """A shard, as an index describes it.

    Attributes:
        name: path below the folder of the index.
        num_samples: number of samples.
        num_bytes: size of the file.
        codec: compression, such as `zstd:7`; empty = not compressed.
        unpacked_bytes: unpacked size; only with a codec.
    """

    name: str
    num_samples: int
    num_bytes: int
    codec: str = ""
    unpacked_bytes: int = -1


def check_shard(shard: Shard) -> None:
    """Raise ValueError if an index has impossible numbers, or names a file outside its folder."""
    path = PurePosixPath(shard.name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in shard.name or "\\" in shard.name:
        raise ValueError(f"the shard {shard.name!r} is not below this folder")
    if shard.num_samples < 0 or shard.num_bytes < 0:
        raise ValueError(f"{shard.name} with {shard.num_samples} samples in {shard.num_bytes} bytes")
    if not shard.codec:
        return
    if shard.codec.partition(":")[0] not in _CODECS:
        raise ValueError(f"{shard.name} has compression {shard.codec!r}; raypipe reads {', '.join(_CODECS)}")
    if not 0 <= shard.unpacked_bytes <= MAX_UNPACKED_BYTES:
        raise ValueError(
            f"{shard.name} unpacks to {shard.unpacked_bytes:,} bytes; the limit is {MAX_UNPACKED_BYTES:,}"
        )


class OpenShard:
    """A shard whose samples are read by position, from an open file or from unpacked content.

    Attributes:
        offsets: int64 of shape (num_samples + 1,), ascending.
        num_bytes: bytes in memory.

    Args:
        name: the shard's name, for errors.
        num_samples: number of samples in the index.
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
                f"{name} is damaged, or not the shard that the index describes: it begins with {table[0]} and "
                f"{self.offsets[0]}, for {num_samples} samples; copy it again"
            )

    def part(self, start: int, num_bytes: int) -> bytes:
        """Return bytes from `start` on, fewer at the end; may raise StoreError. Threads may share the shard."""
        if isinstance(self._source, bytes):
            return self._source[start : start + num_bytes]
        try:
            return os.pread(self._source.descriptor, num_bytes, start)
        except OSError as error:
            raise StoreError(f"{self._name} cannot be read: {error}") from error


def open_file(path: str | Path, shard: Shard, name: str) -> OpenFile:
    """Open the file of a shard; raise StoreError, with `name`, if it cannot be opened or has another size."""
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
    """Return the unpacked content of a compressed shard; raise StoreError if it is damaged."""
    packed_bytes = os.fstat(file.descriptor).st_size
    codec = _CODECS[shard.codec.partition(":")[0]]
    try:
        if packed_bytes > MAX_UNPACKED_BYTES:
            raise ValueError(f"{packed_bytes:,} bytes; the limit is {MAX_UNPACKED_BYTES:,}")
        with pa.CompressedInputStream(pa.BufferReader(file.path.read_bytes()), codec) as stream:
            content = bytes(stream.read(shard.unpacked_bytes + 1))  # the limit stops decompression bombs
        if len(content) > shard.unpacked_bytes:
            raise ValueError(f"more than {shard.unpacked_bytes} bytes")
        return content
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StoreError(f"{name} cannot be unpacked with {codec}: {error}; copy it again") from error
