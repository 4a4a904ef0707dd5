"""Checks of the sizes that encoded images declare, before a decoder allocates memory or works.

    jpeg_header.jpeg_size    the usual JPEGs                          scans, and the coefficients kept for them
    plain_size               PNG and WebP without extras, for cv2
    pillow_images.open_pillow   whatever Pillow is to decode          canvases, strips and tiles, copies

All decoding and all queries of sizes use one of the three. None of them allocates pixels.
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Iterator

from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import Sides
from raypipe.transform.decode.limits import check_size
from raypipe.transform.silence import silenced

_MAGIC = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "BMP": (b"BM",),
}
# Bytes per pixel, measured as the peak of a decode: with two canvases and two copies of the one frame.
_WEBP_BYTES = 19
PNG_ORIENTATION = {b"eXIf", b"iTXt", b"tEXt", b"zTXt"}
_PNG_METADATA = PNG_ORIENTATION | set(
    b"tIME iCCP cICP gAMA cHRM sRGB sBIT pHYs bKGD hIST sPLT mDCV cLLI acTL fcTL fdAT".split()
)
# Brands of an ISO file: AVIF has some of HEIC's as well.
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}


def image_kind(data: bytes) -> str | None:
    """JPEG, PNG, WebP, GIF, TIFF, BMP, AVIF or HEIC, by the magic number; None = none of them."""
    if data[4:8] == b"ftyp":
        end = min(int.from_bytes(data[:4], "big"), 256)
        brands = {data[8:12], *(data[start : start + 4] for start in range(16, end, 4))}
        if brands & _AVIF_BRANDS:
            return "AVIF"
        if brands & _HEIC_BRANDS:
            return "HEIC"
        return None
    if data.startswith(b"RIFF"):
        return "WebP" if data[8:12] == b"WEBP" else None
    return next(
        (kind for kind, magic in _MAGIC.items() if data.startswith(magic)), None
    )


def plain_size(data: bytes, kind: str) -> Sides | None:
    """(height, width) of a PNG or WebP that cv2 reads as Pillow does; None for any other, and other kinds.

    A PNG is read so if it is undamaged, 8-bit gray or RGB, without extras. Checksums are compared here: libpng
    writes its complaint to stderr, and cv2 returns what it has when the rest is missing.

    Raises:
        SampleError: it is over a limit.
    """
    if kind == "WebP":
        return webp_size(data)
    is_plain = data[24:26] in (b"\x08\x00", b"\x08\x02")
    if kind != "PNG" or data[12:16] != b"IHDR" or not is_plain:
        return None
    if not all(
        holds and kind in (b"IHDR", b"IDAT", b"IEND")
        for kind, _, holds in png_chunks(data)
    ):
        return None
    height, width = png_size(data)
    check_size(width, height)
    return (height, width) if width and height else None


def png_size(data: bytes) -> Sides:
    """(height, width) in the header of a PNG."""
    return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")


def png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes, bool | None]]:
    """Yield the kind and the bytes of each chunk, and whether its checksum holds; None: it is cut short."""
    start = 8
    kind = b""
    while kind != b"IEND":
        length = int.from_bytes(data[start : start + 4], "big")
        kind = data[start + 4 : start + 8]
        end = start + 12 + length
        if end > len(data):
            yield kind, data[start:], None
            return
        checksum = zlib.crc32(memoryview(data)[start + 4 : end - 4])
        holds = checksum == int.from_bytes(data[end - 4 : end], "big")
        yield kind, data[start:end], holds
        start = end


def png_of_pixels(data: bytes) -> bytes:
    """Copy the parts of a PNG that make its pixels, without metadata and without the frames of an animation.

    Raises:
        ValueError: a checksum is wrong: Pillow does not compare those of pixels. Of metadata it is of no interest.
    """
    kept = [data[:8]]
    for kind, chunk, holds in png_chunks(data):
        is_of_pixels = not kind[:1].islower() or kind == b"tRNS"
        if holds is False and (is_of_pixels or kind not in _PNG_METADATA):
            raise ValueError(f"the checksum of {kind!r} is wrong")
        if is_of_pixels:
            kept.append(chunk)
    return b"".join(kept)


def webp_size(data: bytes) -> Sides | None:
    """(height, width) of a complete lossy WebP without extras; None for any other.

    Raises:
        SampleError: it, or any other, is over a limit: Pillow allocates the canvas before it tells its size.
    """
    width = height = 0  # no WebP starts with such a chunk
    is_plain = False
    if data[12:16] == b"VP8X":  # alpha, animation or metadata
        width, height = (
            int.from_bytes(data[offset : offset + 3], "little") + 1
            for offset in (24, 27)
        )
    elif data[12:16] == b"VP8L":  # lossless
        bits = int.from_bytes(data[21:25], "little")
        width = (bits & 0x3FFF) + 1
        height = (bits >> 14 & 0x3FFF) + 1
    elif data[12:16] == b"VP8 ":
        # lossy: 14 bits of size, 2 bits of a scale that decoders ignore
        width, height = (
            int.from_bytes(data[offset : offset + 2], "little") & 0x3FFF
            for offset in (26, 28)
        )
        riff_length, chunk_length = (
            int.from_bytes(data[offset : offset + 4], "little") for offset in (4, 16)
        )
        is_whole = len(data) >= riff_length + 8 and riff_length >= chunk_length + 12
        is_plain = is_whole and data[23:26] == b"\x9d\x01\x2a"
    check_size(width, height, 0 if is_plain else width * height * _WEBP_BYTES)
    return (height, width) if is_plain else None


@contextlib.contextmanager
def damage_in(kind: str, data: bytes) -> Iterator[None]:
    """Makes a SampleError of what Pillow raises within, and keeps it silent: on metadata, large images, damage."""
    with warnings.catch_warnings(), silenced() as errors:
        warnings.simplefilter("ignore")
        try:
            yield
            if errors:
                raise SampleError(f"damaged {kind}: {errors[0]} ({len(data)} bytes)")
        except (SampleError, ConfigError):
            raise
        except Exception as error:  # its plugins raise a dozen types on bad bytes
            if "truncated" in str(error).lower():
                damage = "truncated"
            else:
                damage = "damaged"
            reason = (
                f"{damage} {kind}: {type(error).__name__}: {error} ({len(data)} bytes)"
            )
            raise SampleError(reason) from error
