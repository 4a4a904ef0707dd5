"""JPEGs that no encoder of the environment writes, drawn code by code for fuzz_files.py.

    arithmetic      sequential and progressive, gray and color
    lossless        SOF3
    wild            baseline, with coefficients of all sizes that a Huffman code can say

All of it depends on the generator alone.
"""

from __future__ import annotations

import numpy as np

HEIGHT, WIDTH = 40, 52
SOI, EOI = b"\xff\xd8", b"\xff\xd9"


def segment(marker: int, body: bytes) -> bytes:
    """A segment with its marker and length."""
    return bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2, "big") + body


def frame(marker: int, factors: list[int]) -> bytes:
    """A frame of components with these sampling factors, all by quantization table 0."""
    components = b"".join(
        bytes([number + 1, factor, 0]) for number, factor in enumerate(factors)
    )
    size = HEIGHT.to_bytes(2, "big") + WIDTH.to_bytes(2, "big")
    return segment(marker, b"\x08" + size + bytes([len(factors)]) + components)


def scan(components: list[int], first: int, last: int, codes: bytes) -> bytes:
    """A scan of coefficients first to last, all by tables 0."""
    body = bytes([len(components)]) + b"".join(
        bytes([number, 0]) for number in components
    )
    return segment(0xDA, body + bytes([first, last, 0])) + codes


def arithmetic(
    rng: np.random.Generator, num_components: int, progressive: bool
) -> bytes:
    """An arithmetic-coded JPEG: a few bytes of codes stand for some picture, whatever they are."""

    def codes() -> bytes:
        return rng.bytes(int(rng.integers(1, 4))).replace(b"\xff", b"\xfe")

    everything = list(range(1, num_components + 1))
    if progressive:
        scans = [scan(everything, 0, 0, codes())]
        scans += [scan([number], 1, 63, codes()) for number in everything]
    else:
        scans = [scan(everything, 0, 63, codes())]
    factors = [0x22, 0x11, 0x11][:num_components]
    tables = segment(0xDB, b"\0" + bytes([8] * 64))
    return (
        SOI
        + tables
        + frame(0xCA if progressive else 0xC9, factors)
        + b"".join(scans)
        + EOI
    )


def lossless(rng: np.random.Generator) -> bytes:
    """A lossless JPEG (SOF3) of RGB: one code for each difference of 0 to 3 bits."""
    table = segment(0xC4, b"\0" + bytes([0, 0, 4, *[0] * 13]) + bytes(range(4)))
    bits = []
    for _ in range(HEIGHT * WIDTH * 3):
        size = int(rng.integers(0, 4))
        bits.append(f"{size:03b}"[-3:] + _value(size, rng))
    return (
        SOI
        + frame(0xC3, [0x11] * 3)
        + table
        + scan([1, 2, 3], 1, 0, _stuffed(bits))
        + EOI
    )


def wild(rng: np.random.Generator, num_comment: int) -> bytes:
    """A gray baseline JPEG of random coefficients, some far beyond those of any picture, behind a comment."""
    symbols = list(range(255))
    dc = segment(0xC4, b"\0" + bytes([0, 0, 0, 0, 16, *[0] * 11]) + bytes(range(16)))
    ac = segment(0xC4, b"\x10" + bytes([0] * 8 + [255] + [0] * 7) + bytes(symbols))
    sizes = [0, 1, 1, 2, 3, 5, 8, 10, 11, 15] if num_comment else [0, 1, 1, 2, 3]
    bits = []
    for _ in range(-(-HEIGHT // 8) * -(-WIDTH // 8)):
        size = int(rng.choice(sizes[:6]))
        bits += [f"{size:05b}", _value(size, rng)]
        position = 1
        while position < 64 and rng.random() < 0.9:
            size, run = (
                int(rng.choice(sizes[1:])),
                int(rng.integers(0, min(8, 64 - position))),
            )
            bits += [f"{run << 4 | size:09b}", _value(size, rng)]
            position += run + 1
        if position < 64:
            bits.append(f"{0:09b}")
    tables = segment(0xDB, b"\0" + bytes([1] * 64)) + dc + ac
    return (
        SOI
        + segment(0xFE, bytes(num_comment))
        + frame(0xC0, [0x11])
        + tables
        + scan([1], 0, 63, _stuffed(bits))
        + EOI
    )


def _value(size: int, rng: np.random.Generator) -> str:
    return format(int(rng.integers(0, 1 << size)), f"0{size}b") if size else ""


def _stuffed(bits: list[str]) -> bytes:
    stream = "".join(bits)
    stream += "1" * (-len(stream) % 8)
    return int(stream, 2).to_bytes(len(stream) // 8, "big").replace(b"\xff", b"\xff\0")
