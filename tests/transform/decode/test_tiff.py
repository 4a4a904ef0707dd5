"""TIFFs of each depth, kind of gray, color and compression that tifffile and Pillow write, as uint8 RGB."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
import pytest
import tifffile
from image_files import saved
from PIL import Image

from raypipe.errors import SampleError
from raypipe.transform.decode.array import decode_array
from raypipe.transform.decode.rgb import decode

DTYPES = {
    "u": {8: np.uint8, 16: np.uint16, 32: np.uint32},
    "i": {8: np.int8, 16: np.int16, 32: np.int32},
}
FLOATS = {16: np.float16, 32: np.float32, 64: np.float64}
DEPTHS = [("u", bits) for bits in (*range(1, 17), 32)] + [
    ("i", bits) for bits in (8, 16, 32)
]
DEPTHS += [("f", bits) for bits in FLOATS]
READ = {("u", bits) for bits in (1, 2, 4, 8, 12, 16)}


def ramp(kind: str, bits: int) -> np.ndarray:
    """(8, 64), from the least to the largest value."""
    if kind == "f":
        return np.tile(np.linspace(0, 1, 64).astype(FLOATS[bits]), (8, 1))
    low, high = (
        (0, 2**bits - 1) if kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    )
    dtype = next(dtype for size, dtype in DTYPES[kind].items() if size >= bits)
    return np.tile(np.linspace(low, high, 64).round().astype(dtype), (8, 1))


def written_with(
    kind: str, bits: int, color: str, compression: str | None
) -> bytes | None:
    """None: tifffile cannot write it."""
    image = ramp(kind, bits)
    options: dict[str, Any] = {"photometric": color, "compression": compression}
    if color == "rgb":
        image = np.repeat(image[..., None], 3, 2)
    if (kind, bits) == ("u", 1):
        image = image.astype(bool)
    elif kind == "u" and bits not in DTYPES["u"]:
        options["bitspersample"] = bits
    out = io.BytesIO()
    try:
        tifffile.imwrite(out, image, **options)
    except (ValueError, NotImplementedError):
        return None
    return out.getvalue()


@pytest.mark.parametrize("color", ["minisblack", "miniswhite", "rgb"])
def test_a_ramp_of_each_depth_is_a_ramp_of_bytes_or_refused_by_name(color: str) -> None:
    num_read = 0
    for (kind, bits), compression in itertools.product(
        DEPTHS, (None, "deflate", "lzw", "packbits")
    ):
        data = written_with(kind, bits, color, compression)
        if data is None:
            continue
        try:
            image = decode(data)
        except SampleError as error:
            assert "8 or 16 bits" in str(error) and "damaged" not in str(error), (
                kind,
                bits,
                str(error),
            )
            assert bits not in (8, 16) or kind != "u", (bits, str(error))
            continue
        assert (kind, bits) in READ
        num_read += 1
        expected = ramp("u", bits).astype(np.float64) * 255 / (2**bits - 1)
        if color == "miniswhite":
            expected = 255 - expected
        assert np.abs(image.astype(np.float64) - expected[..., None]).max() <= 1, (
            bits,
            compression,
        )
    assert num_read >= (8 if color == "rgb" else 10)


def test_an_array_keeps_the_values_that_are_stored() -> None:
    for kind, bits in DEPTHS:
        data = written_with(kind, bits, "minisblack", None)
        assert data is not None
        if bits >= 8:
            array = decode_array(data)
            assert np.array_equal(array[..., 0], ramp(kind, bits)), (kind, bits)


@pytest.mark.parametrize(
    "mode",
    [
        "1",
        "L",
        "LA",
        "P",
        "PA",
        "RGB",
        "RGBA",
        "RGBX",
        "CMYK",
        "YCbCr",
    ],
)
def test_what_pillow_writes_is_what_pillow_reads(mode: str) -> None:
    image = Image.fromarray(ramp("u", 8))
    if mode == "PA":
        image = image.convert("RGB").convert("P")
    data = saved(image, "TIFF", mode)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decode(data), expected)


@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
def test_16_bits_of_gray_keep_their_high_byte(dtype: str) -> None:
    deep = ramp("u", 16)
    image = decode(saved(deep.astype(dtype), "TIFF"))
    assert np.array_equal(image, np.repeat(deep[..., None] >> 8, 3, 2))
