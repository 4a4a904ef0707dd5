"""JPEGs → pixels: whole, or only the part that a random resized crop shows.

The optional extension (`raypipe.kernel`) gives exactly simplejpeg's pixels of any box, in less time. It is used
only after it has agreed with simplejpeg on a few images in the same process. It rejects unusual or damaged images,
which simplejpeg then decodes or rejects. So nodes with and without the extension have the same pixels and the same
bad samples, and can make one run together.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import numpy as np
import simplejpeg

from raypipe.errors import SampleError
from raypipe.kernel import (
    EXTRA_COLUMNS,
    decode_crop,
    is_intact,
    sizes,
    why_no_kernel,
)
from raypipe.plan.places import Sides
from raypipe.transform.decode.jpeg_header import (
    jpeg_orientation,
    jpeg_size,
    without_profile,
)

Box = tuple[int, int, int, int]
"""(top, left, height, width), pixels of an image, inside it."""
Undecoded = tuple[Sides, Callable[[Box], np.ndarray]]
"""(height, width) of an image, and what decodes a box of it: uint8 RGB (h, w, 3)."""


def sizes_by_header(
    images: Sequence[bytes | memoryview | None], exif: bool
) -> np.ndarray:
    """(height, width), int32 (B, 2), of those that the kernel decodes; zeros of others.

    Those are also others that `exif` turns upright.
    """
    found, has_metadata = sizes(images)
    if exif:
        for row in np.flatnonzero(has_metadata).tolist():
            if jpeg_orientation(bytes(images[row] or b"")) > 1:
                found[row] = 0
    return found


def decode_jpeg(data: bytes, size: Sides, min_side: int | None = None) -> np.ndarray:
    """Decode a JPEG that `jpeg_size` could read, as stored; for the rest see `rgb.decode`."""
    if min_side and min(size) >= 2 * min_side:
        return decode_jpeg_at(data, min_side)
    return decode_box(data, (0, 0, *size), extra_columns=0)


def decode_jpeg_at(data: bytes, short_side: int) -> np.ndarray:
    """A JPEG that `jpeg_size` could read, as stored; raises SampleError where it is damaged.

    Args:
        short_side: pixels; the scale is the smallest of 1/8, 2/8, … at which the short side has as many, and
            none above 4/8; 0 = full size.
    """
    check_checksum(data)
    try:
        sides = {
            "min_height": short_side,
            "min_width": short_side,
            "min_factor": 2.0 if short_side else 1.0,
        }
        return simplejpeg.decode_jpeg(without_profile(data), "RGB", **sides)
    except (ValueError, RuntimeError) as error:
        if "Premature end of JPEG file" in str(error):
            damage = "truncated"
        else:
            damage = "damaged"
        raise SampleError(f"{damage} JPEG: {error} ({len(data)} bytes)") from error


def open_for_crop(data: bytes, exif: bool) -> Undecoded | None:
    """A JPEG by its header; None: decode it whole, as those that `exif` turns."""
    if why_no_kernel() or not data.startswith(b"\xff\xd8\xff"):
        return None
    try:
        size = jpeg_size(data)
    except SampleError:  # `decode` says why
        return None
    if size is None or (exif and jpeg_orientation(data) > 1):
        return None
    return size, functools.partial(decode_box, data)


def decode_box(data: bytes, box: Box, extra_columns: int = EXTRA_COLUMNS) -> np.ndarray:
    """Decode a box of a JPEG that `jpeg_size` could read; the same with and without the extension.

    Args:
        extra_columns: room for columns decoded next to the box; 0 for a whole image: C-contiguous.

    Returns:
        uint8 RGB of shape (h, w, 3), writable; maybe a view.

    Raises:
        SampleError: the file is damaged, in the box or anywhere else.
    """
    top, left, height, width = box
    if not why_no_kernel():
        # whatever it does not like, simplejpeg has the last word on
        with contextlib.suppress(ValueError):
            pixels = np.empty((height, width + extra_columns, 3), np.uint8)
            # True: it reads behind the box as well, so that damage there is found.
            first = decode_crop(
                data, left, top, width, height, True, pixels, width + extra_columns
            )
            return pixels[:, first : first + width]
    return decode_jpeg_at(data, 0)[top : top + height, left : left + width]


def missing_extension() -> str:
    """Message for a user without the compiled decoder, with the packages to install; empty = it is used."""
    why = why_no_kernel()
    if not why:
        return ""
    return (
        f"JPEGs are decoded slower than they could be, without the compiled decoder: {why}. Install a C compiler "
        "and libjpeg-turbo's headers (Debian, Ubuntu: apt-get install gcc libjpeg-dev; Fedora: dnf install gcc "
        "libjpeg-turbo-devel; macOS: brew install jpeg-turbo), then raypipe again (in its repository: "
        "uv sync --reinstall-package raypipe-data)"
    )


def upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an EXIF orientation. (H, W, 3) → (H, W, 3), or (W, H, 3) for 5 to 8; unknown values are 1."""
    if 5 <= orientation <= 8:
        image = image.transpose(1, 0, 2)
    flips = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}
    rows, columns = flips.get(orientation, (1, 1))
    return np.ascontiguousarray(image[::rows, ::columns])


def check_checksum(data: bytes | memoryview) -> None:
    """Raise SampleError where a seekable JPEG is not as it was written; any other file passes."""
    if not is_intact(data):
        raise SampleError(
            f"damaged JPEG: its checksum is wrong ({len(data)} bytes). If another program has edited the file "
            "since it was made seekable, convert the original again"
        )
