"""PNGs: each color type, depth, filter and interlacing by a writer of our own, chunks, and those of libraries."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import cv2
import imagecodecs
import numpy as np
from drawn import (
    HEIGHT,
    NEITHER,
    NO_ARRAY,
    WIDTH,
    Drawn,
    by_opencv,
    image,
    picture,
    saved,
)
from PIL import Image
from PIL.PngImagePlugin import PngInfo

MAGIC = b"\x89PNG\r\n\x1a\n"
GRAY, RGB, PALETTE, GRAY_ALPHA, RGBA = 0, 2, 3, 4, 6
CHANNELS = {GRAY: 1, RGB: 3, PALETTE: 1, GRAY_ALPHA: 2, RGBA: 4}
DEPTHS = {
    GRAY: (1, 2, 4, 8, 16),
    RGB: (8, 16),
    PALETTE: (1, 2, 4, 8),
    GRAY_ALPHA: (8, 16),
    RGBA: (8, 16),
}
ADAM7 = (
    (0, 0, 8, 8),
    (0, 4, 8, 8),
    (4, 0, 8, 4),
    (0, 2, 4, 4),
    (2, 0, 4, 2),
    (0, 1, 2, 2),
    (1, 0, 2, 1),
)
"""First row, first column, and the steps of both, of the passes."""
COLORS = np.random.default_rng(5).integers(0, 256, (256, 3), np.uint8)


def chunk(kind: bytes, body: bytes = b"", crc: int = 0) -> bytes:
    """A chunk; a `crc` other than 0 spoils its checksum."""
    return (
        struct.pack(">I", len(body))
        + kind
        + body
        + struct.pack(">I", zlib.crc32(kind + body) ^ crc)
    )


def _rows(samples: np.ndarray, depth: int, filters: Sequence[int]) -> bytes:
    """The rows of an image or a pass, each with its filter."""
    height, _, channels = samples.shape
    if depth == 16:
        rows = samples.astype(">u2").reshape(height, -1).view(np.uint8)
    elif depth == 8:
        rows = samples.astype(np.uint8).reshape(height, -1)
    else:
        bits = (samples[:, :, 0, None] >> np.arange(depth - 1, -1, -1)) & 1
        rows = np.packbits(bits.reshape(height, -1).astype(np.uint8), axis=1)
    step = max(1, channels * depth // 8)
    above, packed = np.zeros(rows.shape[1], np.int64), bytearray()
    for number, row in enumerate(rows.astype(np.int64)):
        left = np.concatenate([np.zeros(step, np.int64), row[:-step]])[: len(row)]
        corner = np.concatenate([np.zeros(step, np.int64), above[:-step]])[: len(row)]
        kind = filters[number % len(filters)]
        near = np.abs(
            np.stack([above - corner, left - corner, left + above - 2 * corner])
        )
        paeth = np.where(
            (near[0] <= near[1]) & (near[0] <= near[2]),
            left,
            np.where(near[1] <= near[2], above, corner),
        )
        predicted = (0, left, above, (left + above) // 2, paeth)[kind]
        packed.append(kind)
        packed += ((row - predicted) % 256).astype(np.uint8).tobytes()
        above = row
    return bytes(packed)


def pixels_of(
    samples: np.ndarray,
    depth: int,
    interlaced: bool = False,
    filters: Sequence[int] = (0,),
) -> bytes:
    """The bytes that a PNG's IDAT has compressed."""
    if not interlaced:
        return _rows(samples, depth, filters)
    passes = [samples[top::down, left::right] for top, left, down, right in ADAM7]
    return b"".join(_rows(part, depth, filters) for part in passes if part.size)


def write(
    samples: np.ndarray,
    color: int,
    depth: int,
    *,
    interlaced: bool = False,
    filters: Sequence[int] = (0,),
    before: bytes = b"",
    level: int = 6,
) -> bytes:
    """A PNG of samples (H, W, channels); `before` are the chunks before its pixels."""
    height, width, _ = samples.shape
    header = chunk(
        b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    )
    pixels = chunk(
        b"IDAT", zlib.compress(pixels_of(samples, depth, interlaced, filters), level)
    )
    palette = (
        chunk(b"PLTE", COLORS[: 1 << depth].tobytes()) if color == PALETTE else b""
    )
    return MAGIC + header + palette + before + pixels + chunk(b"IEND")


def samples_of(
    color: int, depth: int, height: int = HEIGHT, width: int = WIDTH
) -> np.ndarray:
    """Samples of a depth, uint16 (H, W, channels)."""
    return picture(CHANNELS[color], np.uint16, height, width) >> (16 - depth)


def _kinds() -> Iterator[Drawn]:
    names = {
        GRAY: "gray",
        RGB: "rgb",
        PALETTE: "palette",
        GRAY_ALPHA: "gray-alpha",
        RGBA: "rgba",
    }
    for color, name in names.items():
        for depth, interlaced in itertools.product(DEPTHS[color], (False, True)):
            samples = samples_of(color, depth)
            data = write(
                samples, color, depth, interlaced=interlaced, filters=(0, 1, 2, 3, 4)
            )
            yield Drawn(
                f"{name}-{depth}{'-interlaced' * interlaced}.png",
                data,
                truth=_truth(samples, color, depth),
            )
    transparent = {
        GRAY: b"\0\1",
        RGB: b"\0\1\0\2\0\3",
        PALETTE: bytes(range(0, 256, 16)),
    }
    for color, body in transparent.items():
        for depth in DEPTHS[color]:
            body = body[: 1 << depth] if color == PALETTE else body
            data = write(
                samples_of(color, depth), color, depth, before=chunk(b"tRNS", body)
            )
            yield Drawn(f"{names[color]}-{depth}-transparent.png", data)
    for number in range(5):
        samples = samples_of(RGB, 8)
        data = write(samples, RGB, 8, filters=(number,))
        yield Drawn(f"filter-{number}.png", data, truth=samples.astype(np.uint8))
    for height, width in ((1, 1), (1, 50), (50, 1), (2, 3), (5, 4), (9, 8)):
        for interlaced in (False, True):
            samples = samples_of(RGB, 8, height, width)
            data = write(samples, RGB, 8, interlaced=interlaced)
            yield Drawn(
                f"{height}x{width}{'-interlaced' * interlaced}.png",
                data,
                truth=samples.astype(np.uint8),
            )


def _truth(samples: np.ndarray, color: int, depth: int) -> np.ndarray:
    """The array that `transform.decode: array` is to give."""
    if color == PALETTE:
        return COLORS[samples[:, :, 0]]
    if depth < 8:
        return (samples * (255 // ((1 << depth) - 1))).astype(np.uint8)
    values = samples.astype(np.uint8 if depth == 8 else np.uint16)
    return values[:, :, [0, 0, 0, 1]] if color == GRAY_ALPHA else values


def exif(orientation: int, order: str = ">") -> bytes:
    """A TIFF of the orientation alone, as EXIF has it."""
    magic = b"MM\0*" if order == ">" else b"II*\0"
    entry = struct.pack(f"{order}HHIHH", 274, 3, 1, orientation, 0)
    return magic + struct.pack(f"{order}IH", 8, 1) + entry + bytes(4)


def _chunks() -> Iterator[Drawn]:
    profile = b"sRGB\0\0" + zlib.compress(bytes(128))
    bodies = {
        b"gAMA": struct.pack(">I", 45455),
        b"cHRM": struct.pack(
            ">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000
        ),
        b"sRGB": b"\0",
        b"iCCP": profile,
        b"sBIT": b"\5\6\5",
        b"bKGD": b"\0\1\0\2\0\3",
        b"pHYs": struct.pack(">IIB", 2835, 2835, 1),
        b"tIME": struct.pack(">HBBBBB", 2026, 1, 2, 3, 4, 5),
        b"tEXt": b"Comment\0drawn",
        b"zTXt": b"Comment\0\0" + zlib.compress(b"drawn"),
        b"iTXt": b"Comment\0\0\0en\0\0drawn",
        b"sPLT": b"few\0\10" + bytes(6),
        b"vpAg": bytes(9),  # unknown, and not critical
        b"cICP": b"\1\15\0\1",
        b"oFFs": struct.pack(">iiB", 1, 2, 0),
        b"PLTE": COLORS[:16].tobytes(),  # of an RGB image: a proposal
        b"acTL": struct.pack(">II", 1, 0),
    }
    samples = samples_of(RGB, 8)
    truth = samples.astype(np.uint8)
    for kind, body in bodies.items():
        yield Drawn(
            f"chunk-{kind.decode()}.png",
            write(samples, RGB, 8, before=chunk(kind, body)),
            truth=truth,
        )
        if kind != b"PLTE":
            data = write(samples, RGB, 8, before=chunk(kind, body, crc=1))
            # it may have been a known one
            refused = NEITHER if kind in (b"vpAg", b"oFFs") else frozenset()
            yield Drawn(f"crc-of-{kind.decode()}.png", data, refused, truth)
    for name, spoilt in {
        "exif-of-nothing": chunk(b"eXIf"),
        "exif-of-zeros": chunk(b"eXIf", bytes(40)),
        "icc-by-method-1": chunk(b"iCCP", b"sRGB\0\1" + bytes(20)),
        "icc-of-nothing": chunk(b"iCCP"),
        "gamma-of-one-byte": chunk(b"gAMA", b"x"),
        "text-without-a-key": chunk(b"tEXt", b"\0"),
        "text-that-is-not-packed": chunk(b"zTXt", b"Comment\0\0drawn"),
        "density-of-one-byte": chunk(b"pHYs", b"x"),
    }.items():
        yield Drawn(f"{name}.png", write(samples, RGB, 8, before=spoilt), truth=truth)
    for orientation, order in itertools.product(range(10), "><"):
        name = f"exif-{orientation}-{'big' if order == '>' else 'little'}.png"
        data = write(samples, RGB, 8, before=chunk(b"eXIf", exif(orientation, order)))
        yield Drawn(name, data, truth=truth)
    several = b"".join(
        chunk(kind, bodies[kind])
        for kind in bodies
        if kind not in (b"acTL", b"PLTE", b"iCCP")
    )
    yield Drawn("many-chunks.png", write(samples, RGB, 8, before=several), truth=truth)
    yield Drawn(
        "chunk-hIST.png",
        write(samples_of(PALETTE, 4), PALETTE, 4, before=chunk(b"hIST", bytes(32))),
    )


def _streams() -> Iterator[Drawn]:
    samples = samples_of(RGB, 8)
    truth = samples.astype(np.uint8)
    plain = write(samples, RGB, 8)
    header, tail = plain[:33], chunk(b"IEND")
    packed = zlib.compress(pixels_of(samples, 8))
    parts = [chunk(b"IDAT", packed[at : at + 100]) for at in range(0, len(packed), 100)]
    yield Drawn("idat-in-parts.png", header + b"".join(parts) + tail, truth=truth)
    yield Drawn(
        "idat-empty.png",
        header + chunk(b"IDAT") + chunk(b"IDAT", packed) + chunk(b"IDAT") + tail,
        truth=truth,
    )
    for level in (0, 1, 9):
        yield Drawn(
            f"zlib-{level}.png", write(samples, RGB, 8, level=level), truth=truth
        )
    small = zlib.compressobj(9, zlib.DEFLATED, 9)
    window = small.compress(pixels_of(samples, 8)) + small.flush()
    yield Drawn(
        "zlib-small-window.png", header + chunk(b"IDAT", window) + tail, truth=truth
    )
    yield Drawn("after-the-end.png", plain + b"more", truth=truth)
    exif_late = plain[: -len(tail)] + chunk(b"eXIf", exif(6)) + tail
    yield Drawn("exif-behind-the-pixels.png", exif_late, truth=truth)
    yield Drawn("no-end.png", plain[: -len(tail)], refused=NO_ARRAY)
    yield Drawn("cut.png", plain[: len(plain) // 2], refused=NEITHER)
    yield Drawn("cut-in-the-header.png", plain[:20], refused=NEITHER)
    spoilt = header + chunk(b"IDAT", packed, crc=1) + tail
    yield Drawn("crc-of-the-pixels.png", spoilt, refused=NEITHER)
    yield Drawn(
        "crc-of-the-header.png",
        MAGIC + chunk(b"IHDR", plain[16:29], crc=1) + plain[33:],
        refused=NEITHER,
    )
    yield Drawn(
        "pixels-too-few.png",
        header + chunk(b"IDAT", zlib.compress(bytes(99))) + tail,
        refused=NEITHER,
    )
    yield Drawn("no-pixels.png", header + tail, refused=NEITHER)
    yield Drawn(
        "depth-of-3.png",
        plain[:8] + chunk(b"IHDR", plain[16:24] + b"\3\0\0\0\0") + plain[33:],
        refused=NEITHER,
    )
    yield Drawn(
        "color-of-5.png",
        plain[:8] + chunk(b"IHDR", plain[16:24] + b"\10\5\0\0\0") + plain[33:],
        refused=NEITHER,
    )
    yield Drawn(
        "no-columns.png",
        plain[:8] + chunk(b"IHDR", bytes(4) + plain[20:29]) + plain[33:],
        refused=NEITHER,
    )


def _by_libraries() -> Iterator[Drawn]:
    for mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"):
        yield Drawn(f"pillow-{mode.replace(';', '-')}.png", saved(image(mode), "PNG"))
    for bits in (1, 2, 4):
        yield Drawn(
            f"pillow-palette-{bits}.png",
            saved(image().quantize(1 << bits), "PNG", bits=bits),
        )
    yield Drawn("pillow-palette-alpha.png", saved(image("RGBA").quantize(30), "PNG"))
    yield Drawn("pillow-palette-color.png", saved(image("P"), "PNG", transparency=3))
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp(6))
    yield Drawn("pillow-xmp.png", saved(image(), "PNG", pnginfo=text))
    for channels, dtype in itertools.product((1, 3, 4), (np.uint8, np.uint16)):
        array = picture(channels, dtype)
        bits = np.dtype(dtype).itemsize * 8
        yield Drawn(
            f"opencv-{channels}x{bits}.png", by_opencv(".png", array), truth=array
        )
    bilevel = by_opencv(".png", picture(1), cv2.IMWRITE_PNG_BILEVEL, 1)
    yield Drawn("opencv-bilevel.png", bilevel)
    for strategy in range(5):
        data = by_opencv(".png", picture(), cv2.IMWRITE_PNG_STRATEGY, strategy)
        yield Drawn(f"opencv-strategy-{strategy}.png", data, truth=picture())
    for channels, dtype in itertools.product((1, 2, 3, 4), (np.uint8, np.uint16)):
        array = picture(channels, dtype)
        truth = array[:, :, [0, 0, 0, 1]] if channels == 2 else array
        bits = np.dtype(dtype).itemsize * 8
        data = imagecodecs.png_encode(array if channels > 1 else array[:, :, 0])
        yield Drawn(f"imagecodecs-{channels}x{bits}.png", data, truth=truth)


def xmp(orientation: int) -> str:
    """A packet of XMP with the orientation alone."""
    return (
        '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        f'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="{orientation}"/>'
        "</rdf:RDF></x:xmpmeta>"
    )


def _animated() -> Iterator[Drawn]:
    frames: list[Any] = [
        image(),
        Image.new("RGB", (WIDTH, HEIGHT), "red"),
        image("L").convert("RGB"),
    ]
    for mode in ("RGB", "RGBA", "L", "P"):
        first, *others = [frame.convert(mode) for frame in frames]
        for hidden, dispose in itertools.product(
            (False, True), (0, 1, 2) if mode.startswith("RGB") else (0,)
        ):
            data = saved(
                first,
                "PNG",
                save_all=True,
                append_images=others,
                default_image=hidden,
                disposal=dispose,
                blend=dispose % 2,
            )
            name = f"animated-{mode.lower()}-{dispose}{'-hidden' * hidden}.png"
            yield Drawn(name, data)
    plain = write(samples_of(RGB, 8), RGB, 8)
    control = struct.pack(">IIIIIHHBB", 0, WIDTH, HEIGHT, 0, 0, 1, 1, 0, 0)
    one = (
        plain[:33]
        + chunk(b"acTL", struct.pack(">II", 1, 0))
        + chunk(b"fcTL", control)
        + plain[33:]
    )
    yield Drawn("animated-one-frame.png", one)
    yield Drawn(
        "animated-no-frames.png", plain[:33] + chunk(b"acTL", bytes(8)) + plain[33:]
    )


def files() -> Iterator[Drawn]:
    """All of them."""
    for part in (_kinds, _chunks, _streams, _by_libraries, _animated):
        yield from part()
