"""Encoded image bytes → pixels: uint8 RGB, height × width × 3.

    starts with            decoder                          equal to Pillow's `convert("RGB")`
    JPEG                   libjpeg-turbo, by simplejpeg     within rounding, CMYK and grey included
    PNG, plain 8-bit       cv2, after its checksums held    exactly
    WebP, plain lossy      cv2                              exactly
    other PNG and WebP,
    BMP, GIF, TIFF         Pillow                           exactly, but for 16-bit greyscale

Alpha is dropped, not composited, as `convert("RGB")` does: the colour under a transparent pixel is what
the file holds there. 16-bit channels keep their high byte. An animation gives its first frame. Pixels come
as stored, without the EXIF orientation, as torchvision and everybody's ImageNet numbers have them;
`exif=True` turns them upright. (TIFF comes upright in any case: Pillow applies its orientation on loading.)

Nothing here runs code that is in the bytes. What is above a limit of `image_header` is refused by its
header, before anything of its size is allocated.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import cv2
import numpy as np
import simplejpeg

from raypipe.errors import SampleError
from raypipe.transform.image_header import MAX_PIXELS, image_kind, jpeg_size, open_pillow, plain_size
from raypipe.transform.jpeg_extension import decode_all

_CV2_FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_ORIENTATION_TAG = 0x0112  # of EXIF
_BAND_PIXELS = 1 << 20  # that are converted at a time


def decode(
    data: bytes | bytearray | memoryview | None,
    *,
    min_side: int | None = None,
    max_pixels: int = MAX_PIXELS,
    exif: bool = False,
) -> np.ndarray:
    """Decode one image.

    Args:
        data: the encoded image; None is a missing value.
        min_side: pixels. A JPEG whose short side is at least twice this is decoded at a reduced scale
            (in the DCT domain, which is several times faster), its short side still ≥ `min_side`.
            The pixels differ a little from those of a full decode and a resize.
        max_pixels: height × width as declared by the file's header, above which it is refused unread; so is what
            would take more than `MAX_DECODE_BYTES` (1 GiB) to decode, or a JPEG of too many scans for its size.
        exif: turn the image upright by its EXIF orientation.

    Returns:
        uint8 RGB of shape (H, W, 3), C-contiguous, writable, owned by the caller.

    Raises:
        SampleError: whatever the bytes are, this and no other; the message says what is wrong with them.
            A JPEG is refused for anything that libjpeg warns of, since what follows the damage is garbage.
    """
    if data is None:
        raise SampleError("no value")
    if not isinstance(data, bytes):
        if not isinstance(data, bytearray | memoryview):
            raise SampleError(f"the value is a {type(data).__name__}, not bytes")
        data = bytes(data)
    if not data:
        raise SampleError("empty value (0 bytes)")
    kind = image_kind(data)
    if kind is None:
        raise SampleError(f"not an image: starts with {data[:3].hex(' ')}{_guess(data)}")
    if kind == "JPEG":
        return _decode_jpeg(data, min_side, max_pixels, exif)
    if plain_size(data, kind, max_pixels) is not None:
        with contextlib.suppress(Exception):  # Pillow has the last word
            image = cv2.imdecode(np.frombuffer(data, np.uint8), _CV2_FLAGS)
            if image is not None:
                return image
    return _decode_pillow(data, kind, max_pixels, exif)


def encode_jpeg(image: np.ndarray, quality: int = 95) -> bytes:
    """Encode uint8 RGB of shape (H, W, 3) as JPEG; chroma is subsampled 4:2:0, as in most of ImageNet."""
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(image), quality=quality, colorspace="RGB", colorsubsampling="420"
    )


def resize_short_side(image: np.ndarray, side: int) -> np.ndarray:
    """Shrink an image so that its short side is `side` pixels; one that is no larger is returned as it is.

    Args:
        image: uint8 of shape (H, W, 3).
        side: pixels, ≥ 1.

    Returns:
        uint8 of shape (h, w, 3) with min(h, w) == min(side, H, W), the aspect ratio kept to a pixel.
    """
    height, width = image.shape[:2]
    short = min(height, width)
    if short <= side:
        return image
    # INTER_AREA averages all source pixels; other interpolations alias when they shrink.
    shape = round(width * side / short), round(height * side / short)
    return cv2.resize(image, shape, interpolation=cv2.INTER_AREA)


def _decode_jpeg(data: bytes, min_side: int | None, max_pixels: int, exif: bool) -> np.ndarray:
    size = jpeg_size(data, max_pixels)
    if size is None:
        return _decode_pillow(data, "JPEG", max_pixels, exif)
    height, width = size
    short_side = min_side if min_side and min(height, width) >= 2 * min_side else 0
    image = None if short_side else decode_all(data, height, width)
    if image is None:
        image = decode_jpeg_at(data, short_side)
    if exif and b"Exif\0\0" in data:
        return _upright(image, jpeg_orientation(data))
    return image


def decode_jpeg_at(data: bytes, short_side: int) -> np.ndarray:
    """A JPEG whose header can be read, at a reduced scale, as stored.

    Args:
        short_side: pixels; the scale is the smallest of 1/8, 2/8, … at which the short side has as many, and
            none above 4/8; 0 = full size.

    Raises:
        SampleError: the JPEG is damaged.
    """
    try:
        return simplejpeg.decode_jpeg(
            data,
            colorspace="RGB",
            min_height=short_side,
            min_width=short_side,
            min_factor=2.0 if short_side else 1.0,
        )
    except Exception as error:
        damage = "truncated" if "Premature end of JPEG file" in str(error) else "damaged"
        raise SampleError(f"{damage} JPEG: {error} ({len(data)} bytes)") from error


def _decode_pillow(data: bytes, kind: str, max_pixels: int, exif: bool) -> np.ndarray:
    from PIL import ImageOps  # 0.1 s, and most stores are JPEG alone

    # Pillow warns (not an error) of odd metadata and of large images, for which `max_pixels` stands here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = open_pillow(data, kind, max_pixels)
            image.load()
            if image.mode in ("I", "F"):
                raise SampleError(f"{kind} of 32-bit pixels, whose range is unknown: store 8 or 16 bits")
            return _rgb(ImageOps.exif_transpose(image) if exif else image)
        except SampleError:
            raise
        except Exception as error:  # Pillow's plugins raise a dozen types on bad bytes
            damage = "truncated" if "truncated" in str(error).lower() else "damaged"
            reason = f"{damage} {kind}: {type(error).__name__}: {error} ({len(data)} bytes)"
            raise SampleError(reason) from error


def _rgb(image: Any) -> np.ndarray:
    """A decoded image as uint8 (H, W, 3), in bands: Pillow would make three copies of the whole."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        part = image
        if rows < image.height:
            part = image.crop((0, top, image.width, min(image.height, top + rows)))
        if image.mode.startswith("I;16"):  # convert("RGB") would clip at 255
            pixels[top : top + rows] = (np.asarray(part) >> 8)[:, :, None]
        else:
            pixels[top : top + rows] = np.asarray(part.convert("RGB"))
    return pixels


def jpeg_orientation(data: bytes) -> int:
    """EXIF orientation, 1 to 8; 1 where the metadata is damaged: the pixels are still good."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return int(open_pillow(data, "JPEG").getexif().get(_ORIENTATION_TAG, 1))
        except Exception:
            return 1


def _upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Undo an EXIF orientation. (H, W, 3) → (H, W, 3), or (W, H, 3) for 5 to 8; unknown values are 1."""
    if 5 <= orientation <= 8:
        image = image.transpose(1, 0, 2)
    flips = {2: (1, -1), 3: (-1, -1), 4: (-1, 1), 6: (1, -1), 7: (-1, -1), 8: (-1, 1)}
    rows, columns = flips.get(orientation, (1, 1))
    return np.ascontiguousarray(image[::rows, ::columns])


def _guess(data: bytes) -> str:
    if data[0] == 0x80 and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return " (a Python pickle; raypipe never unpickles stored values)"
    if data.lstrip()[:1] in (b"<", b"{"):
        return " (text: HTML, XML or JSON, such as a failed download leaves)"
    return ""
