"""BMP, GIF, WebP, AVIF, HEIC and .npy; and formats that are no images to raypipe."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import imagecodecs
import numpy as np
import pillow_heif
from draw_png import COLORS, exif, xmp
from drawn import (
    HEIGHT,
    NEITHER,
    NO_RGB,
    WIDTH,
    Drawn,
    by_opencv,
    image,
    picture,
    saved,
)
from PIL import Image

EXIF = {orientation: b"Exif\0\0" + exif(orientation) for orientation in range(10)}


# BMP


def bitmap(
    rows: bytes,
    bits: int,
    *,
    header: int = 40,
    compression: int = 0,
    masks: bytes = b"",
    colors: np.ndarray | None = None,
    height: int = HEIGHT,
) -> bytes:
    """A BMP of rows as they are stored, with a header of so many bytes."""
    if header == 12:
        info = struct.pack("<IHHHH", 12, WIDTH, height, 1, bits)
        palette = b"" if colors is None else colors[:, ::-1].tobytes()
    else:
        num = 0 if colors is None else len(colors)
        info = struct.pack(
            "<IiiHHIIiiII",
            header,
            WIDTH,
            height,
            1,
            bits,
            compression,
            len(rows),
            2835,
            2835,
            num,
            0,
        )
        info += masks.ljust(header - 40, b"\0") if header > 40 else masks
        palette = (
            b""
            if colors is None
            else np.pad(colors[:, ::-1], ((0, 0), (0, 1))).tobytes()
        )
    start = 14 + len(info) + len(palette)
    return (
        struct.pack("<2sIHHI", b"BM", start + len(rows), 0, 0, start)
        + info
        + palette
        + rows
    )


def packed(values: np.ndarray) -> bytes:
    """Rows of bytes, from the last to the first, each filled to a multiple of four."""
    flat = np.ascontiguousarray(values[::-1]).reshape(len(values), -1).view(np.uint8)
    return np.pad(flat, ((0, 0), (0, -flat.shape[1] % 4))).tobytes()


def _run_lengths(indices: np.ndarray, bits: int) -> bytes:
    """Pairs of runs, and a literal run in each row."""
    out = bytearray()
    for row in indices[::-1].tolist():
        if bits == 8:
            out += bytes([0, 4, *row[:4]])
            for value in row[4:]:
                out += bytes([1, value])
        else:
            for left, right in zip(row[::2], row[1::2], strict=True):
                out += bytes([2, left << 4 | right])
        out += b"\0\0"
    return bytes(out) + b"\0\1"


def _bitmaps() -> Iterator[Drawn]:
    for mode in ("1", "L", "P", "RGB", "RGBA"):
        yield Drawn(f"pillow-{mode.lower()}.bmp", saved(image(mode), "BMP"))
    yield Drawn("opencv.bmp", by_opencv(".bmp", picture()))
    yield Drawn("opencv-4.bmp", by_opencv(".bmp", picture(4)))
    yield Drawn("imagecodecs.bmp", imagecodecs.bmp_encode(picture()))
    rgb = packed(picture()[:, :, ::-1])
    yield Drawn("24-core-header.bmp", bitmap(rgb, 24, header=12))
    down = packed(picture()[::-1, :, ::-1])
    yield Drawn("24-top-down.bmp", bitmap(down, 24, height=-HEIGHT))
    for header in (40, 52, 56, 64, 108, 124):
        yield Drawn(f"24-header-{header}.bmp", bitmap(rgb, 24, header=header))
    for bits in (1, 4, 8):
        indices = picture(1)[:, :, 0] >> (8 - bits)
        places = (indices[:, :, None] >> np.arange(bits - 1, -1, -1)) & 1
        rows = packed(np.packbits(places.reshape(HEIGHT, -1).astype(np.uint8), axis=1))
        for header in (12, 40, 124):
            yield Drawn(
                f"{bits}-header-{header}.bmp",
                bitmap(rows, bits, header=header, colors=COLORS[: 1 << bits]),
            )
    eight, four = picture(1)[:, :, 0], picture(1)[:, :, 0] >> 4
    yield Drawn(
        "rle-8.bmp", bitmap(_run_lengths(eight, 8), 8, compression=1, colors=COLORS)
    )
    yield Drawn(
        "rle-4.bmp", bitmap(_run_lengths(four, 4), 4, compression=2, colors=COLORS[:16])
    )
    wide = picture().astype(np.uint32)
    for name, layout in {"555": (5, 5, 5), "565": (5, 6, 5)}.items():
        masks, values, shift = [], np.zeros((HEIGHT, WIDTH), np.uint16), sum(layout)
        for channel, depth in enumerate(layout):
            shift -= depth
            masks.append(((1 << depth) - 1) << shift)
            values |= ((wide[:, :, channel] >> (8 - depth)) << shift).astype(np.uint16)
        fields = struct.pack("<III", *masks)
        yield Drawn(
            f"16-{name}-masks.bmp",
            bitmap(packed(values), 16, compression=3, masks=fields),
        )
        if name == "555":
            yield Drawn("16-555.bmp", bitmap(packed(values), 16))
    bgra = packed(picture(4)[:, :, [2, 1, 0, 3]])
    fields = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    yield Drawn("32.bmp", bitmap(bgra, 32))
    yield Drawn("32-masks.bmp", bitmap(bgra, 32, compression=3, masks=fields[:12]))
    yield Drawn("32-v5.bmp", bitmap(bgra, 32, header=124, compression=3, masks=fields))
    yield Drawn("cut.bmp", bitmap(rgb, 24)[:-99], refused=NEITHER)
    yield Drawn("3-bits.bmp", bitmap(rgb, 3), refused=NEITHER)
    yield Drawn(
        "no-such-compression.bmp", bitmap(rgb, 24, compression=9), refused=NEITHER
    )


# GIF


def _gifs() -> Iterator[Drawn]:
    for mode in ("1", "L", "P", "RGB", "RGBA", "LA"):
        for interlace in (0, 1):
            name = f"pillow-{mode.lower()}{'-interlaced' * interlace}.gif"
            yield Drawn(name, saved(image(mode), "GIF", interlace=interlace))
    for num in (2, 3, 4, 16, 17, 256):
        yield Drawn(f"{num}-colors.gif", saved(image().quantize(num), "GIF"))
    yield Drawn("transparent.gif", saved(image("P"), "GIF", transparency=3))
    yield Drawn(
        "transparent-background.gif",
        saved(image("P"), "GIF", transparency=0, background=0),
    )
    yield Drawn("comment.gif", saved(image("P"), "GIF", comment=b"drawn"))
    frames = [image("P"), image("L").convert("P"), Image.new("P", (WIDTH, HEIGHT), 7)]
    for disposal in (0, 1, 2, 3):
        data = saved(
            frames[0],
            "GIF",
            save_all=True,
            append_images=frames[1:],
            disposal=disposal,
            duration=20,
            loop=0,
        )
        yield Drawn(f"animated-{disposal}.gif", data)
    yield Drawn("imagecodecs.gif", imagecodecs.gif_encode(picture(1)[:, :, 0]))
    plain = saved(image("P"), "GIF")
    yield Drawn("87a.gif", b"GIF87a" + plain[6:])
    large = struct.pack("<HH", WIDTH + 9, HEIGHT + 7)
    yield Drawn("on-a-larger-screen.gif", plain[:6] + large + plain[10:])
    yield Drawn(
        "on-a-smaller-screen.gif", plain[:6] + struct.pack("<HH", 9, 7) + plain[10:]
    )
    yield Drawn("after-the-end.gif", plain + b"more")
    yield Drawn("no-end.gif", plain[:-1])
    yield Drawn("cut.gif", plain[: len(plain) // 2], refused=NEITHER)
    yield Drawn("no-frames.gif", plain[: 13 + 768] + b";", refused=NEITHER)


# WebP, AVIF, HEIC


def _webps() -> Iterator[Drawn]:
    for mode in ("L", "RGB", "RGBA", "P", "LA", "CMYK"):
        for lossless in (False, True):
            name = f"pillow-{mode.lower()}{'-lossless' * lossless}.webp"
            yield Drawn(name, saved(image(mode), "WEBP", lossless=lossless))
    for options in (
        {"quality": 1},
        {"quality": 100},
        {"method": 6},
        {"method": 0},
        {"exact": True, "lossless": True},
    ):
        name = "-".join(f"{key}-{value}" for key, value in options.items()).lower()
        yield Drawn(f"{name}.webp", saved(image("RGBA"), "WEBP", **options))
    yield Drawn("alpha-quality.webp", saved(image("RGBA"), "WEBP", alpha_quality=10))
    for orientation in range(10):
        yield Drawn(
            f"exif-{orientation}.webp", saved(image(), "WEBP", exif=EXIF[orientation])
        )
    yield Drawn("exif-bare.webp", saved(image(), "WEBP", exif=exif(6)))
    yield Drawn("xmp.webp", saved(image(), "WEBP", xmp=xmp(6).encode()))
    yield Drawn("icc.webp", saved(image(), "WEBP", icc_profile=bytes(200)))
    frames: list[Any] = [image(), image("L").convert("RGB")]
    yield Drawn(
        "animated.webp",
        saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=20),
    )
    rgba = [frame.convert("RGBA") for frame in frames]
    data = saved(
        image("RGBA"),
        "WEBP",
        save_all=True,
        append_images=rgba,
        lossless=True,
        background=(9, 8, 7, 6),
    )
    yield Drawn("animated-alpha.webp", data)
    yield Drawn("imagecodecs.webp", imagecodecs.webp_encode(picture(), 90))
    yield Drawn(
        "imagecodecs-lossless.webp", imagecodecs.webp_encode(picture(4), lossless=True)
    )
    yield Drawn("opencv.webp", by_opencv(".webp", picture()))
    for height, width in ((1, 1), (1, 40), (40, 1), (17, 33)):
        yield Drawn(
            f"{height}x{width}.webp", saved(image(height=height, width=width), "WEBP")
        )
    plain = saved(image(), "WEBP")
    yield Drawn("after-the-end.webp", plain + b"more")
    yield Drawn("cut.webp", plain[: len(plain) // 2], refused=NEITHER)
    yield Drawn("cut-in-the-header.webp", plain[:20], refused=NEITHER)


def _avifs() -> Iterator[Drawn]:
    for sampling in ("4:4:4", "4:2:2", "4:2:0", "4:0:0"):
        for mode in ("RGB", "RGBA"):
            name = f"pillow-{sampling.replace(':', '')}-{mode.lower()}.avif"
            yield Drawn(
                name, saved(image(mode), "AVIF", subsampling=sampling, speed=10)
            )
    yield Drawn("pillow-gray.avif", saved(image("L"), "AVIF", speed=10))
    for orientation in range(1, 9):
        data = saved(image(), "AVIF", exif=EXIF[orientation], speed=10)
        yield Drawn(f"exif-{orientation}.avif", data)
    yield Drawn("icc.avif", saved(image(), "AVIF", icc_profile=_profile(), speed=10))
    yield Drawn("xmp.avif", saved(image(), "AVIF", xmp=xmp(6).encode(), speed=10))
    frames = [image(), image("L").convert("RGB")]
    data = saved(
        frames[0],
        "AVIF",
        save_all=True,
        append_images=frames[1:],
        duration=20,
        speed=10,
    )
    yield Drawn("animated.avif", data)
    for bits in (10, 12):
        pixels = picture(3, np.uint16) >> (16 - bits)
        yield Drawn(
            f"{bits}-bit.avif",
            imagecodecs.avif_encode(pixels, bitspersample=bits, speed=10),
        )
    yield Drawn("lossless.avif", imagecodecs.avif_encode(picture(), 100, speed=10))
    plain = saved(image(), "AVIF", speed=10)
    yield Drawn("cut.avif", plain[: len(plain) * 3 // 4], refused=NEITHER)


def _profile() -> bytes:
    from PIL import ImageCms

    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def _heics() -> Iterator[Drawn]:
    for mode in ("RGB", "RGBA", "L", "LA"):
        yield Drawn(f"{mode.lower()}.heic", _heic(pillow_heif.from_pillow(image(mode))))
    for chroma in (420, 422, 444):
        yield Drawn(
            f"{chroma}.heic", _heic(pillow_heif.from_pillow(image()), chroma=chroma)
        )
    for orientation in (1, 3, 6, 8):
        heif = pillow_heif.from_pillow(image())
        yield Drawn(f"exif-{orientation}.heic", _heic(heif, exif=EXIF[orientation]))
    for bits in (10, 12):
        depth = pillow_heif.options.SAVE_HDR_TO_12_BIT
        pillow_heif.options.SAVE_HDR_TO_12_BIT = bits == 12
        try:
            heif = pillow_heif.from_bytes(
                "RGB;16", (WIDTH, HEIGHT), picture(3, np.uint16).tobytes()
            )
            yield Drawn(f"{bits}-bit.heic", _heic(heif))
        finally:
            pillow_heif.options.SAVE_HDR_TO_12_BIT = depth
    several = pillow_heif.from_pillow(image())
    several.add_from_pillow(image("L").convert("RGB"))
    yield Drawn("several.heic", _heic(several))
    plain = _heic(pillow_heif.from_pillow(image()))
    yield Drawn("cut.heif", plain[: len(plain) * 3 // 4], refused=NEITHER)
    yield Drawn("good.heif", plain)


def _heic(heif: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    heif.save(file, quality=80, **options)
    return file.getvalue()


# Arrays, and what is none of them


def arrays() -> Iterator[Drawn]:
    """.npy of each dtype, order and shape: no images to the reading as RGB."""
    for dtype in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"):
        for order in "<>":
            if dtype[1] == "1" and order == ">":
                continue
            array = picture(3, dtype)
            yield Drawn(
                f"{dtype}-{order}.npy".replace("<", "little").replace(">", "big"),
                _npy(array.astype(order + dtype)),
                NO_RGB,
                array,
            )
    for channels in (1, 2, 4, 9):
        array = picture(channels, "f4")
        yield Drawn(f"{channels}-channels.npy", _npy(array), NO_RGB, array)
    gray = picture(1)
    yield Drawn("two-dimensions.npy", _npy(gray[:, :, 0]), NO_RGB, gray)
    yield Drawn("fortran.npy", _npy(np.asfortranarray(picture())), NO_RGB, picture())
    for side in range(3, 23):
        yield Drawn(
            f"{side}x{side}.npy",
            _npy(picture(height=side, width=side)),
            NO_RGB,
            picture(height=side, width=side),
        )
    for version in ((1, 0), (2, 0), (3, 0)):
        # which is for names of fields
        refused = NO_RGB if version < (3, 0) else NEITHER
        yield Drawn(
            f"version-{version[0]}.npy", _npy(picture(), version), refused, picture()
        )
    for name, array in {
        "bool": gray[:, :, 0] > 99,
        "complex": picture(3, "f4").astype("c8"),
        "text": np.array([["a", "b"]]),
        "dates": np.zeros((3, 4), "M8[s]"),
        "one-dimension": np.zeros(9, "u1"),
        "four-dimensions": np.zeros((2, 3, 4, 1), "u1"),
        "no-rows": np.zeros((0, 3, 3), "u1"),
    }.items():
        yield Drawn(f"{name}.npy", _npy(array), NEITHER)
    file = io.BytesIO()
    np.save(file, np.array([[{}]], object), allow_pickle=True)
    yield Drawn("objects.npy", file.getvalue(), NEITHER)
    yield Drawn("cut.npy", _npy(picture())[:-9], NEITHER)


def _npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def _strangers() -> Iterator[Drawn]:
    """Formats that Pillow writes and raypipe does not read, under a name of an image."""
    for kind in (
        "ICO",
        "ICNS",
        "JPEG2000",
        "TGA",
        "PCX",
        "SGI",
        "DDS",
        "IM",
        "MSP",
        "XBM",
        "EPS",
        "PDF",
        "SPIDER",
        "QOI",
    ):
        mode = {"MSP": "1", "XBM": "1", "SPIDER": "F"}.get(kind, "RGB")
        yield Drawn(f"{kind.lower()}.png", saved(image(mode), kind), NEITHER)
    yield Drawn("jpegxl.jpg", imagecodecs.jpegxl_encode(picture()), NEITHER)
    yield Drawn("jpegls.jpg", imagecodecs.jpegls_encode(picture()), NEITHER)
    yield Drawn("jpegxr.png", imagecodecs.jpegxr_encode(picture()), NEITHER)
    for name, data in {
        "empty": b"",
        "one-byte": b"\xff",
        "text": b"not an image\n",
        "html": b"<!DOCTYPE html><html>404</html>",
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "json": b'{"error": 404}',
        "zip": b"PK\3\4" + bytes(30),
        "gzip": b"\x1f\x8b\x08" + bytes(30),
        "pickle": b"\x80\4K\1.",
        "zeros": bytes(99),
        "magic-of-jpeg": b"\xff\xd8\xff",
        "magic-of-png": b"\x89PNG\r\n\x1a\n",
        "magic-of-gif": b"GIF89a",
        "magic-of-bmp": b"BM",
        "magic-of-tiff": b"II*\0",
        "magic-of-webp": b"RIFF\0\0\0\0WEBP",
        "magic-of-avif": b"\0\0\0\x1cftypavif",
        "magic-of-heic": b"\0\0\0\x1cftypheic",
    }.items():
        yield Drawn(f"{name}.jpeg", data, NEITHER)


def files() -> Iterator[Drawn]:
    """All of them but `arrays`, which are samples of stores of their own."""
    for part in (_bitmaps, _gifs, _webps, _avifs, _heics, _strangers):
        yield from part()
