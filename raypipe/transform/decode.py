"""Encoded image bytes → pixels: uint8 RGB, height × width × 3.

    starts with            decoder                                         equal to Pillow's `convert("RGB")`
    JPEG                   libjpeg-turbo, by our extension or simplejpeg   within rounding, CMYK and grey included
    PNG, plain 8-bit       cv2, after its checksums held                   exactly
    WebP, plain lossy      cv2                                             exactly
    other PNG and WebP,
    BMP, GIF, TIFF         Pillow                                          exactly, but for 16-bit greyscale

Alpha is dropped, not composited, as `convert("RGB")` does: the colour under a transparent pixel is what
the file holds there. 16-bit channels keep their high byte. An animation gives its first frame. Pixels come
as stored, without the EXIF orientation, as torchvision and everybody's ImageNet numbers have them;
`exif=True` turns them upright. (TIFF comes upright in any case: Pillow applies its orientation on loading.)

Nothing here runs code that is in the bytes. What is above a limit of `image_header` is refused by its
header, before anything of its size is allocated.

The optional extension (csrc/jpeg_extension.c) gives simplejpeg's pixels, to the bit, in less time: of any box, at
any scale. It is used only after it has agreed with simplejpeg on a few images in the same process, and refuses
what is unusual or damaged; simplejpeg then has the last word.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import cv2
import numpy as np
import simplejpeg

from raypipe.errors import SampleError
from raypipe.transform.image_header import image_kind, jpeg_size, open_pillow, plain_size

Box = tuple[int, int, int, int]
"""(top, left, height, width), pixels of an image, inside it."""

WHOLE = 8
"""Eighths: full scale."""
SCALES = (1, 2, 4)
"""Eighths: 1/8, 1/4 and 1/2, whose inverse DCTs libjpeg-turbo has SIMD code for."""

_CV2_FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_ORIENTATION_TAG = 0x0112  # of EXIF
_BAND_PIXELS = 1 << 20  # that are converted at a time
_INTERFACE_VERSION = 1  # of the extension that this module can call
_EXTRA_COLUMNS = 39  # it decodes 4 more on each side, and begins at a block's edge, up to 31 before


def decode(
    data: bytes | bytearray | memoryview | None, *, min_side: int | None = None, exif: bool = False
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
        SampleError: whatever the bytes are, this and no other; the message says what is wrong with them.
            A JPEG is refused for anything that libjpeg warns of, since what follows the damage is garbage.
    """
    encoded, kind = _known(data)
    if kind == "JPEG":
        return _decode_jpeg(encoded, min_side, exif)
    if plain_size(encoded, kind) is not None:
        with contextlib.suppress(Exception):  # Pillow has the last word
            image = cv2.imdecode(np.frombuffer(encoded, np.uint8), _CV2_FLAGS)
            if image is not None:
                return image
    return _decode_pillow(encoded, kind, exif)


def image_size(data: bytes | bytearray | memoryview | None, *, exif: bool = False) -> tuple[int, int]:
    """(height, width) that `decode` would give, from the header.

    The few JPEGs that do not end with their end marker are decoded once, since that alone tells those cut short,
    for which a substitute can be read at this place only, from those with something behind the end.

    Raises:
        SampleError: as `decode`, for no image, a header that cannot be read, a JPEG that is cut short, or what is
            over a limit of `image_header`. Damage further in is not looked for.
    """
    encoded, kind = _known(data)
    if kind == "JPEG":
        size = jpeg_size(encoded) if encoded.endswith(b"\xff\xd9") else None
        if size is not None:
            on_its_side = exif and b"Exif\0\0" in encoded and jpeg_orientation(encoded) >= 5
            return (size[1], size[0]) if on_its_side else size
    elif not (exif and kind in ("PNG", "WebP")):  # whose orientation may stand behind the pixels
        size = plain_size(encoded, kind)
        if size is not None:
            return size
        with damage_in(kind, encoded):
            image = open_pillow(encoded, kind)
            return image.height, image.width
    height, width, _ = decode(encoded, exif=exif).shape
    return height, width


def _known(data: bytes | bytearray | memoryview | None) -> tuple[bytes, str]:
    """The bytes of an image, and its kind; raises SampleError for what is none."""
    if data is None:
        raise SampleError("no value")
    if not isinstance(data, bytes | bytearray | memoryview):
        raise SampleError(f"the value is a {type(data).__name__}, not bytes")
    if not data:
        raise SampleError("empty value (0 bytes)")
    encoded = bytes(data)
    kind = image_kind(encoded)
    if kind is None:
        raise SampleError(f"not an image: starts with {encoded[:3].hex(' ')}{_guess(encoded)}")
    return encoded, kind


def _guess(data: bytes) -> str:
    if data[0] == 0x80 and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return " (a Python pickle; raypipe never unpickles stored values)"
    if data.lstrip()[:1] in (b"<", b"{"):
        return " (text: HTML, XML or JSON, such as a failed download leaves)"
    return ""


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


# JPEG


def _decode_jpeg(data: bytes, min_side: int | None, exif: bool) -> np.ndarray:
    size = jpeg_size(data)
    if size is None:
        return _decode_pillow(data, "JPEG", exif)
    short_side = min_side if min_side and min(size) >= 2 * min_side else 0
    image = None if short_side else decode_part(data, (0, 0, *size), extra_columns=0)
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
        return _by_simplejpeg(data, short_side, 2.0 if short_side else 1.0)
    except Exception as error:
        damage = "truncated" if "Premature end of JPEG file" in str(error) else "damaged"
        raise SampleError(f"{damage} JPEG: {error} ({len(data)} bytes)") from error


def _by_simplejpeg(data: bytes, side: int, min_factor: float) -> np.ndarray:
    return simplejpeg.decode_jpeg(data, "RGB", min_height=side, min_width=side, min_factor=min_factor)


def decode_part(
    data: bytes, box: Box, eighths: int = WHOLE, extra_columns: int = _EXTRA_COLUMNS
) -> np.ndarray | None:
    """Decode a box of a JPEG with the extension.

    Args:
        data: a JPEG whose header can be read.
        box: of the image at its scale.
        eighths: the scale, in the DCT.
        extra_columns: room for what it decodes beside the box; for a whole image 0: C-contiguous.

    Returns:
        uint8 RGB of shape (h, w, 3), writable, maybe a view; None: there is no extension, or it refuses the bytes.
    """
    compiled = extension()
    if compiled is None:
        return None
    try:
        return _by_extension(compiled, data, box, eighths, extra_columns)
    except Exception:  # whatever it does not like, simplejpeg has the last word on
        return None


def _by_extension(
    compiled: Callable[..., int], data: bytes, box: Box, eighths: int, extra_columns: int = _EXTRA_COLUMNS
) -> np.ndarray:
    top, left, height, width = box
    pixels = np.empty((height, width + extra_columns, 3), np.uint8)
    # True: it reads behind the box as well, so that damage there is found.
    first = compiled(data, left, top, width, height, eighths, True, pixels, width + extra_columns)
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


def _agrees(compiled: Callable[..., int], sampling: str) -> bool:
    """Whether it gives simplejpeg's pixels, at all scales, on noise, which uses all coefficients."""
    noise = np.random.default_rng(0).integers(0, 256, (69, 85, 3), np.uint8)
    data = simplejpeg.encode_jpeg(noise, 95, "RGB", sampling)
    for eighths in (*SCALES, WHOLE):
        whole = _by_simplejpeg(data, -(-69 * eighths // 8), 2.0 if eighths < WHOLE else 1.0)
        rows, columns = whole.shape[:2]
        top, left, height, width = rows // 3, columns // 2, rows // 2, columns // 3
        part = _by_extension(compiled, data, (top, left, height, width), eighths)
        if not np.array_equal(part, whole[top : top + height, left : left + width]):
            return False
    return True


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


# Pillow


def _decode_pillow(data: bytes, kind: str, exif: bool) -> np.ndarray:
    from PIL import ImageOps  # 0.1 s, and most stores are JPEG alone

    with damage_in(kind, data):
        image = open_pillow(data, kind)
        image.load()
        if image.mode in ("I", "F"):
            raise SampleError(f"{kind} of 32-bit pixels, whose range is unknown: store 8 or 16 bits")
        return _rgb(ImageOps.exif_transpose(image) if exif else image)


@contextlib.contextmanager
def damage_in(kind: str, data: bytes) -> Iterator[None]:
    """Makes a SampleError of what Pillow raises within, and silences what it warns of: metadata, large images."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except SampleError:
            raise
        except Exception as error:  # its plugins raise a dozen types on bad bytes
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
