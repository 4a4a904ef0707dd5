"""What a random resized crop shows of a JPEG, decoded without the rest.

    mode      decodes                                                   pixels
    off       the whole image                                           the reference
    exact     the crop, where the extension is there; else the whole    to the bit those of "off"
    scaled    the same, at 1/2, 1/4 or 1/8 where the crop stays at      others: less aliased; the same with and
              least as large as what it is resized to                   without the extension, to the bit

So a mode fixes the pixels, and which samples are bad; the extension (`jpeg_extension`) only fixes the
speed, and nodes with and without it can make one run together. Whatever it refuses, and whatever is not a JPEG, is
decoded whole by `raypipe.transform.decode.decode`.

With `check_whole` off, a JPEG is not read beyond the blocks of the crop's last row, and damage behind them makes
no bad sample. A decoder of whole images cannot do the same, so this needs the extension.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import simplejpeg

from raypipe.config import CropDecode
from raypipe.errors import ConfigError, SampleError
from raypipe.transform.crop_first import Box, DecodeBox
from raypipe.transform.decode import decode, decode_jpeg_at, jpeg_orientation
from raypipe.transform.image_header import jpeg_size
from raypipe.transform.jpeg_extension import SCALES, WHOLE, decode_part, extension, why_no_extension

_MIN_SCALED_SIDE = 16  # pixels: below, two scales can give the same size, by which simplejpeg is told the scale


class CropDecoder:
    """Decodes the crops of JPEGs.

    Args:
        mode: see the module's table; not "off".
        target: (height, width) to which crops are resized, pixels.
        check_whole: find damage behind the crop as well.
        exif: images that EXIF turns are decoded whole.
        min_side: JPEGs that `decode` would reduce to this are decoded whole.

    Raises:
        ConfigError: `check_whole` is off, and there is no extension.
    """

    def __init__(
        self,
        mode: CropDecode,
        target: tuple[int, int],
        *,
        check_whole: bool = True,
        exif: bool = False,
        min_side: int | None = None,
    ) -> None:
        if not check_whole and extension() is None:
            raise ConfigError(
                "transform.check_whole=False needs raypipe's JPEG extension in every actor, and here it cannot be"
                f" used: {why_no_extension()}. Build it (see docs/decode.md), or leave transform.check_whole on"
            )
        self.mode, self.target, self.check_whole = mode, target, check_whole
        self.exif, self.min_side = exif, min_side
        self._useful = mode == "scaled" or extension() is not None

    def open(self, data: Any) -> tuple[tuple[int, int], DecodeBox] | None:
        """(height, width) of a JPEG by its header, and what decodes a box of it; None: decode it whole."""
        if not (self._useful and isinstance(data, bytes) and data.startswith(b"\xff\xd8\xff")):
            return None
        try:
            size = jpeg_size(data)
        except SampleError:  # `decode` says why
            return None
        if size is None or (self.min_side and min(size) >= 2 * self.min_side):
            return None
        height, width = size
        if self.exif and b"Exif\0\0" in data and 2 <= jpeg_orientation(data) <= 8:
            return None
        return (height, width), functools.partial(self._decode, data, height, width)

    def _decode(self, data: bytes, height: int, width: int, box: Box) -> np.ndarray:
        eighths = self._eighths(height, width, box)
        if eighths < WHOLE:
            top, rows = _scaled_span(box[0], box[2], height, eighths)
            left, columns = _scaled_span(box[1], box[3], width, eighths)
            box = top, left, rows, columns
        return decode_box(data, box, eighths, self.check_whole)

    def _eighths(self, height: int, width: int, box: Box) -> int:
        if self.mode != "scaled" or min(height, width) < _MIN_SCALED_SIDE:
            return WHOLE
        enough = (n for n in SCALES if box[2] * n >= 8 * self.target[0] and box[3] * n >= 8 * self.target[1])
        return next(enough, WHOLE)


def decode_box(data: bytes, box: Box, eighths: int = WHOLE, check_whole: bool = True) -> np.ndarray:
    """Decode a box of a JPEG: the same with and without the extension.

    Args:
        data: a JPEG whose header can be read.
        box: of the image at its scale, inside it.
        eighths: the scale, in the DCT: 8, or, of an image of at least 16 x 16 pixels, 1, 2 or 4.
        check_whole: find damage behind the box as well; without the extension it is found in any case.

    Returns:
        uint8 RGB of shape (h, w, 3), writable; a view.

    Raises:
        SampleError: the file is damaged.
    """
    part = decode_part(data, box, eighths, check_whole)
    if part is not None:
        return part
    top, left, height, width = box
    return _decode_whole(data, eighths)[top : top + height, left : left + width]


def _decode_whole(data: bytes, eighths: int) -> np.ndarray:
    if eighths == WHOLE:
        return decode(data)
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    return decode_jpeg_at(data, _scaled(min(height, width), eighths))


def _scaled(side: int, eighths: int) -> int:
    return -(-side * eighths // 8)  # libjpeg rounds up


def _scaled_span(start: int, length: int, side: int, eighths: int) -> tuple[int, int]:
    """(start, length) at a scale of a span in `side` pixels: rounded, at least a pixel, inside."""
    scaled_side = _scaled(side, eighths)
    first = min((start * eighths + 4) // 8, scaled_side - 1)
    end = min(((start + length) * eighths + 4) // 8, scaled_side)
    return first, max(end - first, 1)
