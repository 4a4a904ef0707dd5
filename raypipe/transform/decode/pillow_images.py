"""Images that Pillow decodes, and their orientation; see `image_header` for the limits of their sizes."""

from __future__ import annotations

import contextlib
import importlib
import io
from typing import Any

from raypipe.errors import ConfigError, SampleError
from raypipe.packages import to_install
from raypipe.transform.decode.image_header import (
    PNG_ORIENTATION,
    damage_in,
    png_chunks,
    png_of_pixels,
    webp_size,
)
from raypipe.transform.decode.jpeg_header import check_jpeg, jpeg_frame, orientation_of
from raypipe.transform.decode.limits import check_size

_PNG_END = b"\0\0\0\0IEND\xae\x42\x60\x82"
_TILE_WIDTH = 322
_TILE_HEIGHT = 323  # tags of a TIFF
# Bytes per pixel: 8 bits and 4:2:0 took 9 and 7 at the peak of a decode. AVIF's container is read: libavif
# decodes a frame that is larger than declared, up to its own limit, 2^28 pixels.
_HEIF_BYTES = 20


def png_orientation(data: bytes) -> int:
    """Orientation of a PNG by its eXIf, or else by XMP or text, 1 to 8; 1 where they are damaged."""
    from PIL import Image, PngImagePlugin

    metadata = [
        chunk
        for kind, chunk, holds in png_chunks(data)
        if holds and kind in PNG_ORIENTATION
    ]
    if not metadata:
        return 1
    # the header and the metadata, also from behind the pixels
    told = data[:33] + b"".join(metadata) + _PNG_END
    with contextlib.suppress(SampleError), damage_in("PNG", data):
        # Pillow would decode pixels before the metadata behind them
        of_metadata = PngImagePlugin.PngImageFile(io.BytesIO(told))
        image = Image.Image()
        image.info.update(of_metadata.info)
        return orientation_of(image)
    return 1


def open_pillow(data: bytes, kind: str) -> Any:
    """Pillow's image, not yet decoded. Its plugin is called by name: `Image.open` would judge the size first.

    Raises:
        SampleError: it is over a limit.
        ConfigError: what decodes this kind is not installed.
        Exception: Pillow's plugins raise a dozen types on bad bytes.
    """
    if kind == "WebP":
        webp_size(data)
    if kind == "PNG":
        data = png_of_pixels(data)
    image = _plugin(kind)(io.BytesIO(data))
    width, height = image.size
    if kind in ("AVIF", "HEIC"):
        check_size(width, height, width * height * _HEIF_BYTES)
        return image
    pixel_bytes = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}.get(
        image.mode, 4
    )
    if kind == "JPEG":
        frame = jpeg_frame(data)
        if frame is None or (frame.height, frame.width) != (height, width):
            raise ValueError("its header can be read in two ways")
        check_jpeg(data, width, height, pixel_bytes + 3)
    elif kind != "WebP":
        tile_pixels = 0
        if kind == "TIFF":
            # libtiff unpacks a tile, which may be far larger than its image
            tile_pixels = image.tag_v2.get(_TILE_WIDTH, 0) * image.tag_v2.get(
                _TILE_HEIGHT, 0
            )
        # Turning upright copies it; conversion adds 3 bytes of RGB for each pixel.
        extra = max(width * height * max(pixel_bytes, 3), tile_pixels * pixel_bytes)
        check_size(width, height, width * height * pixel_bytes + extra)
    return image


def _plugin(kind: str) -> Any:
    """The class that reads a kind of image; raises ConfigError where it is missing, which other nodes may have."""
    if kind == "HEIC":
        try:
            return importlib.import_module("pillow_heif").HeifImageFile
        except ImportError as error:
            extra = f"{to_install('heic')}, on every node"
            raise ConfigError(
                f"HEIC images need pillow-heif ({error}): {extra}"
            ) from error
    name = kind if kind == "WebP" else kind.capitalize()
    plugin = importlib.import_module(f"PIL.{name}ImagePlugin")
    if kind == "AVIF" and not plugin.SUPPORTED:
        raise ConfigError(
            "AVIF images need a Pillow with libavif, as PyPI's wheels have it, on every node"
        )
    return getattr(plugin, f"{name}ImageFile")
