"""What encoded images can be made to say: huge sizes, bombs, metadata of garbage."""

from __future__ import annotations

import io
import struct
import zlib

import bombs
import numpy as np
import tifffile
from mutate import EDGES, Mutation, flip, garbage, number, splice, truncate


def exif(rng: np.random.Generator) -> bytes:
    """EXIF that is a directory with random entries, or nothing of the kind."""
    if rng.integers(2):
        return b"Exif\0\0" + rng.bytes(int(rng.integers(0, 300)))
    num = int(rng.integers(0, 50))
    entries = b"".join(
        struct.pack(
            "<HHII",
            int(rng.choice([0x0112, 0x8769, 0x8825, *rng.integers(0, 65536, 2)])),
            *rng.choice([0, 1, 2, 3, 4, 5, 7, 12, 255, 65535], 1).tolist(),
            *rng.choice([0, 1, 8, 255, 1 << 31, (1 << 32) - 1], 2).tolist(),
        )
        for _ in range(num)
    )
    return (
        b"Exif\0\0II*\0\x08\0\0\0"
        + struct.pack("<H", num)
        + entries
        + rng.bytes(int(rng.integers(40)))
    )


def side(rng: np.random.Generator, bits: int) -> int:
    """A side of an image in pixels: mostly huge."""
    return int(
        rng.choice(
            [
                0,
                1,
                60_000,
                13_000,
                (1 << bits) - 1,
                1 << (bits - 1),
                rng.integers(1 << bits),
            ]
        )
    )


# JPEG


def jpeg_size(data: bytes, rng: np.random.Generator) -> bytes:
    """Other sides, precision or number of components in the frame's header."""
    at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    frame = struct.pack(">HH", side(rng, 16), side(rng, 16))
    if not rng.integers(4):
        frame += bytes([int(rng.choice([0, 1, 2, 3, 4, 5, 255]))])
    return data[: at + 5] + frame + data[at + 5 + len(frame) :]


def jpeg_segment(data: bytes, rng: np.random.Generator) -> bytes:
    """The length or the kind of a marker segment."""
    places = [
        at
        for at in range(len(data) - 4)
        if data[at] == 0xFF and data[at + 1] not in (0, 0xFF)
    ]
    at = int(rng.choice(places)) + int(rng.integers(1, 4))
    return data[:at] + rng.bytes(int(rng.integers(1, 3))) + data[at + 2 :]


def jpeg_exif(data: bytes, rng: np.random.Generator) -> bytes:
    body = exif(rng)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]


# PNG


def chunk(kind: bytes, body: bytes) -> bytes:
    return (
        struct.pack(">I", len(body))
        + kind
        + body
        + struct.pack(">I", zlib.crc32(kind + body))
    )


def chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    at, found = 8, []
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def join(parts: list[tuple[bytes, bytes]]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in parts)


def png_checked(data: bytes, rng: np.random.Generator) -> bytes:
    """Any damage within a chunk, whose checksum is then made right."""
    parts = chunks(data)
    at = int(rng.integers(len(parts)))
    kind, body = parts[at]
    if body:
        change = (flip, garbage, number, truncate)[int(rng.integers(4))]
        parts[at] = kind, change(body, rng)
    else:
        parts.insert(int(rng.integers(len(parts))), parts.pop())
    return join(parts)


def png_rows(data: bytes, rng: np.random.Generator) -> bytes:
    """Damage to the rows before they are compressed: filters, pixels, too many and too few of them."""
    parts = [part for part in chunks(data) if part[0] != b"IDAT"]
    rows = zlib.decompress(
        b"".join(body for kind, body in chunks(data) if kind == b"IDAT")
    )
    rows = (flip, garbage, splice, truncate)[int(rng.integers(4))](rows, rng)
    return join([*parts[:-1], (b"IDAT", zlib.compress(rows)), parts[-1]])


def png_size(data: bytes, rng: np.random.Generator) -> bytes:
    """Huge sides over tiny data, any depth and colors."""
    parts = chunks(data)
    depth, color = (
        int(rng.choice([1, 2, 4, 8, 16, 3])),
        int(rng.choice([0, 2, 3, 4, 6, 1])),
    )
    parts[0] = (
        b"IHDR",
        struct.pack(
            ">IIBBBBB",
            side(rng, 32),
            side(rng, 32),
            depth,
            color,
            0,
            0,
            rng.integers(2),
        ),
    )
    return join(parts)


def png_bomb(data: bytes, rng: np.random.Generator) -> bytes:
    """Rows of zeros that fill the declared size: a thousandth of it in the file."""
    width, height = (1 << int(rng.integers(4, 12)), 1 << int(rng.integers(4, 12)))
    if not rng.integers(40):
        width, height = [
            (60_000, 60_000),
            (13_300, 13_300),
            (1 << 20, 170),
            (170, 1 << 20),
        ][int(rng.integers(4))]
    channels, color = [(1, 0), (3, 2), (1, 3), (4, 6)][int(rng.integers(4))]
    squeeze = zlib.compressobj(9)
    row, body = bytes(1 + width * channels), bytearray()
    for _ in range(min(height, 200_000_000 // len(row))):
        body += squeeze.compress(row)
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    palette = [(b"PLTE", bytes(768))] if color == 3 else []
    return join(
        [
            (b"IHDR", header),
            *palette,
            (b"IDAT", bytes(body + squeeze.flush())),
            (b"IEND", b""),
        ]
    )


def png_text(data: bytes, rng: np.random.Generator) -> bytes:
    """Metadata: text that inflates to 16 MB, in one chunk or in many, profiles and EXIF of garbage."""
    bomb = zlib.compress(bytes(1 << int(rng.integers(10, 25))), 9)
    kinds = [
        (b"zTXt", b"key\0\0" + bomb),
        (b"iTXt", b"key\0\x01\0\0\0" + bomb),
        (b"iCCP", b"name\0\0" + bomb),
        (b"tEXt", b"key\0" + rng.bytes(50)),
        (b"eXIf", exif(rng)[6:]),
        (b"tRNS", rng.bytes(int(rng.integers(1, 300)))),
        (b"acTL", struct.pack(">II", int(rng.choice([0, 1, 1 << 31])), 0)),
    ]
    parts = chunks(data)
    extra = [kinds[int(rng.integers(len(kinds)))]] * int(rng.choice([1, 2, 100]))
    at = int(rng.integers(1, len(parts)))
    return join([*parts[:at], *extra, *parts[at:]])


# WebP, BMP, GIF, TIFF


def webp_size(data: bytes, rng: np.random.Generator) -> bytes:
    """Other sides: of the canvas, of a lossy, or of a lossless image."""
    kind = int(rng.integers(3))
    if kind == 0:
        canvas = b"".join(
            (side(rng, 24) & 0xFFFFFF).to_bytes(3, "little") for _ in range(2)
        )
        flags = bytes([int(rng.choice([0, 2, 8, 16, 18, 255])), 0, 0, 0])
        body = b"VP8X" + struct.pack("<I", 10) + flags + canvas + data[12:]
        return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body
    at = 26 if data[12:16] == b"VP8 " else 21
    return data[:at] + rng.bytes(4) + data[at + 4 :]


def webp_chunk(data: bytes, rng: np.random.Generator) -> bytes:
    """The length in the file's header, or in that of its first chunk."""
    at = int(rng.choice([4, 16]))
    return (
        data[:at]
        + struct.pack("<I", int(rng.choice(EDGES)) & 0xFFFFFFFF)
        + data[at + 4 :]
    )


def bmp_header(data: bytes, rng: np.random.Generator) -> bytes:
    """Other sides, depth, compression, colors, or place of the pixels."""
    fields = {
        10: "I",
        14: "I",
        18: "I",
        22: "I",
        26: "H",
        28: "H",
        30: "I",
        34: "I",
        46: "I",
        50: "I",
    }
    out = bytearray(data)
    for at in rng.choice(list(fields), int(rng.integers(1, 4))).tolist():
        small = [0, 1, 2, 3, 4, 8, 12, 16, 24, 32, 40, 64, 108, 124, 13_000, 60_000]
        value = (
            int(rng.choice(small)) if rng.integers(2) else int(rng.integers(1 << 32))
        )
        struct.pack_into(
            f"<{fields[at]}",
            out,
            at,
            value & (0xFFFF if fields[at] == "H" else 0xFFFFFFFF),
        )
    return bytes(out)


def bmp_runs(data: bytes, rng: np.random.Generator) -> bytes:
    """Run-length coding, of random runs, in 4 or 8 bits and any size."""
    sides = [int(rng.choice([1, 20, 1000, 13_000, 170_000_000])) for _ in range(2)]
    depth, compression = [(8, 1), (4, 2)][int(rng.integers(2))]
    runs = b"".join(
        bytes([0, 2, 255, 255]) if not rng.integers(4) else rng.bytes(2)
        for _ in range(200)
    )
    header = struct.pack(
        "<IiiHHIIiiII", 40, *sides, 1, depth, compression, len(runs), 0, 0, 0, 0
    )
    palette = bytes(range(256)) * (4 << depth >> 8 or 1)
    offset = 14 + len(header) + len(palette)
    return (
        b"BM"
        + struct.pack("<IHHI", offset + len(runs), 0, 0, offset)
        + header
        + palette
        + runs
    )


def gif_size(data: bytes, rng: np.random.Generator) -> bytes:
    """The sides of the screen or of the first frame."""
    at = 6 if rng.integers(2) else data.find(b",") + int(rng.choice([1, 5]))
    return data[:at] + struct.pack("<HH", side(rng, 16), side(rng, 16)) + data[at + 4 :]


def tiff_entry(data: bytes, rng: np.random.Generator) -> bytes:
    """Other tags, types, counts and values in the directory."""
    start = int.from_bytes(data[4:8], "little")
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        entry = (
            start
            + 2
            + 12 * int(rng.integers(int.from_bytes(data[start : start + 2], "little")))
        )
        field, code = [(0, "H"), (2, "H"), (4, "I"), (8, "I"), (8, "I")][
            int(rng.integers(5))
        ]
        bits = 8 * struct.calcsize(code)
        value = int(
            rng.choice(
                [0, 1, 2, 8, 13_000, 60_000, rng.integers(1 << bits), (1 << bits) - 1]
            )
        )
        struct.pack_into(f"<{code}", out, entry + field, value & ((1 << bits) - 1))
    return bytes(out)


def tiff_tile(data: bytes, rng: np.random.Generator) -> bytes:
    """A tile of any size around an image of any size."""
    tile = int(
        rng.choice([16, 256, 1024, 3000, 8000] if rng.integers(40) else [20_000])
    )
    return bombs.tiled_tiff(int(rng.choice([1, 16, tile, 3000])), tile)


def tiff_mix(data: bytes, rng: np.random.Generator) -> bytes:
    """Any mix of photometry, compression, predictor and layout, with a tag changed, at times."""
    photometric, channels = [
        ("miniswhite", 1),
        ("rgb", 3),
        ("rgb", 4),
        ("separated", 4),
    ][int(rng.integers(4))]
    array = rng.integers(0, 255, (21, 17, channels)).astype(
        str(rng.choice(["uint8", "uint16", "float32"]))
    )
    is_separate = channels > 1 and bool(rng.integers(2))
    compression = [None, "lzw", "zlib", "packbits", "zstd"][int(rng.integers(5))]
    out = io.BytesIO()
    tifffile.imwrite(
        out,
        np.moveaxis(array, 2, 0) if is_separate else array,
        photometric=photometric,
        planarconfig=("separate" if is_separate else "contig")
        if channels > 1
        else None,
        compression=compression,
        predictor=compression is not None and bool(rng.integers(2)),
        byteorder="<",
        tile=(16, 16) if rng.integers(2) else None,
    )
    return tiff_entry(out.getvalue(), rng) if rng.integers(2) else out.getvalue()


def jpeg_scans(data: bytes, rng: np.random.Generator) -> bytes:
    """Any number of scans of any number of pixels."""
    sides = [int(rng.choice([8, 100, 1000, 6000, 13_000])) for _ in range(2)]
    return bombs.jpeg_of_scans(*sides, int(rng.choice([1, 10, 100, 882])))


def webp_canvas(data: bytes, rng: np.random.Generator) -> bytes:
    """An animation of one pixel on a canvas of any size."""
    sides = [
        int(rng.choice([1, 1000, 4000, 10_900, 16_383, 1 << 24])) for _ in range(2)
    ]
    return bombs.animated_webp(*sides)


OF_FORMAT: dict[str, dict[str, Mutation]] = {
    "jpeg": {
        "declared size": jpeg_size,
        "segment": jpeg_segment,
        "metadata": jpeg_exif,
        "scans": jpeg_scans,
    },
    "png": {
        "right checksum": png_checked,
        "rows": png_rows,
        "declared size": png_size,
        "bomb": png_bomb,
        "metadata": png_text,
    },
    "webp": {"declared size": webp_size, "chunk": webp_chunk, "canvas": webp_canvas},
    "bmp": {"declared size": bmp_header, "runs": bmp_runs},
    "gif": {"declared size": gif_size},
    "tiff": {
        "directory": tiff_entry,
        "directory, again": tiff_entry,
        "tile": tiff_tile,
        "mix": tiff_mix,
    },
}
