"""Which JPEGs a GPU decodes, by their headers: one decision, for the actors and for the training device.

    image                                                    decoded by
    JPEG as nvJPEG documents it: Huffman coded, baseline     the GPU
    or progressive, 8 bit, YCbCr or grey, with an end
    any other JPEG: CMYK, RGB, 12 bit, lossless,             the CPU
    arithmetic, rare subsampling, cut short
    a JPEG that `transform.apply_exif` has to turn           the CPU
    PNG, WebP, TIFF, …                                       the CPU

It depends on the bytes alone, and not on the decoder that a device has; `without_exif` makes up for what these
differ in.
"""

from __future__ import annotations

from collections.abc import Iterator

from raypipe.transform.jpeg import jpeg_orientation
from raypipe.transform.limits import MAX_PIXELS

# Luma sampling (horizontal, vertical) over chroma's 1, 1: 4:4:4, 4:2:2, 4:2:0, 4:4:0, 4:1:1 and 4:1:0, the list in
# nvJPEG's introduction. torchvision raises for the others.
_SUBSAMPLINGS = {0x11, 0x21, 0x22, 0x12, 0x41, 0x42}
_APP0, _APP1, _APP14, _EOI, _SOS = 0xE0, 0xE1, 0xEE, 0xD9, 0xDA
_EXIF = b"Exif\0\0"


def nvjpeg_pixels(data: memoryview | bytes, *, exif: bool = False) -> int | None:
    """Pixels that a JPEG declares if it is of a kind that nvJPEG is known to decode rightly; None for any other.

    https://docs.nvidia.com/cuda/nvjpeg: Huffman coded baseline and progressive, 8 bit, 1 or 3 components. Beyond
    that, those without an end marker are left to libjpeg, which tells whether they are cut short; and so are those
    that say, by Adobe's marker or by their components' names, that they hold RGB.

    Args:
        exif: images are to be turned upright, which is left to the CPU.
    """
    if len(data) < 4 or data[:3] != b"\xff\xd8\xff" or data[-2:] != b"\xff\xd9":
        return None
    if exif and jpeg_orientation(bytes(data)) != 1:
        return None
    adobe, jfif = None, False
    for marker, at, end in _segments(data):
        body = data[at:end]
        if marker in (0xC0, 0xC2):
            return _frame_pixels(body, adobe, jfif)
        if (0xC1 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker in (_EOI, _SOS):
            return None  # another coding, or data without a frame
        if marker == _APP0 and body[:4] == b"JFIF":
            jfif = True
        if marker == _APP14 and body[:5] == b"Adobe" and len(body) >= 12:
            adobe = body[11]
    return None


def _segments(data: memoryview | bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each segment from the second marker on: its marker, and where its body begins and ends in the data."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        end = min(at + 2 + int.from_bytes(data[at + 2 : at + 4], "big"), len(data))
        yield marker, at + 4, end
        at = max(end, at + 4)


def _frame_pixels(frame: memoryview | bytes, adobe: int | None, jfif: bool) -> int | None:
    """As `nvjpeg_pixels`, of the frame header: precision, height, width, and 3 bytes for each component."""
    if len(frame) < 6 or frame[0] != 8 or frame[5] not in (1, 3) or len(frame) != 6 + 3 * frame[5]:
        return None
    samplings = [frame[at] for at in range(7, len(frame), 3)]
    names = [frame[at] for at in range(6, len(frame), 3)]
    if frame[5] == 1:
        known = samplings == [0x11]
    else:
        rgb = adobe == 0 or (adobe is None and not jfif and names == [*b"RGB"])
        known = not rgb and samplings[0] in _SUBSAMPLINGS and samplings[1:] == [0x11, 0x11]
    num_pixels = int.from_bytes(frame[1:3], "big") * int.from_bytes(frame[3:5], "big")
    return num_pixels if known and 0 < num_pixels <= MAX_PIXELS else None


def without_exif(data: memoryview | bytes) -> bytearray | None:
    """A copy of a JPEG whose EXIF is blank; None: it has none.

    torchcodec turns every image upright, and cannot be told otherwise.
    """
    found = []
    for marker, at, end in _segments(data):
        if marker in (_EOI, _SOS):
            break
        if marker == _APP1 and data[at : min(end, at + len(_EXIF))] == _EXIF:
            found.append((at, end))
    if not found:
        return None
    copy = bytearray(data)
    for at, end in found:  # all of it: torchcodec's decoder for CPUs does not ask whether it begins with "Exif"
        copy[at:end] = bytes(end - at)
    return copy
