"""Images as files that Pillow writes, and the chunks of PNGs that it does not."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def saved(
    pixels: np.ndarray | Image.Image, kind: str = "JPEG", mode: str = "", **options: Any
) -> bytes:
    """A file of pixels, which are converted to a mode first unless it is empty."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    (image.convert(mode) if mode else image).save(out, kind, **options)
    return out.getvalue()


def png_chunk(kind: str, body: bytes, checksum: int | None = None) -> bytes:
    """A chunk of a PNG, with its right checksum unless another is given."""
    named = kind.encode() + body
    crc = zlib.crc32(named) if checksum is None else checksum
    return struct.pack(">I", len(body)) + named + struct.pack(">I", crc)
