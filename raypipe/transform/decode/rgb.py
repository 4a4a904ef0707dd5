"""Encoded image bytes → pixels: uint8 RGB, height × width × 3.

    starts with            decoder                                         equal to Pillow's `convert("RGB")`
    JPEG                   libjpeg-turbo, by csrc/ or simplejpeg           within rounding, CMYK and gray included
    PNG, plain 8-bit       OpenCV, after its checksums held                exactly
    WebP, plain lossy      OpenCV                                          exactly
    the same without OpenCV,
    other PNG and WebP,
    BMP, GIF, TIFF, AVIF   Pillow                                          exactly, but for 16-bit grayscale
    HEIC                   pillow-heif (the extra `heic`)                  exactly

Alpha is dropped, not composited, as `convert("RGB")` does: a transparent pixel keeps its stored color. 16-bit
channels keep their high byte. An animation gives its first frame. Pixels come as stored, without the EXIF
orientation, as torchvision and published ImageNet results have them; `exif=True` turns them upright. (TIFF
comes upright in any case, and HEIC as its container turns it: on loading.) `raypipe.transform.decode.array`
keeps 16 bits, floats and other channels.

No decoder runs code from the bytes. An image above a limit of `limits` is rejected by its header, before memory
of its size is allocated.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import simplejpeg

from raypipe.errors import SampleError
from raypipe.kernel import cv2
from raypipe.plan.places import Sides
from raypipe.stores.numbers import NPY
from raypipe.transform.decode.image_header import damage_in, image_kind, plain_size
from raypipe.transform.decode.jpeg import check_checksum, decode_jpeg, upright
from raypipe.transform.decode.jpeg_header import (
    jpeg_frame,
    jpeg_orientation,
    jpeg_size,
    orientation_of,
)
from raypipe.transform.decode.pillow_images import open_pillow, png_orientation

Stored = bytes | bytearray | memoryview | None
"""An image as a store has it; None is a missing value."""

_BAND_PIXELS = 1 << 20  # pixels converted at a time
# Tags of a TIFF, and values of them.
_BITS = 258
_PHOTOMETRIC = 262
_SAMPLE_FORMAT = 339
_WHITE_IS_ZERO = 0
_BIG_MOTOROLA = b"MM\0+"
_SIGNED = 2
_OTHER_TIFF = "store 8 or 16 bits of gray or RGB, or set transform.decode='array'"


def decode(
    data: Stored,
    *,
    min_side: int | None = None,
    exif: bool = False,
) -> np.ndarray:
    """Decode one image.

    Args:
        data: the encoded image; None is a missing value.
        min_side: pixels. A JPEG whose short side is at least twice this is decoded at a reduced scale
            (in the DCT domain, which is several times faster), its short side still ≥ `min_side`.
            The pixels differ a little from those of a full decode and a resize.
        exif: turn the image upright by its EXIF orientation.

    Returns:
        uint8 RGB of shape (H, W, 3), C-contiguous, writable, owned by the caller.

    Raises:
        SampleError: the bytes cannot be decoded; no other error is raised for them. Any warning of libjpeg
            rejects a JPEG, since pixels after the damage are garbage.
        ConfigError: it is AVIF or HEIC, and its decoder is not installed.
    """
    encoded, kind = _known(data)
    if kind == "JPEG":
        size = jpeg_size(encoded)
        if size is not None:
            image = decode_jpeg(encoded, size, min_side)
        else:
            check_checksum(encoded)
            image = _decode_pillow(encoded, kind, exif=False)
        if exif:
            return upright(image, jpeg_orientation(encoded))
        return image
    if cv2 is not None and plain_size(encoded, kind) is not None:
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        with contextlib.suppress(cv2.error):  # Pillow has the last word
            plain = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
            if plain is not None:
                return plain
    return _decode_pillow(encoded, kind, exif)


def image_size(data: Stored, *, exif: bool = False) -> Sides:
    """Return the (height, width) of `decode`'s result, from the header.

    Raises SampleError for what has no readable header, or is over a limit; damage further in is not looked for.
    """
    encoded, kind = _known(data)
    if kind == "JPEG":
        size = jpeg_size(encoded)
        if size is not None:
            on_its_side = exif and jpeg_orientation(encoded) >= 5
            return (size[1], size[0]) if on_its_side else size
    elif not (exif and kind in ("PNG", "WebP", "AVIF")):
        # its orientation may follow the pixels
        size = plain_size(encoded, kind)
        if size is not None:
            return size
        with damage_in(kind, encoded):
            image = open_pillow(encoded, kind)
            return image.height, image.width
    height, width, _ = decode(encoded, exif=exif).shape
    return height, width


def stored_orientation(data: bytes) -> int:
    """Orientation, 1 to 8, by which `exif` turns a JPEG or PNG; 1: it is upright, or of another kind."""
    kind = image_kind(data)
    if kind == "JPEG":
        return jpeg_orientation(data)
    if kind == "PNG":
        return png_orientation(data)
    return 1


def stored_bytes(data: Stored) -> bytes:
    """Return a sample's stored bytes; raise SampleError if there are none."""
    if data is None:
        raise SampleError(
            "no value: it is missing, cannot be read, or has over 512 MiB"
        )
    if not isinstance(data, bytes | bytearray | memoryview):
        raise SampleError(f"the value is a {type(data).__name__}, not bytes")
    if not data:
        raise SampleError("empty value (0 bytes)")
    return bytes(data)


def _known(data: Stored) -> tuple[bytes, str]:
    """The bytes of an image, and its kind; raises SampleError for what is none."""
    encoded = stored_bytes(data)
    kind = image_kind(encoded)
    if kind is None:
        raise SampleError(
            f"not an image: starts with {encoded[:3].hex(' ')}{_guess(encoded)}"
        )
    return encoded, kind


def _guess(data: bytes) -> str:
    if data[0] == 0x80 and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return " (a Python pickle; raypipe never unpickles stored values)"
    if data.lstrip()[:1] in (b"<", b"{"):
        return " (text: HTML, XML or JSON, such as a failed download leaves)"
    if data.startswith(NPY):
        return " (an array of numpy's: set transform.decode='array')"
    return ""


def encode_jpeg(image: np.ndarray, quality: int = 95) -> bytes:
    """Encode uint8 RGB of shape (H, W, 3) as JPEG; chroma is subsampled 4:2:0, as in most of ImageNet."""
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(image),
        quality=quality,
        colorspace="RGB",
        colorsubsampling="420",
    )


def resize_short_side(image: np.ndarray, side: int) -> np.ndarray:
    """Shrink an image, uint8 (H, W, 3), to a short side of at most `side` ≥ 1 pixels.

    By OpenCV; where it is not installed by Pillow, whose pixels differ a little.
    """
    height, width = image.shape[:2]
    short = min(height, width)
    if short <= side:
        return image
    # Averages of all source pixels; interpolations alias when they shrink.
    size = round(width * side / short), round(height * side / short)
    if cv2 is None:
        from PIL import Image

        return np.array(Image.fromarray(image).resize(size, Image.Resampling.HAMMING))
    return cv2.resize(image, size, interpolation=cv2.INTER_AREA)


def _decode_pillow(data: bytes, kind: str, exif: bool) -> np.ndarray:
    frame = jpeg_frame(data) if kind == "JPEG" else None
    if frame and frame.bits != 8:
        raise SampleError(f"{frame.bits}-bit JPEG: store 8 bits")
    with damage_in(kind, data):
        image = _opened(data, kind)
        image.load()
        if image.mode in ("I", "F"):
            raise SampleError(
                f"{kind} of 32-bit pixels, whose range is unknown: store 8 or 16 bits"
            )
        pixels = _rgb(image, *(_gray_of(image) if kind == "TIFF" else ()))
        orientation = 1
        if exif:
            if kind == "PNG":
                orientation = png_orientation(data)
            else:
                orientation = orientation_of(image)
        del image  # turning upright makes a copy
        if orientation > 1:
            return upright(pixels, orientation)
        return pixels


def _opened(data: bytes, kind: str) -> Any:
    try:
        return open_pillow(data, kind)
    except SyntaxError as error:
        if data.startswith(_BIG_MOTOROLA):
            raise SampleError(
                f"BigTIFF with the highest bytes first, which Pillow does not read: {_OTHER_TIFF}"
            ) from error
        if str(error) == "unknown pixel mode":
            # Pillow does not know it, damaged or not
            raise SampleError(
                f"TIFF of pixels that are not read here: {_OTHER_TIFF}"
            ) from error
        raise


def _gray_of(tiff: Any) -> tuple[int, bool]:
    """Bits of a TIFF's values, and whether 0 is white: of more than 8 bits Pillow leaves both to the caller."""
    bits, *_ = tiff.tag_v2.get(_BITS, (1,))
    form, *_ = tiff.tag_v2.get(_SAMPLE_FORMAT, (1,))
    if form == _SIGNED:
        raise SampleError(
            f"TIFF of signed values, whose range is unknown: {_OTHER_TIFF}"
        )
    return bits, tiff.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO


def _rgb(image: Any, bits: int = 16, is_inverted: bool = False) -> np.ndarray:
    """Return a decoded image as uint8 (H, W, 3), in bands: Pillow would make three copies of the whole.

    Args:
        bits: bits of gray values above 8, whose highest 8 are kept.
        is_inverted: 0 is white in gray values of more than 8 bits.
    """
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        band = image
        if rows < image.height:
            band = image.crop((0, top, image.width, min(image.height, top + rows)))
        if image.mode.startswith("I;16"):  # convert("RGB") would clip at 255
            gray = (np.asarray(band) >> (bits - 8)).astype(np.uint8)
            pixels[top : top + rows] = (~gray if is_inverted else gray)[:, :, None]
        else:
            if image.mode == "La":  # gray multiplied by alpha
                band = band.convert("LA")
            pixels[top : top + rows] = np.asarray(band.convert("RGB"))
    return pixels
