"""Stored bytes → an array as it was stored, (H, W, C) of any dtype and number of channels, without 8 bits between.

    starts with      array                                                        read by
    .npy             (H, W) or (H, W, C) of integers or floats of 8 to 64 bits    numpy; never a pickle
    PNG              uint8 or uint16: gray, RGB or RGBA                           OpenCV (the extra `opencv`)
    TIFF             any number of channels of 8 to 64 bits                       tifffile (the extra `arrays`)
    what is left     uint8 RGB                                                    `raypipe.transform.decode.rgb`

An image of two dimensions becomes (H, W, 1). Colors are in the order R, G, B, A. The values of a TIFF are those in
the file, as tifffile reads them: white may be 0, and colors multiplied by alpha. TIFFs of palettes, YCbCr, JPEG
(except CMYK) and fewer than 8 bits become uint8 RGB. A gray PNG with alpha becomes RGBA, as cv2 has it; the one
transparent value (tRNS) of a gray PNG is dropped. Images above a limit of `limits` are refused by their header.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError, SampleError
from raypipe.kernel import cv2
from raypipe.packages import to_install
from raypipe.plan.places import Sides
from raypipe.stores.numbers import NPY, NpyHeader, npy_header, read_npy
from raypipe.transform.decode.image_header import (
    damage_in,
    image_kind,
    png_chunks,
    png_of_pixels,
    png_size,
)
from raypipe.transform.decode.jpeg import upright
from raypipe.transform.decode.limits import check_size
from raypipe.transform.decode.rgb import Stored, decode, image_size, stored_bytes

_PNG_BYTES = 12  # per pixel of 8 bits: RGBA, three times
# bits by color
_PNG_DEPTHS = {
    0: (1, 2, 4, 8, 16),
    2: (8, 16),
    3: (1, 2, 4, 8),
    4: (8, 16),
    6: (8, 16),
}
_PALETTE = 3
_YCBCR = 6  # photometries of a TIFF
_TIFF_JPEG = 7  # a compression
_ORIENTATION = 274  # a tag


def decode_array(data: Stored) -> np.ndarray:
    """Decode one stored array or image.

    Returns:
        (H, W, C), C-contiguous, writable, owned by the caller, in native byte order.

    Raises:
        SampleError: the bytes cannot be decoded; no other error is raised for them.
        ConfigError: as `decode` does; or it is a TIFF, and tifffile or imagecodecs is not installed here.
    """
    encoded = stored_bytes(data)
    kind = "npy" if encoded.startswith(NPY) else image_kind(encoded)
    if kind == "npy":
        array = read_npy(encoded, _image_header(encoded))
        return array if array.ndim == 3 else array[:, :, None]
    if kind == "PNG":
        return _png(encoded)
    if kind == "TIFF":
        with damage_in(kind, encoded):
            return _tiff(encoded)
    return decode(encoded)


def decoder_of(config: TransformConfig) -> Callable[[bytes], np.ndarray]:
    """The decoder of a stream: to uint8 RGB, or with `transform.decode: array` as images are stored."""
    if config.decode == "array":
        return decode_array
    return functools.partial(decode, exif=config.apply_exif)


def decode_any(data: Stored) -> np.ndarray:
    """An image as `decode` gives it; what that refuses and is a .npy or a TIFF, as `decode_array` does."""
    try:
        return decode(data)
    except SampleError:
        encoded = bytes(data or b"")
        if encoded.startswith(NPY) or image_kind(encoded) == "TIFF":
            return decode_array(encoded)
        raise


def header_size(data: Stored, exif: bool = False) -> Sides:
    """(height, width) that `decode`, or else `decode_array`, gives, by the header; raises SampleError."""
    try:
        return image_size(data, exif=exif)
    except SampleError:
        encoded = bytes(data or b"")
        if encoded.startswith(NPY):
            height, width, *_ = _image_header(encoded).shape
            return height, width
        if image_kind(encoded) != "TIFF":
            raise
    with damage_in("TIFF", encoded):
        page = _tiff_page(encoded)
        size = page.imagelength, page.imagewidth
        if 5 <= page.tags.valueof(_ORIENTATION, 1) <= 8:
            return size[::-1]
        return size


def _image_header(data: bytes) -> NpyHeader:
    """The header of a .npy that is an image, within the limits; raises SampleError for any other."""
    header = npy_header(data)
    if header.dtype.kind == "b":
        raise SampleError("a .npy of bool: store integers or floats of 8 to 64 bits")
    if len(header.shape) not in (2, 3) or not all(header.shape):
        raise SampleError(
            f"a .npy of shape {header.shape}: it must have (H, W) or (H, W, C)"
        )
    height, width, *_ = header.shape
    check_size(width, height, math.prod(header.shape) * header.dtype.itemsize)
    return header


def _png(data: bytes) -> np.ndarray:
    if data[8:16] != b"\0\0\0\rIHDR":
        raise SampleError("damaged PNG: it does not begin with its header")
    if any(holds is None for _, _, holds in png_chunks(data)):
        raise SampleError(f"truncated PNG ({len(data)} bytes)")
    with damage_in("PNG", data):
        # cv2 would give the first frame of an animation, Pillow the picture before it
        data = png_of_pixels(data)
    height, width = png_size(data)
    depth, color, *methods = data[24:29]
    if depth not in _PNG_DEPTHS.get(color, ()) or methods not in ([0, 0, 0], [0, 0, 1]):
        # libpng would print why
        raise SampleError(f"damaged PNG: its header is wrong ({len(data)} bytes)")
    check_size(
        width, height, width * height * _PNG_BYTES * (2 if data[24] == 16 else 1)
    )
    if cv2 is None:
        raise ConfigError(
            f"PNGs as arrays need OpenCV: {to_install('opencv')}, on every node"
        )
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise SampleError(f"damaged PNG: {' '.join(str(error).split())}") from error
    if image is None or image.shape[:2] != (height, width):
        raise SampleError(f"damaged PNG ({len(data)} bytes)")
    image = image.reshape(height, width, -1)
    if image.shape[2] < 3:
        return image
    # OpenCV has blue first
    return np.ascontiguousarray(image[..., [2, 1, 0, 3][: image.shape[2]]])


def _tiff_page(data: bytes) -> Any:
    """The first image of a TIFF, not yet read, within the limits."""
    try:
        import imagecodecs  # noqa: F401 (by which tifffile unpacks)
        import tifffile
    except ImportError as error:
        message = f"TIFFs as arrays need tifffile and imagecodecs ({error}): {to_install('arrays')}, on every node"
        raise ConfigError(message) from error
    page = tifffile.TiffFile(io.BytesIO(data)).pages.first
    tile = page.tilewidth * page.tilelength * page.samplesperpixel
    # Two copies of the image; a tile unpacked and in order.
    num_bytes = 2 * (page.size + tile) * max(1, page.bitspersample // 8)
    check_size(page.imagewidth, page.imagelength, num_bytes)
    return page


def _tiff(data: bytes) -> np.ndarray:
    page = _tiff_page(data)
    is_jpeg = page.compression == _TIFF_JPEG and page.samplesperpixel in (1, 3)
    if is_jpeg or page.bitspersample < 8 or page.photometric in (_PALETTE, _YCBCR):
        return decode(data)  # values are not channels themselves
    if page.dtype is None or page.dtype.kind not in "uif":
        raise SampleError(
            f"a TIFF of {page.dtype}: store integers or floats of 8 to 64 bits"
        )
    blocks = list(zip(page.dataoffsets, page.databytecounts, strict=False))
    if len(blocks) != math.prod(page.chunked) or any(
        start < 8 or start + size > len(data) for start, size in blocks
    ):
        # tifffile would fill the rest with zeros
        raise SampleError(f"truncated TIFF ({len(data)} bytes)")
    # separate channels are (C, 1, H, W, 1)
    parts = page.asarray(squeeze=False, maxworkers=1)
    image = np.moveaxis(parts[:, 0], 0, 2).reshape(
        page.imagelength, page.imagewidth, -1
    )
    return upright(image, page.tags.valueof(_ORIENTATION, 1))


def as_rgb(array: np.ndarray) -> np.ndarray:
    """An array (H, W, C) to look at, uint8 (H, W, 3): its first three channels, or one; others than uint8 are
    scaled from their least to their largest value."""
    if array.shape[2] >= 3:
        shown = array[..., :3]
    else:
        shown = array[..., [0, 0, 0]]
    if shown.dtype == np.uint8:
        return np.ascontiguousarray(shown)
    with np.errstate(over="ignore"):  # numbers of a damaged file may be of any size
        values = np.nan_to_num(shown.astype(np.float64), posinf=0, neginf=0)
        span = values.max() - values.min()
        if not 0 < span < np.inf:
            return np.zeros(values.shape, np.uint8)
        return np.rint((values - values.min()) / span * 255).astype(np.uint8)
