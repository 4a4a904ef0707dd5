"""Headers of JPEGs: what decodes a file, its limits, and whether metadata turns it.

    is_for_nvjpeg       whether the training device decodes it
    jpeg_size           (height, width) of the kinds that every decoder has at every scale; None: Pillow decodes it
    jpeg_orientation    by EXIF, or else by XMP, as Pillow has it
    check_jpeg          the limits, of what Pillow decodes, too

Segments are found here as libjpeg finds them, with fill bytes and other bytes between them. csrc/jpeg_header.h
reads headers for the kernel: only plain ones, which can be read in one way, and by the same limits. `jpeg_size`
compares what is found with what libjpeg says, since a file that shows two readers two headers could pass the
limits by one and be decoded by the other.
"""

from __future__ import annotations

import re
import struct
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import simplejpeg

from raypipe.errors import SampleError
from raypipe.plan.places import Sides
from raypipe.transform.decode.limits import (
    MAX_DECODE_BYTES,
    MAX_SCANNED_PIXELS,
    check_size,
)

# Not stuffing, fill bytes or restarts, as libjpeg looks for the next one.
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
_TEM = 0x01
_EOI = 0xD9
_SOS = 0xDA
_APP0 = 0xE0
_APP1 = 0xE1
_APP2 = 0xE2
_APP14 = 0xEE
_ORIENTATION_TAG = 0x0112
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_PROFILE = b"ICC_PROFILE\0"
_SCAN_BYTES = 10  # the header of the shortest scan
_MOST_BYTES = 15  # per pixel, measured as the peak of a decode: CMYK in several scans
_SCALED = {0xC0, 0xC1, 0xC2}
"""Frames, of 8 bits, that simplejpeg decodes at a scale: of others it writes beyond its buffer."""


_OF_NVJPEG = {0xC0, 0xC2}
_SAMPLINGS = {0x11, 0x21, 0x22, 0x12, 0x41, 0x42}
"""Luma sampling (horizontal, vertical) over chroma's 1, 1 that nvJPEG's documentation lists."""


class Frame(NamedTuple):
    """Frame of a JPEG, by its header.

    Attributes:
        marker: the kind: 0xC0 is baseline.
        bits: bits of a channel.
        height: height in pixels.
        width: width in pixels.
    """

    marker: int
    bits: int
    height: int
    width: int


def jpeg_frame(data: bytes) -> Frame | None:
    """The frame of a JPEG; None: there is none before the first scan."""
    for marker, body, _ in segments(data):
        if marker in _FRAMES:
            if len(body) >= 6:
                return Frame(marker, *struct.unpack_from(">BHH", body))
            return None
        if marker == _SOS:
            return None
    return None


def jpeg_size(data: bytes) -> Sides | None:
    """(height, width) of a JPEG within the limits whose kind simplejpeg decodes at any scale; None: Pillow has the
    last word, on the whole.

    Those are baseline, extended and progressive ones of 8 bits.

    Raises:
        SampleError: it is over a limit.
    """
    frame = jpeg_frame(data)
    if frame is None or frame.marker not in _SCALED or frame.bits != 8:
        return None
    size = _size_by_simplejpeg(data)
    if size is None and _PROFILE in data:
        size = _size_by_simplejpeg(without_profile(data))
    if size != (frame.height, frame.width):
        return None
    check_jpeg(data, frame.width, frame.height, 3)
    return size


def _size_by_simplejpeg(data: bytes) -> Sides | None:
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
    except (ValueError, KeyError):
        # A rare subsampling, such as 4:4:1, is a KeyError.
        return None
    return height, width


def without_profile(data: bytes) -> bytes:
    """Leave out the color profile: no pixel depends on it, and simplejpeg refuses a JPEG with a damaged one."""
    kept = bytearray()
    start = 0
    for marker, body, end in segments(data):
        if marker == _SOS:
            break
        if marker == _APP2 and body.startswith(_PROFILE):
            kept += data[start : end - len(body) - 4]
            start = end
    return bytes(kept + data[start:]) if start else data


def check_jpeg(data: bytes, width: int, height: int, pixel_bytes: int) -> None:
    """Check the limits of a JPEG, `pixel_bytes` of each of whose pixels are held in any case.

    libjpeg keeps the coefficients of all components if there are several scans, and goes through them for each.
    """
    num_pixels = width * height
    check_size(width, height)
    most_scans = MAX_SCANNED_PIXELS // max(1, num_pixels)
    if (
        len(data) // _SCAN_BYTES <= most_scans
        and num_pixels * _MOST_BYTES <= MAX_DECODE_BYTES
    ):
        return  # nearly all, in no time
    num_components = 0
    num_scans = 0
    is_progressive = False
    for marker, body, _ in segments(data):
        if marker in _FRAMES:
            num_components = min(4, *body[5:6], 4)
            is_progressive = marker in _PROGRESSIVE
        elif marker == _SOS:
            if not num_scans:
                has_one = not is_progressive and body[:1] == bytes([num_components])
                kept = (4 if num_components == 4 else 0) + (
                    0 if has_one else 2 * num_components
                )
                check_size(width, height, num_pixels * (pixel_bytes + kept))
                if has_one:  # libjpeg refuses a second one
                    return
            num_scans += 1
            if num_scans > most_scans:
                raise SampleError(
                    f"a JPEG of {width}x{height} pixels in more than {most_scans} scans, the limit for its size: "
                    "store it as a baseline JPEG"
                )


def is_for_nvjpeg(data: bytes) -> bool:
    """True if nvJPEG is known to decode a JPEG of this kind as libjpeg does, up to rounding.

    https://docs.nvidia.com/cuda/nvjpeg: Huffman coded, baseline or progressive, 8 bits, 1 or 3 components. libjpeg
    gets the others, those without an end, which may be cut short, and those that hold RGB.
    """
    if not (data.startswith(b"\xff\xd8\xff") and data.endswith(b"\xff\xd9")):
        return False
    adobe = None
    has_jfif = False
    for marker, body, _ in segments(data):
        if marker in _FRAMES:
            if (
                marker not in _OF_NVJPEG
                or len(body) < 6
                or body[0] != 8
                or len(body) != 6 + 3 * body[5]
            ):
                return False
            names = body[6::3]
            samplings = body[7::3]
            is_rgb = adobe == 0 or (adobe is None and not has_jfif and names == b"RGB")
            is_color = (
                body[5] == 3
                and not is_rgb
                and samplings[0] in _SAMPLINGS
                and samplings[1:] == b"\x11\x11"
            )
            return is_color or samplings == b"\x11"
        if marker == _SOS:
            return False
        has_jfif |= marker == _APP0 and body.startswith(b"JFIF")
        if marker == _APP14 and body.startswith(b"Adobe") and len(body) >= 12:
            adobe = body[11]
    return False


def segments(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Yield the marker, the body and the end of each segment, up to the image's end."""
    offset = 2
    while match := _MARKER.search(data, offset):
        offset = match.end()
        marker = data[offset - 1]
        if marker == _EOI:
            return
        if marker != _TEM:
            end = offset + max(2, int.from_bytes(data[offset : offset + 2], "big"))
            yield marker, data[offset + 2 : end], end
            offset = end


def jpeg_orientation(data: bytes) -> int:
    """Orientation by EXIF, or else by XMP, 1 to 8; 1 where the metadata is damaged: the pixels are still good."""
    metadata: dict[str, bytes] = {}
    for marker, body, _ in segments(data):
        if marker == _SOS:
            break
        if marker == _APP1 and body.startswith(_EXIF):
            metadata["exif"] = metadata.get("exif", _EXIF) + body[len(_EXIF) :]
        elif marker == _APP1 and body.startswith(_XMP):
            metadata["xmp"] = body[len(_XMP) :]
    if not metadata:
        return 1
    from PIL import Image  # 0.1 s, and most stores have no metadata

    image = Image.Image()
    image.info.update(metadata)
    return orientation_of(image)


def orientation_of(image: Any) -> int:
    """Orientation of Pillow's image by its metadata, 1 to 8, as `exif_transpose` has it; 1: damaged, or none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = image.getexif().get(_ORIENTATION_TAG, 1)
            return int(value) if value in range(2, 9) else 1
        except Exception:  # Pillow raises a dozen types on bad bytes
            return 1
