"""Compressed files, unpacked in pieces."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from raypipe.errors import StoreError
from raypipe.storage import unpack

CONTENT = np.random.default_rng(0).bytes(300_000) + bytes(200_000)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def pieces(data: bytes, size: int = 1000) -> Iterator[bytes]:
    return (data[first : first + size] for first in range(0, len(data), size))


def unpacked(data: bytes, size: int = 1000) -> bytes:
    return b"".join(unpack.unpack_pieces(pieces(data, size), "a.tar.gz", len(data)))


@pytest.mark.parametrize("kind", PACKERS)
def test_one_stream_and_several_and_padding_come_back_whole(kind: str) -> None:
    pack = PACKERS[kind]
    assert unpacked(pack(CONTENT)) == CONTENT
    several = pack(CONTENT) + pack(b"") + pack(b"end") + bytes(512)
    for size in (7, 1 << 20):
        assert unpacked(several, size) == CONTENT + b"end"


@pytest.mark.parametrize("kind", PACKERS)
def test_a_cut_or_damaged_stream_is_one_error(kind: str) -> None:
    packed = PACKERS[kind](CONTENT)
    with pytest.raises(
        StoreError, match=r"a\.tar\.gz cannot be unpacked: .*copy it again"
    ):
        unpacked(packed[:-20])
    damaged = bytearray(packed)
    damaged[len(packed) // 2] ^= 0xFF
    with pytest.raises(StoreError, match=r"a\.tar\.gz cannot be unpacked"):
        unpacked(bytes(damaged))


@pytest.mark.parametrize("kind", PACKERS)
def test_a_bomb_ends_at_its_limit_and_takes_no_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "LEAST_BYTES", 8 << 20)
    monkeypatch.setenv("RAYPIPE_READ_BYTES", "1")
    bomb = PACKERS[kind](bytes(32 << 20))
    assert unpack.GROWTH * len(bomb) < 32 << 20
    tracemalloc.start()
    total = 0
    with pytest.raises(
        StoreError, match=r"unpacks from [\d,]+ to more than [\d,]+ bytes"
    ):
        for piece in unpack.unpack_pieces(pieces(bomb, 1 << 20), "a.tar.gz", len(bomb)):
            total += len(piece)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total <= max(8 << 20, unpack.GROWTH * len(bomb)) and peak < 16 << 20


def test_a_dictionary_that_takes_gigabytes_is_refused() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    packer = lzma.LZMACompressor(filters=filters)
    try:
        packed = packer.compress(b"x") + packer.flush()
    except MemoryError:
        pytest.skip("no memory to make it")
    with pytest.raises(StoreError, match=r"cannot be unpacked: .*[Mm]emory"):
        unpacked(packed)
