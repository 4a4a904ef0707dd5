"""What an image file holds, read without raypipe: by Pillow, and as an array by imagecodecs.

rgb        convert("RGB"), as raypipe.transform.decode.rgb has it: alpha is dropped, 16 bits keep their high byte
upright    the same after exif_transpose
array      as raypipe.transform.decode.array has it: the stored depth and channels of PNG and TIFF
halves     a JPEG at 1/2, 1/4 and 1/8, by libjpeg's own reduction
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, ImageOps, features

features.check("avif")
MAX_LEVELS = 2
"""By how much two of libjpeg's roads from CMYK, YCCK or gray to RGB may differ; all else is equal to the bit."""

_TIFF_JPEG = (6, 7)  # compressions
_WHITE_IS_0 = 0
_NO_CHANNELS = (3, 6)  # palettes and YCbCr
_CMYK = 5  # a photometry
_SEPARATE = 2
_PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_GRAY = 0  # a color type of PNG
_GRAY_ALPHA = 2  # channels


@dataclass
class Reading:
    """Pixels of a file; None where its reference refuses it.

    Attributes:
        rgb, upright: uint8 (H, W, 3).
        array: (H, W, C).
        levels: what pixels of raypipe may differ by.
        why: the reference's complaint, by the name of the field that is None.
    """

    rgb: np.ndarray | None = None
    upright: np.ndarray | None = None
    array: np.ndarray | None = None
    levels: int = 0
    kind: str = ""
    why: dict[str, str] = field(default_factory=dict)


def read(data: bytes) -> Reading:
    """Read a file in all ways."""
    reading = Reading()
    for name, make in (("rgb", _rgb), ("upright", _upright), ("array", _array)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                setattr(reading, name, make(data))
        except Exception as error:  # a dozen types, of four libraries
            reading.why[name] = f"{type(error).__name__}: {error}"[:200]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = opened(data)
            reading.kind = f"{image.format} {image.mode}"
            if image.format in ("JPEG", "MPO") and image.mode != "RGB":
                reading.levels = MAX_LEVELS
        except Exception:
            reading.kind = "none"
    return reading


def opened(data: bytes) -> Any:
    """Pillow's image, whatever its size."""
    if data[4:8] == b"ftyp":
        import pillow_heif

        pillow_heif.register_heif_opener()
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        return Image.open(io.BytesIO(data))
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def reduced(data: bytes, part: int) -> np.ndarray:
    """A JPEG at 1/part of its size, 2, 4 or 8, as libjpeg reduces it."""
    image = opened(data)
    width, height = image.size
    image.draft(None, (width // part, height // part))
    assert image.size == (-(-width // part), -(-height // part))
    return np.array(image.convert("RGB"))


def without_metadata(data: bytes) -> bytes:
    """A PNG of the chunks that pixels are made of: others spoil none, though Pillow refuses some."""
    kept, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] in _PIXEL_CHUNKS:
            kept += data[at:end]
        at = end
    return bytes(kept)


def _rgb(data: bytes) -> np.ndarray:
    image = _loaded(data)
    return in_rgb(image, getattr(image, "tag_v2", {}))


def _loaded(data: bytes) -> Any:
    try:
        image = opened(data)
        image.load()
    except Exception:
        if not data.startswith(b"\x89PNG"):
            raise
        image = opened(without_metadata(data))
        image.load()
    return image


def _upright(data: bytes) -> np.ndarray:
    image = _loaded(data)
    try:
        turned = ImageOps.exif_transpose(image)
    except SyntaxError:  # no EXIF
        turned = image
    return in_rgb(turned, getattr(image, "tag_v2", {}))


def in_rgb(image: Any, tags: Mapping[int, Any]) -> np.ndarray:
    """Pixels of an image of Pillow's as the guide has them, with the tags that it had as a TIFF."""
    image.load()
    if image.mode in ("I", "F"):
        raise ValueError(f"{image.mode} has no known range")
    if image.mode.startswith("I;16"):
        depth = tags.get(258, (16,))[0]
        pixels = np.asarray(image)
        if tags.get(262) == _WHITE_IS_0:
            pixels = (1 << depth) - 1 - pixels
        return np.repeat((pixels >> (depth - 8)).astype(np.uint8)[:, :, None], 3, 2)
    return np.array(image.convert("RGB"))


def _array(data: bytes) -> np.ndarray:
    readers: dict[bytes, Callable[[bytes], np.ndarray]] = {
        b"\x89PNG": _png,
        b"II*\0": _tiff,
        b"MM\0*": _tiff,
        b"II+\0": _tiff,
        b"MM\0+": _tiff,
        b"\x93NUM": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
    }
    array = readers.get(data[:4], _rgb)(data)
    return array if array.ndim == 3 else array[:, :, None]


def _png(data: bytes) -> np.ndarray:
    import imagecodecs

    array = imagecodecs.png_decode(data)
    if data[25] == _GRAY:
        # its one transparent value is not kept
        return array[:, :, 0] if array.ndim == 3 else array
    if array.ndim == 3 and array.shape[2] == _GRAY_ALPHA:  # OpenCV has no two channels
        array = array[:, :, [0, 0, 0, 1]]
    return array


def _tiff(data: bytes) -> np.ndarray:
    """The stored values, by libtiff, where each is a channel; as RGB where it is not."""
    import imagecodecs
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    tags = ImageFileDirectory_v2(data[:8] if data[2:4] != b"+\0" else data[:16])
    file = io.BytesIO(data)
    file.seek(tags.next)
    tags.load(file)
    depths, num_channels = tags.get(258, (1,)), tags.get(277, 1)
    is_jpeg = tags.get(259, 1) in _TIFF_JPEG and num_channels in (1, 3)
    if min(depths) < 8 or tags.get(262, 0) in _NO_CHANNELS or is_jpeg:
        return _rgb(data)
    if tags.get(262, 0) == _CMYK and max(depths) == 8:  # libtiff makes RGB of it
        image = opened(data)
        return np.array(image)
    array = imagecodecs.tiff_decode(data)
    if tags.get(284, 1) == _SEPARATE and array.ndim == 3:
        array = np.moveaxis(array, 0, 2)
    array = array if array.ndim == 3 else array[:, :, None]
    return _turned(array, tags.get(274, 1))


def _turned(array: np.ndarray, orientation: int) -> np.ndarray:
    """An array upright, channel by channel, by Pillow."""
    # as exif_transpose has them
    method = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}.get(orientation)
    if method is None:
        return array
    places = np.arange(array.shape[0] * array.shape[1], dtype=np.int32).reshape(
        array.shape[:2]
    )
    turned = np.asarray(Image.fromarray(places).transpose(Image.Transpose(method)))
    return array.reshape(-1, array.shape[2])[turned]
