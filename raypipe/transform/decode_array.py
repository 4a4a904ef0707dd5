"""Stored bytes → an array as it was stored, (H, W, C) of any dtype and number of channels, without 8 bits between.

    starts with      array                                                        read by
    .npy             (H, W) or (H, W, C) of integers or floats of 8 to 64 bits    numpy; never a pickle
    PNG              uint8 or uint16: grey, RGB or RGBA                           cv2, after its checksums held
    TIFF             any number of channels of 8 to 64 bits                       `raypipe.transform.tiff`; up to 4
                                                                                  in LZW and the like by cv2
    what is left     uint8 RGB                                                    `raypipe.transform.decode`

An image of two dimensions becomes (H, W, 1). Colours are in the order R, G, B, A. Of a TIFF, a palette, YCbCr and
fewer than 8 bits become uint8 RGB as well; of a PNG, grey with alpha becomes RGBA, as cv2 has it. What is above a
limit of `image_header` is refused by its header.
"""

from __future__ import annotations

import contextlib
import io
import math
import zlib
from typing import Any

import cv2
import numpy as np

from raypipe.errors import SampleError
from raypipe.transform.decode import NPY, decode, image_size, stored_bytes
from raypipe.transform.image_header import check_size, damage_in, image_kind
from raypipe.transform.tiff import read_tiff, tiff_layout

_MAX_HEADER_BYTES = 10_000  # numpy's own default
_PNG_BYTES = 12  # per pixel of 8 bits: RGBA, three times


def decode_array(data: bytes | bytearray | memoryview | None) -> np.ndarray:
    """Decode one stored array or image.

    Returns:
        (H, W, C), C-contiguous, writable, owned by the caller, in native byte order.

    Raises:
        SampleError: whatever the bytes are, this and no other.
        ConfigError: as `decode` does.
    """
    encoded = stored_bytes(data)
    kind = "npy" if encoded.startswith(NPY) else image_kind(encoded)
    if kind == "npy":
        with damage_in(".npy", encoded):
            return _npy(encoded)
    if kind == "PNG":
        return _png(encoded)
    if kind == "TIFF":
        with damage_in(kind, encoded):
            return _tiff(encoded)
    return decode(encoded)


def decode_any(data: bytes | None, min_side: int | None = None) -> np.ndarray:
    """An image as `decode` gives it; what that refuses and is a .npy or a TIFF, as an array.

    Raises:
        SampleError: neither can decode it; the error is `decode`'s, or of a .npy the other's.
    """
    try:
        return decode(data, min_side=min_side)
    except SampleError:
        if data and data.startswith(NPY):
            return decode_array(data)
        if data and image_kind(data) == "TIFF":
            with contextlib.suppress(SampleError):
                return decode_array(data)
        raise


def header_size(data: bytes | None, exif: bool = False) -> tuple[int, int]:
    """(height, width) that `decode`, or else `decode_array`, gives, by the header; raises SampleError."""
    try:
        return image_size(data, exif=exif)
    except SampleError:
        return array_size(data)


def array_size(data: bytes | None) -> tuple[int, int]:
    """(height, width) of a .npy or a TIFF, by its header; raises SampleError for all else."""
    encoded = stored_bytes(data)
    if encoded.startswith(NPY):
        with damage_in(".npy", encoded):
            return _npy_header(encoded)[0][:2]
    if image_kind(encoded) != "TIFF":
        raise SampleError("neither .npy nor TIFF")
    with damage_in("TIFF", encoded):
        layout = tiff_layout(encoded)
        size = layout.height, layout.width
        return size if layout.orientation < 5 else size[::-1]


def _npy_header(data: bytes) -> tuple[tuple[int, int, int], bool, np.dtype[Any], int]:
    """Shape, whether its first axis varies fastest, dtype, and where the values begin."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise SampleError(f"a .npy of version {version}, which is of arrays with named fields")
    shape, fortran, dtype = readers[version](file, max_header_size=_MAX_HEADER_BYTES)
    if dtype.hasobject or dtype.kind not in "uif" or dtype.itemsize > 8:
        what = "objects, which only a pickle holds" if dtype.hasobject else str(dtype)
        raise SampleError(f"a .npy of {what}: store integers or floats of 8 to 64 bits")
    if len(shape) not in (2, 3) or not all(shape):
        raise SampleError(f"a .npy of shape {shape}: expected is (H, W) or (H, W, C)")
    height, width, channels = (*shape, 1)[:3]
    check_size(width, height, math.prod(shape) * dtype.itemsize)
    return (height, width, channels), fortran, dtype, file.tell()


def _npy(data: bytes) -> np.ndarray:
    shape, fortran, dtype, begin = _npy_header(data)
    num = math.prod(shape)
    if len(data) - begin != num * dtype.itemsize:
        damage = "truncated" if len(data) - begin < num * dtype.itemsize else "damaged"
        raise SampleError(
            f"{damage} .npy: {len(data) - begin} bytes behind its header, not {num * dtype.itemsize}"
        )
    values = np.frombuffer(data, dtype, num, begin).reshape(shape, order="F" if fortran else "C")
    return np.array(values, dtype.newbyteorder("="), order="C")


def _png(data: bytes) -> np.ndarray:
    at, ended, crc = 8, False, zlib.crc32
    while not ended:
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 8 + length
        if end + 4 > len(data):
            raise SampleError(f"truncated PNG ({len(data)} bytes)")
        if crc(memoryview(data)[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise SampleError(f"damaged PNG: a checksum of {kind!r} does not hold")
        if at == 8:
            if kind != b"IHDR" or length != 13:
                raise SampleError("damaged PNG: it does not begin with its header")
            width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
            check_size(width, height, width * height * _PNG_BYTES * (2 if data[24] == 16 else 1))
        at, ended = end + 4, kind == b"IEND"
    return _by_cv2(data, "PNG", (height, width))


def _tiff(data: bytes) -> np.ndarray:
    layout = tiff_layout(data)
    if layout.is_coded or layout.dtype is None:
        return decode(data)
    if layout.is_plain:
        return read_tiff(data, layout)
    if layout.channels > 4 or layout.orientation != 1 or layout.separate:
        raise SampleError(
            f"a TIFF of {layout.channels} channels compressed by method {layout.compression}: store it "
            "uncompressed or deflated, upright"
        )
    image = _by_cv2(data, "TIFF", (layout.height, layout.width))
    if image.shape[2] != layout.channels or image.dtype != layout.dtype.newbyteorder("="):
        raise SampleError(
            f"a TIFF of {layout.channels} channels {layout.dtype}, compressed by method {layout.compression}, "
            f"which cv2 reads as {image.shape[2]} of {image.dtype}: store it uncompressed or deflated"
        )
    return image


def _by_cv2(data: bytes, kind: str, size: tuple[int, int]) -> np.ndarray:
    level = cv2.utils.logging.getLogLevel()
    try:
        # A line for each image would come of tags that change no pixel, such as those that cv2 itself writes.
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_ERROR)
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise SampleError(f"damaged {kind}: {' '.join(str(error).split())}") from error
    finally:
        cv2.utils.logging.setLogLevel(level)
    if image is None or image.shape[:2] != size:
        raise SampleError(f"damaged {kind} ({len(data)} bytes)")
    image = image.reshape(*size, -1)
    if image.shape[2] < 3:
        return image
    return np.ascontiguousarray(image[..., [2, 1, 0, 3][: image.shape[2]]])  # OpenCV has blue first


def as_rgb(array: np.ndarray) -> np.ndarray:
    """An array (H, W, C) to look at, uint8 (H, W, 3): its first three channels, or one; others than uint8 are
    scaled from their least to their largest value."""
    shown = array[..., :3] if array.shape[2] >= 3 else array[..., [0, 0, 0]]
    if shown.dtype == np.uint8:
        return np.ascontiguousarray(shown)
    with np.errstate(over="ignore"):  # numbers of a damaged file may be of any size
        values = np.nan_to_num(shown.astype(np.float64), posinf=0, neginf=0)
        span = values.max() - values.min()
        if not 0 < span < np.inf:
            return np.zeros(values.shape, np.uint8)
        return np.rint((values - values.min()) / span * 255).astype(np.uint8)
