"""JPEGs whose headers are changed by construction: each segment, marker, table and number in turn."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

HEIGHT, WIDTH = 40, 56
SOF, DHT, DQT, DRI, SOS, APP0, APP1, APP2, APP14 = (
    0xC0,
    0xC4,
    0xDB,
    0xDD,
    0xDA,
    0xE0,
    0xE1,
    0xE2,
    0xEE,
)
EOI = b"\xff\xd9"
XMP = b"http://ns.adobe.com/xap/1.0/\0"


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def exif(orientation: int) -> bytes:
    made = Image.Exif()
    made[0x0112] = orientation
    return made.tobytes()


def xmp(orientation: int) -> bytes:
    return (
        XMP
        + b'<x:xmpmeta><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'
        % orientation
    )


def profile(number: int, of: int) -> bytes:
    return b"ICC_PROFILE\0" + bytes([number, of]) + bytes(100)


def saved(mode: str = "RGB", **options: Any) -> bytes:
    pixels = np.random.default_rng(5).integers(0, 256, (5, 7, 3), np.uint8)
    image = (
        Image.fromarray(pixels)
        .resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        .convert(mode)
    )
    out = io.BytesIO()
    image.save(out, "JPEG", quality=90, **options)
    return out.getvalue()


ORIGINALS = {
    "420": lambda: saved(subsampling="4:2:0"),
    "444": lambda: saved(subsampling="4:4:4"),
    "gray": lambda: saved("L"),
    "restarts": lambda: saved(subsampling="4:2:0", restart_marker_rows=1),
    "progressive": lambda: saved(subsampling="4:2:0", progressive=True),
    "RGB": lambda: saved(keep_rgb=True),
    "CMYK": lambda: saved("CMYK"),
}


def parts_of(data: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """(marker, body) of each segment up to the first scan's, and all that is behind."""
    segments, at = [], 2
    while True:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        segments.append((marker, data[at + 4 : at + 2 + length]))
        at += 2 + length
        if marker == SOS:
            return segments, data[at:]


def joined(segments: list[tuple[int, bytes]], rest: bytes) -> bytes:
    return (
        b"\xff\xd8"
        + b"".join(segment(marker, body) for marker, body in segments)
        + rest
    )


def changed(data: bytes) -> Iterator[tuple[str, bytes]]:
    """What was changed, and the file, a thousand times."""
    segments, rest = parts_of(data)
    yield "nothing", data
    yield from _between(data, segments, rest)
    yield from _ends(data, segments, rest)
    for number, (marker, body) in enumerate(segments):
        before, behind = segments[:number], segments[number + 1 :]
        name = f"{marker:x} no. {number}"
        yield (
            f"{name} twice",
            joined([*before, (marker, body), (marker, body), *behind], rest),
        )
        yield f"{name} left out", joined([*before, *behind], rest)
        yield f"{name} first", joined([(marker, body), *before, *behind], rest)
        yield (
            f"{name} last",
            joined([*before, *behind[:-1], (marker, body), *behind[-1:]], rest),
        )
        yield (
            f"{name} behind the scan",
            joined([*before, *behind], rest[:-2] + segment(marker, body) + EOI),
        )
        for new, what in _bodies(marker, body):
            yield f"{name}: {what}", joined([*before, (marker, new), *behind], rest)
        if marker == SOF or marker == 0xC2:
            for other in range(0xC0, 0xD0):
                yield (
                    f"frame {other:x}",
                    joined([*before, (other, body), *behind], rest),
                )
            for sides in (
                (8, 8),
                (HEIGHT, WIDTH + 16),
                (HEIGHT * 2, WIDTH),
                (2000, 3000),
            ):
                second = body[:1] + struct.pack(">HH", *sides) + body[5:]
                yield (
                    f"second frame {sides}",
                    joined([*before, (marker, body), (marker, second), *behind], rest),
                )
                yield (
                    f"frame of {sides} before",
                    joined([*before, (marker, second), (marker, body), *behind], rest),
                )


def _between(
    data: bytes, segments: list[tuple[int, bytes]], rest: bytes
) -> Iterator[tuple[str, bytes]]:
    """Bytes between two segments, and segments that say something of the whole."""
    metadata = {
        "EXIF": segment(APP1, exif(6)),
        "EXIF of garbage": segment(APP1, b"Exif\0\0garbage"),
        "XMP": segment(APP1, xmp(8)),
        "EXIF and XMP": segment(APP1, xmp(8)) + segment(APP1, exif(3)),
        "EXIF in two": segment(APP1, exif(6)[:20])
        + segment(APP1, b"Exif\0\0" + exif(6)[20:]),
        "profile": segment(APP2, profile(1, 1)),
        "profile of two": segment(APP2, profile(2, 2)) + segment(APP2, profile(1, 2)),
        "part of a profile": segment(APP2, profile(1, 2)),
        "profile of none": segment(APP2, profile(0, 0)),
        "profile twice": 2 * segment(APP2, profile(1, 1)),
        **{
            f"Adobe {n}": segment(APP14, b"Adobe\0\x64\0\0\0\0" + bytes([n]))
            for n in (0, 1, 2, 7)
        },
        "JFIF 2": segment(APP0, b"JFIF\0\2\1\0\0\1\0\1\0\0"),
        "JFIF 1": segment(APP0, b"JFIF\0\1\1\0\0\1\0\1\0\0"),
        "JFIF cut": segment(APP0, b"JFIF\0\1"),
        "DNL": segment(0xDC, struct.pack(">H", HEIGHT)),
        **{f"interval {n}": segment(DRI, struct.pack(">H", n)) for n in (0, 1, 3, 9)},
        **{
            f"marker {n:x}": segment(n, b"ab")
            for n in (0x02, 0xBF, 0xC8, 0xCC, 0xDE, 0xDF, 0xE9, 0xF0, 0xFE)
        },
        **{f"bare {n:x}": bytes([0xFF, n]) for n in (0, 1, 0xD0, 0xD7, 0xD8, 0xD9)},
        **{
            f"length {n}": b"\xff\xe5" + struct.pack(">H", n)
            for n in (0, 1, 2, 3, 0xFFFF)
        },
        **{f"{n} fill bytes": b"\xff" * n for n in (1, 2, 7)},
        "zeros": bytes(3),
        "junk": b"junk",
        "junk and fill": b"j\xff\xff",
        "another's header": segment(
            SOF, bytes.fromhex("080010001003012200021101031101")
        ),
        "fill, and a segment": b"\xff\xff\xe1\0\4ab",
        "33 tables": 33 * segment(DRI, b"\0\0"),
    }
    for name, piece in metadata.items():
        for number in range(len(segments) + 1):
            at = len(joined(segments[:number], b""))
            yield f"{name} before no. {number}", data[:at] + piece + data[at:]
        yield f"{name} before the end", data[:-2] + piece + EOI
        yield f"{name} behind the end", data + piece


def _ends(
    data: bytes, segments: list[tuple[int, bytes]], rest: bytes
) -> Iterator[tuple[str, bytes]]:
    codes = len(data) - len(rest)
    for cut in (
        codes,
        codes + 9,
        len(data) - 40,
        len(data) - 3,
        len(data) - 2,
        len(data) - 1,
    ):
        yield f"cut at {cut}", data[:cut]
        yield f"ended at {cut}", data[:cut] + EOI
        yield f"ended early at {cut}", data[:cut] + EOI + data[cut:]
    for name, extra in {
        "itself": data,
        "a byte": b"\0",
        "a marker": b"\xff\xda",
        "FF": b"\xff",
    }.items():
        yield f"{name} behind", data + extra


def _bodies(marker: int, body: bytes) -> Iterator[tuple[bytes, str]]:
    """Other bodies: cut, longer, and with each number that says how to read it changed."""
    yield body[:-1], "cut"
    yield body + b"\0", "longer"
    yield b"", "empty"
    if marker == DHT:
        yield from _tables(body)
        return
    if marker == DQT:
        numbers, values = (0,), (0, 1, 3, 4, 0x10, 0x44)
    elif marker in (SOF, 0xC2):
        numbers, values = (
            tuple(range(len(body))),
            (0, 1, 2, 3, 4, 8, 12, 0x11, 0x12, 0x14, 0x21, 0x22, 0x41, 0x44, 0xFF),
        )
    elif marker == SOS:
        numbers, values = (
            tuple(range(len(body))),
            (0, 1, 2, 3, 4, 0x10, 0x11, 0x22, 0x33, 0x40, 63, 64, 0xFF),
        )
    else:
        return
    for at in numbers:
        for value in values:
            if value != body[at]:
                yield body[:at] + bytes([value]) + body[at + 1 :], f"{value} at {at}"


def _tables(body: bytes) -> Iterator[tuple[bytes, str]]:
    """Huffman tables of each kind that can be wrong, under the number of this one."""
    number, counts = body[:1], body[1:17]
    symbols = body[17 : 17 + sum(counts)]
    behind = body[17 + sum(counts) :]
    ends = {
        "all codes of a length": bytes([2]) + bytes(15),
        "all ones": bytes([1] * 8) + bytes([2]) + bytes(7),
        "one code of ones": bytes([0, 4]) + bytes(14),
        "overfull": bytes([3]) + bytes(15),
        "too long": bytes([1] * 15 + [2]),
        "none": bytes(16),
        "257 codes": bytes([0] * 14 + [255, 2]),
    }
    for name, other in ends.items():
        yield number + other + (symbols * 300)[: sum(other)] + behind, name
    for place in range(16):
        # one more code of each length, which no longer fits in a full table
        other = bytes(count + (at == place) for at, count in enumerate(counts))
        yield (
            number + other + symbols + symbols[:1] + behind,
            f"one more of {place + 1} bits",
        )
    yield number + counts + bytes([16, *symbols[1:]]) + behind, "symbol 16"
    yield number + counts + bytes([255]) * len(symbols) + behind, "symbols 255"
    for other_number in (0, 1, 3, 4, 0x10, 0x13, 0x14, 0x20, 0xFF):
        yield bytes([other_number]) + body[1:], f"number {other_number}"
