"""The limits on what one image may declare, and what its decoding may take."""

from __future__ import annotations

from raypipe.errors import SampleError
from raypipe.kernel import MAX_DECODE_BYTES, MAX_PIXELS

MAX_SCANNED_PIXELS = 16 * 178_956_970
"""Pixels times scans of a JPEG, of which a core does 1.5 to 7 thousand million in a second. Encoders write about
10 scans; of photos of 12 MP 238 are read."""
MAX_SIDE = 1 << 20
"""Pixels, as OpenCV has it. A row costs Pillow a pointer; 2^24 of one pixel cost libwebp 20 s in an animation."""


def check_size(width: int, height: int, num_bytes: int = 0) -> None:
    """Raise SampleError above MAX_PIXELS or MAX_SIDE, or if decoding takes more than MAX_DECODE_BYTES."""
    if width * height > MAX_PIXELS:
        raise SampleError(f"declares {width}x{height} pixels, limit is {MAX_PIXELS}")
    if max(width, height) > MAX_SIDE:
        raise SampleError(
            f"declares {width}x{height} pixels, limit of a side is {MAX_SIDE}"
        )
    if num_bytes > MAX_DECODE_BYTES:
        raise SampleError(
            f"declares {width}x{height} pixels in a form that takes {num_bytes >> 20} MiB to decode, limit is "
            f"{MAX_DECODE_BYTES >> 20}: store it smaller, or as a baseline JPEG"
        )
