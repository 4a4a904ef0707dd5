"""Compressed files, unpacked piece by piece: gzip, bzip2 and xz, also of several streams one after the other."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from raypipe.errors import StoreError
from raypipe.storage.read_limit import read_limit

LEAST_BYTES = 1 << 30
GROWTH = 20
"""A file may unpack to `LEAST_BYTES` on disk, or to `GROWTH` times its size: images hardly compress, and a
bomb does so a thousandfold. `read_limit` is the limit of memory."""

_CHUNK_BYTES = 1 << 20
_XZ_MEMORY_BYTES = 256 << 20  # `xz -9` takes 65 MiB; the format allows 4 GiB


class _Gzip:
    """A stream of gzip with the methods of `bz2.BZ2Decompressor`."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self.eof = False

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        data = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        self.eof = self._inner.eof
        return data


_KINDS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": _Gzip,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\x00": lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES),
}


def unpack_pieces(
    pieces: Iterator[bytes], name: str, num_bytes: int
) -> Iterator[bytes]:
    """Yield the content of a compressed file in pieces of up to 1 MiB; its first bytes show the format.

    Args:
        pieces: the file.
        name: its name, for errors.
        num_bytes: its size, which limits that of the content.

    Raises:
        StoreError: it is in no known format, is damaged, or unpacks to too much.
    """
    total = 0
    try:
        for piece in _content(pieces, name):
            total += len(piece)
            check_unpacked(name, num_bytes, total)
            yield piece
    except (zlib.error, OSError, EOFError, lzma.LZMAError) as error:
        raise StoreError(
            f"{name} cannot be unpacked: {error}; copy it again"
        ) from error


def check_unpacked(name: str, stored_bytes: int, num_bytes: int) -> None:
    """Raise StoreError if content has unpacked, on disk, to more than it may."""
    limit = max(LEAST_BYTES, GROWTH * stored_bytes, read_limit())
    if num_bytes > limit:
        raise StoreError(
            f"{name} unpacks from {stored_bytes:,} to more than {limit:,} bytes, which images do not: raise "
            "RAYPIPE_READ_BYTES on every node, or unpack it yourself, if you trust it"
        )


def _content(pieces: Iterator[bytes], name: str) -> Iterator[bytes]:
    data = next(pieces, b"")
    make = next(
        (kind for magic, kind in _KINDS.items() if data.startswith(magic)), None
    )
    if make is None:
        raise StoreError(
            f"{name} is not gzip, bzip2 or xz, as its name says: copy it again, or name it *.tar"
        )
    stream = make()
    while True:
        while not stream.eof:
            if stream.needs_input and not data:
                data = next(pieces, b"")
            content = stream.decompress(data, _CHUNK_BYTES)
            if not (content or data or stream.eof) and stream.needs_input:
                raise EOFError("it is truncated")
            yield content
            data = b""
        data = stream.unused_data.lstrip(b"\0")  # tapes and xz pad with zeros
        while not data:
            piece = next(pieces, b"")
            if not piece:
                return
            data = piece.lstrip(b"\0")
        stream = make()
