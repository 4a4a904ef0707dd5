"""Files for the fuzzer: JPEGs of all kinds of frames, and what can be done to their bytes, segments and indexes.

    originals       undamaged: each sampling, kind of frame, table and restart interval that a decoder may meet
    mutated         bytes, segments or codes changed: what is put in, twice, moved, left out or filled
    forged          a seekable JPEG whose places lead anywhere, with a checksum that fits
    sealed          a changed seekable JPEG with the checksum that fits

All of it depends on the generator alone.
"""

from __future__ import annotations

import io
import itertools
import re
import zlib
from typing import Any

import numpy as np
from fuzz_drawn import HEIGHT, SOI, WIDTH, arithmetic, frame, lossless, segment, wild
from PIL import Image

TAG = b"raypipe seekable"
OPTIONS: list[dict[str, Any]] = [
    {"quality": 75},
    {"quality": 95},
    {"quality": 100},
    {
        "quality": 90,
        "optimize": True,
    },  # tables of the image's own, with codes of all lengths
    {"quality": 90, "restart_marker_blocks": 1},
    {"quality": 60, "restart_marker_rows": 1},
    {"quality": 80, "progressive": True},
]
_MARKERS = [0x01, *range(0xC0, 0x100)]
_NUMBERS = [0, 1, 2, 3, 4, 0x11, 0x12, 0x21, 0x22, 0x41, 0x44, 0xFF]


def originals() -> list[bytes]:
    """Undamaged images: noise, which uses all coefficients, and smooth ones, in all options and samplings."""
    noise = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    )
    smooth = noise.resize((7, 6)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    images = []
    for image, options, sampling in itertools.product(
        (noise, smooth), OPTIONS, ("4:4:4", "4:2:2", "4:2:0", None)
    ):
        images.append(
            saved(
                image.convert("RGB" if sampling else "L"),
                **options,
                **_sampling(sampling),
            )
        )
    exif = Image.Exif()
    exif[0x0112] = 6
    images.append(
        saved(smooth, exif=exif, icc_profile=bytes(70_000), comment=b"a comment")
    )
    for options in OPTIONS:  # with more in front than an encoder's first buffer holds
        images.append(saved(noise, comment=bytes(5000), **options))
    images.append(saved(noise, keep_rgb=True))
    images.append(saved(smooth.convert("CMYK")))
    images.append(without_tables(saved(smooth)))
    rng = np.random.default_rng(1)
    for num_components, progressive in itertools.product((1, 3), (False, True)):
        images += [arithmetic(rng, num_components, progressive) for _ in range(2)]
    images += [lossless(rng), *(wild(rng, num) for num in (0, 5000, 60_000))]
    return images


def saved(image: Image.Image, **options: Any) -> bytes:
    """A JPEG by Pillow."""
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    return out.getvalue()


def _sampling(name: str | None) -> dict[str, str]:
    return {"subsampling": name} if name else {}


def segments(data: bytes) -> tuple[list[bytes], bytes]:
    """The segments up to the first scan's header, that included, and what follows them."""
    found = []
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        found.append(data[at:end])
        at = end
        if found[-1][1] == 0xDA:
            break
    return found, data[at:]


def without_tables(data: bytes) -> bytes:
    """A file as Motion JPEG has it: the standard's Huffman tables are meant."""
    head, rest = segments(data)
    return SOI + b"".join(one for one in head if one[1] != 0xC4) + rest


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """A file with some bytes, or some segments, other than they were."""
    changed = data
    if rng.random() < 0.02:
        return _with_two_headers(data, rng)
    if rng.random() < 0.5:
        head, rest = segments(data)
        for _ in range(int(rng.integers(1, 4))):
            rest = _change_segments(head, rest, rng)
        changed = SOI + b"".join(head) + rest
    if changed is data or rng.random() < 0.2:
        changed = _change_bytes(changed, rng)
    return changed


def _with_two_headers(data: bytes, rng: np.random.Generator) -> bytes:
    """A fill byte before a segment of 4 bytes: read as a marker, it has a length that leads to another header."""
    head, rest = segments(data)
    marker = int(rng.choice([0xE1, 0xC4, 0xFE]))
    first = SOI + b"\xff" + bytes([0xFF, marker, 0, 4]) + b"ab" + b"".join(head) + rest
    shown = [frame(one[1], [0x11]) if 0xC0 <= one[1] <= 0xC2 else one for one in head]
    return first.ljust(4 + (marker << 8), b"\0") + b"".join(shown) + rest


def _change_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Some bytes changed, lost, put in, or all from one on lost: tables, headers and codes alike."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(2, max(len(changed) - 1, 3)))
        match int(rng.integers(5)):
            case 0 if at < len(changed):
                changed[at] ^= 1 << int(rng.integers(8))
            case 1 if at < len(changed):
                changed[at] = 0xFF
            case 2:
                changed[at:at] = rng.bytes(3)
            case 3:
                del changed[at : at + 2]
            case _ if rng.random() < 0.3:
                del changed[max(at, 20) :]
    return bytes(changed)


def _change_segments(head: list[bytes], rest: bytes, rng: np.random.Generator) -> bytes:
    """One change of the header's segments, in place, or of what follows, which is returned."""
    at, to = (int(place) for place in rng.integers(0, max(len(head), 1), 2))
    if not head:
        return rest
    one = head[at]
    match int(rng.integers(11)):
        case 0:  # twice
            head.insert(to, one)
        case 1:  # fill bytes, before a marker or behind its FF
            head[at] = b"\xff" * int(rng.integers(1, 4)) + one
        case 2:  # elsewhere: tables behind the frame, the frame behind its scan
            head.insert(to, head.pop(at))
        case 3:
            del head[at]
        case 4:  # another kind of frame, or of segment
            frames = [
                number
                for number, other in enumerate(head)
                if other[1:2] and 0xC0 <= other[1] <= 0xCF
            ]
            number = int(rng.choice(frames)) if frames and rng.random() < 0.8 else at
            marker = (
                int(rng.integers(0xC0, 0xD0))
                if rng.random() < 0.8
                else int(rng.choice(_MARKERS))
            )
            head[number] = head[number][:1] + bytes([marker]) + head[number][2:]
        case 5:
            head.insert(to, _new_segment(rng))
        case 6:  # another length than it has
            length = int.from_bytes(one[2:4], "big") + int(
                rng.choice([-2, -1, 1, 2, 64, -64, 32768])
            )
            head[at] = one[:2] + (length % 65536).to_bytes(2, "big") + one[4:]
        case 7:  # a marker alone
            head.insert(to, bytes([0xFF, int(rng.choice([0x01, *range(0xD0, 0xDA)]))]))
        case 8:  # in the codes, between scans, or behind the end
            place = (
                int(rng.integers(0, len(rest) + 1)) if rng.random() < 0.7 else len(rest)
            )
            return (
                rest[:place]
                + (one if rng.random() < 0.5 else _new_segment(rng))
                + rest[place:]
            )
        case 9:  # a restart, the end, or another image in the codes
            place = int(rng.integers(0, len(rest) + 1))
            insert = bytes([0xFF, int(rng.integers(0xD0, 0xDA))])
            return (
                rest[:place]
                + insert
                + (b"".join(head) if rng.random() < 0.1 else b"")
                + rest[place:]
            )
        case _:  # another number in a table, a frame or a scan
            place = int(rng.integers(2, max(len(one), 3)))
            value = int(
                rng.choice(
                    [
                        0,
                        1,
                        2,
                        3,
                        4,
                        0x11,
                        0x12,
                        0x21,
                        0x22,
                        0x41,
                        0x44,
                        0xFF,
                        int(rng.integers(256)),
                    ]
                )
            )
            head[at] = one[:place] + bytes([value]) + one[place + 1 :]
    return rest


def _new_segment(rng: np.random.Generator) -> bytes:
    """A segment that means something, or nothing."""
    match int(rng.integers(8)):
        case 0:  # restarts: none, each, and as many as a row may have
            return segment(
                0xDD, int(rng.choice([0, 1, 3, 4, 7, 65535])).to_bytes(2, "big")
            )
        case 1:
            return segment(
                0xE0,
                b"JFIF\0" + bytes([int(rng.choice([1, 2])), 1, 0, 0, 1, 0, 1, 0, 0]),
            )
        case 2:
            return segment(0xEE, b"Adobe\0d\0\0\0\0" + bytes([int(rng.integers(0, 4))]))
        case 3:
            return segment(
                0xE1,
                b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0",
            )
        case 4:  # a frame of its own in a comment, for a reader that lost its way
            return segment(
                0xFE, frame(0xC0, [0x11]) + rng.bytes(int(rng.integers(0, 40)))
            )
        case 5:
            return segment(
                0xDC, int(rng.choice([0, 1, HEIGHT, 65500])).to_bytes(2, "big")
            )
        case 6:
            return segment(
                0xCC, bytes([int(rng.choice([0, 0x10])), int(rng.integers(256))])
            )
        case _:
            return segment(
                int(rng.choice(_MARKERS)), rng.bytes(int(rng.integers(0, 20)))
            )


def sealed(data: bytes) -> bytes:
    """A changed seekable JPEG with the checksum that fits, where there is a place for one."""
    at = data.find(TAG) + len(TAG)
    if at < len(TAG):
        return data
    return (
        data[:at]
        + zlib.crc32(data[:at] + data[at + 4 :]).to_bytes(4, "big")
        + data[at + 4 :]
    )


def forged(data: bytes, rng: np.random.Generator) -> bytes:
    """A seekable JPEG, sealed, whose places lead anywhere: before its codes, behind them, and back."""
    head, rest = segments(data)
    number = next(number for number, one in enumerate(head) if TAG in one)
    start = head[number].find(TAG) + len(TAG) + 4
    stored = head[number][start:]
    places = [
        int.from_bytes(stored[at : at + 4], "big") for at in range(0, len(stored), 4)
    ]
    if rng.random() < 0.7:  # a decoy of markers, large enough to leave any buffer
        decoy = _decoy(rng)
        head.insert(int(rng.integers(number + 1, len(head))), decoy)
        if rng.random() < 0.8:
            places = [place + len(decoy) for place in places]
    if rng.random() < 0.2:
        rest += _decoy(rng)[4:]
    whole = SOI + b"".join(head) + rest
    restarts = [
        (match.end(), match[0][1] & 7)
        for match in re.finditer(rb"\xff[\xd0-\xd7]", whole)
    ]
    for _ in range(int(rng.integers(1, 4))):
        row = int(rng.integers(len(places)))
        fitting = [place for place, code in restarts if code == (row - 1) % 8] or [0]
        odd = [
            0,
            1,
            2,
            len(whole),
            len(whole) - 1,
            len(whole) - 2,
            2**32 - 1,
            int(rng.integers(len(whole))),
        ]
        others = [*places, *(place + 1 for place in places)]
        places[row] = (
            int(rng.choice((fitting, fitting, odd, others)[int(rng.integers(4))]))
            % 2**32
        )
    if rng.random() < 0.1:
        places = places[: int(rng.integers(len(places) + 1))] + places[:1] * int(
            rng.integers(3)
        )
    body = head[number][4:start] + b"".join(
        place.to_bytes(4, "big") for place in places
    )
    head[number] = segment(0xE9, body)
    return sealed(SOI + b"".join(head) + rest)


def _decoy(rng: np.random.Generator) -> bytes:
    """A comment with restart markers, each before a long run without any marker."""
    body = b""
    for code in rng.permutation(8)[: int(rng.integers(1, 9))].tolist():
        body += bytes([0xFF, 0xD0 + code]) + bytes([int(rng.integers(0xFF))]) * int(
            rng.choice([3, 500, 8000, 60000])
        )
    return segment(0xFE, body[:65533])
