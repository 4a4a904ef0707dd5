"""The optional compiled decoder of JPEGs (jpeg_extension.c): whether it is used, and how it is called.

It gives simplejpeg's pixels, to the bit, in less time: of any box, at any scale, and it reads the Huffman codes by
its own tables (jpeg_huffman.h). It is used only after it has agreed with simplejpeg on a few images in the same
process, and refuses what is unusual or damaged; simplejpeg then has the last word.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import numpy as np
import simplejpeg

WHOLE = 8
"""Eighths: full scale."""
SCALES = (1, 2, 4)
"""Eighths: 1/8, 1/4 and 1/2, whose inverse DCTs libjpeg-turbo has SIMD code for."""

_INTERFACE_VERSION = 1  # of the extension that this module can call
_EXTRA_COLUMNS = 39  # it decodes 4 more on each side, and begins at a block's edge, up to 31 before


def decode_part(
    data: bytes, box: tuple[int, int, int, int], eighths: int = WHOLE, check_whole: bool = True
) -> np.ndarray | None:
    """Decode a box of a JPEG with the extension.

    Args:
        data: a JPEG whose header can be read.
        box: (top, left, height, width), of the image at its scale, inside it.
        eighths: the scale, in the DCT.
        check_whole: find damage behind the box as well.

    Returns:
        uint8 RGB of shape (h, w, 3), writable, maybe a view; None: there is no extension, or it refuses the bytes.
    """
    return _attempt(data, box, eighths, check_whole, _EXTRA_COLUMNS)


def decode_all(data: bytes, height: int, width: int) -> np.ndarray | None:
    """The same for a whole image, C-contiguous."""
    return _attempt(data, (0, 0, height, width), WHOLE, True, 0)


def _attempt(
    data: bytes, box: tuple[int, int, int, int], eighths: int, check_whole: bool, extra_columns: int
) -> np.ndarray | None:
    decode = extension()
    if decode is None:
        return None
    try:
        return _decode(decode, data, box, eighths, check_whole, extra_columns)
    except Exception:  # whatever it does not like, simplejpeg has the last word on
        return None


def _decode(
    decode: Callable[..., int],
    data: bytes,
    box: tuple[int, int, int, int],
    eighths: int,
    check_whole: bool,
    extra_columns: int,
) -> np.ndarray:
    top, left, height, width = box
    pixels = np.empty((height, width + extra_columns, 3), np.uint8)
    first = decode(data, left, top, width, height, eighths, check_whole, pixels, width + extra_columns)
    return pixels[:, first : first + width]


@functools.cache
def extension() -> Callable[..., int] | None:
    """The compiled decoder; None: there is none to use, and `why_no_extension` says why."""
    return None if why_no_extension() else importlib.import_module("_raypipe_jpeg").decode_crop


@functools.cache
def why_no_extension() -> str:
    """Why the compiled decoder is not used; empty = it is."""
    try:
        module = importlib.import_module("_raypipe_jpeg")
    except ImportError as error:
        return f"not built, or its libjpeg-turbo is missing ({error})"
    if module.INTERFACE_VERSION != _INTERFACE_VERSION:
        return f"built from another version of raypipe ({module.INTERFACE_VERSION}, not {_INTERFACE_VERSION})"
    try:
        agrees = all(_agrees(module.decode_crop, sampling) for sampling in ("444", "422", "420", "Gray"))
    except ValueError as error:
        return f"it cannot decode: {error}"
    return "" if agrees else "its libjpeg-turbo gives other pixels than simplejpeg's"


def missing_extension() -> str:
    """What to tell a user who has no compiled decoder, with the packages to install; empty = it is used."""
    why = why_no_extension()
    if not why:
        return ""
    return (
        f"JPEGs are decoded slower than they could be, without the compiled decoder: {why}. Install a C compiler "
        "and libjpeg-turbo's headers (Debian, Ubuntu: apt-get install gcc libjpeg-dev; Fedora: dnf install gcc "
        "libjpeg-turbo-devel; macOS: brew install jpeg-turbo), then raypipe again (in its repository: "
        "uv sync --reinstall-package raypipe)"
    )


def _agrees(decode: Callable[..., int], sampling: str) -> bool:
    """Whether it gives simplejpeg's pixels, at all scales, on noise, which uses all coefficients."""
    noise = np.random.default_rng(0).integers(0, 256, (69, 85, 3), np.uint8)
    data = simplejpeg.encode_jpeg(noise, 95, "RGB", sampling)
    for eighths in (*SCALES, WHOLE):
        side = -(-69 * eighths // 8)
        factor = 2.0 if eighths < WHOLE else 1.0
        whole = simplejpeg.decode_jpeg(data, "RGB", min_height=side, min_width=side, min_factor=factor)
        rows, columns = whole.shape[:2]
        top, left, height, width = rows // 3, columns // 2, rows // 2, columns // 3
        part = _decode(decode, data, (top, left, height, width), eighths, True, _EXTRA_COLUMNS)
        if not np.array_equal(part, whole[top : top + height, left : left + width]):
            return False
    return True
