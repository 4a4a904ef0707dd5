"""What can happen to every file: pure functions of its bytes and a random generator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Mutation = Callable[[bytes, np.random.Generator], bytes]

MAGICS = (
    *(
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"RIFF",
        b"BM",
        b"GIF89a",
        b"II*\0",
        b"MM\0*",
    ),
    *(
        b"PAR1",
        b"\x1f\x8b",
        b"PK\x03\x04",
        b"\x80\x04",
        b"\xbe\xef\xc0\xde",
        b"<html>",
        b"\0" * 16,
    ),
)
# At and around what fits one, two, four and eight bytes, with and without a sign.
EDGES = sorted(
    {
        edge + by
        for bits in (0, 7, 8, 15, 16, 31, 32, 63, 64)
        for edge in (1 << bits,)
        for by in (-1, 0, 1)
    }
)


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    """1 to 16 bits."""
    out = bytearray(data)
    for at in rng.integers(0, len(out), rng.integers(1, 17)).tolist():
        out[at] ^= 1 << int(rng.integers(8))
    return bytes(out)


def flip_front(data: bytes, rng: np.random.Generator) -> bytes:
    """1 to 4 bits of the first 64 bytes, where headers are."""
    return flip_within(data, rng, 0, 64)


def flip_within(data: bytes, rng: np.random.Generator, start: int, end: int) -> bytes:
    out = bytearray(data)
    for at in rng.integers(start, min(end, len(out)), rng.integers(1, 5)).tolist():
        out[at] ^= 1 << int(rng.integers(8))
    return bytes(out)


def truncate(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(len(data)))]


def splice(data: bytes, rng: np.random.Generator) -> bytes:
    """A slice is copied over another place, put in there, or cut out."""
    start, at = rng.integers(0, len(data), 2).tolist()
    part = data[start : start + int(rng.integers(1, 200))]
    kind = rng.integers(3)
    if kind == 0:
        return data[:at] + part + data[at + len(part) :]
    return (
        data[:at] + part + data[at:]
        if kind == 1
        else data[:at] + data[at + len(part) :]
    )


def magic(data: bytes, rng: np.random.Generator) -> bytes:
    """Another format's first bytes, over or in front of these."""
    other = MAGICS[int(rng.integers(len(MAGICS)))]
    return other + data[len(other) * int(rng.integers(2)) :]


def garbage(data: bytes, rng: np.random.Generator) -> bytes:
    """A run of random bytes, zeros or ones."""
    at, length = int(rng.integers(len(data))), int(rng.integers(1, 600))
    length = min(length, len(data) - at)
    run = [rng.bytes(length), bytes(length), b"\xff" * length][int(rng.integers(3))]
    return data[:at] + run + data[at + length :]


def number(
    data: bytes, rng: np.random.Generator, start: int = 0, end: int | None = None
) -> bytes:
    """A number of 1, 2, 4 or 8 bytes in either byte order, at any place, that is at the edge of a type."""
    size = 1 << int(rng.integers(4))
    last = min(len(data) if end is None else end, len(data)) - size
    if last <= start:
        return truncate(data, rng)
    at = int(rng.integers(start, last))
    edge = EDGES[int(rng.integers(len(EDGES)))] % (1 << 8 * size)
    return (
        data[:at]
        + edge.to_bytes(size, ("little", "big")[int(rng.integers(2))])
        + data[at + size :]
    )


def number_front(data: bytes, rng: np.random.Generator) -> bytes:
    return number(data, rng, 0, 64)


def page(data: bytes, rng: np.random.Generator, num_bytes: int = 4096) -> bytes:
    """A page is overwritten by garbage, or by another page."""
    num_pages = max(1, len(data) // num_bytes)
    at, other = (rng.integers(0, num_pages, 2) * num_bytes).tolist()
    fill = rng.bytes(num_bytes) if rng.integers(2) else data[other : other + num_bytes]
    return data[:at] + fill + data[at + num_bytes :]


ANY: dict[str, Mutation] = {
    "bit flips": flip,
    "bit flips in front": flip_front,
    "truncation": truncate,
    "splice": splice,
    "wrong magic": magic,
    "garbage": garbage,
    "edge number": number,
    "edge number in front": number_front,
}
