"""Arrays as they are stored: every value, dtype and channel comes back, and nothing of a bomb's size is taken."""

from __future__ import annotations

import io
import itertools
import sys
import tracemalloc
import zlib
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
from image_files import saved
from pictures import picture
from PIL import Image
from write_tiff import PACKED, tiff

from raypipe.errors import ConfigError, SampleError
from raypipe.transform.decode.array import as_rgb, decode_any, decode_array, header_size
from raypipe.transform.decode.rgb import decode

RNG = np.random.default_rng(0)
DTYPES = ["uint8", "uint16", "int16", "uint32", "float16", "float32", "float64"]


def some(dtype: str, *shape: int) -> np.ndarray:
    return (RNG.random(shape) * 250).astype(dtype)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def check(data: bytes, array: np.ndarray) -> None:
    found = decode_array(data)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype.newbyteorder("=") and found.dtype.isnative
    assert found.flags.c_contiguous and found.flags.writeable and found.flags.aligned


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_npy_comes_back_in_its_dtype_with_an_axis_for_its_channels(
    dtype: str,
) -> None:
    for channels in (1, 3, 4, 12):
        array = some(dtype, 5, 7, channels)
        check(npy(array), array)
        check(npy(np.asfortranarray(array)), array)
        check(npy(array.astype(array.dtype.newbyteorder(">"))), array)
    flat = some(dtype, 5, 7)
    check(npy(flat), flat[..., None])
    assert header_size(npy(flat)) == (5, 7)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (npy(some("uint16", 5, 7))[:-1], "truncated .npy"),
        (npy(some("uint16", 5, 7)) + b"1", "damaged .npy"),
        (npy(some("uint16", 5, 7))[:20], "damaged .npy|truncated .npy"),
        (
            npy(np.array([[{}]], object)),
            "objects, which need a pickle",
        ),
        (npy(np.zeros((2, 2), complex)), "complex128"),
        (npy(np.zeros((2, 2), "U3")), "U3"),
        (npy(np.zeros(3)), r"shape \(3,\)"),
        (npy(np.zeros((2, 0, 3))), r"shape \(2, 0, 3\)"),
        (npy(np.zeros((2, 2), [("a", "u1")])), "a"),
    ],
)
def test_an_npy_that_is_no_array_of_numbers_is_a_bad_sample(
    data: bytes, reason: str
) -> None:
    with pytest.raises(SampleError, match=reason):
        decode_array(data)


MIXES = {
    "white is zero": (1, {"photometric": "miniswhite"}),
    "gray and alpha": (
        2,
        {"photometric": "minisblack", "extrasamples": ["unassalpha"]},
    ),
    "rgb": (3, {"photometric": "rgb"}),
    "rgb and associated alpha": (
        4,
        {"photometric": "rgb", "extrasamples": ["assocalpha"]},
    ),
    "rgb and alpha": (4, {"photometric": "rgb", "extrasamples": ["unassalpha"]}),
    "rgb and more": (
        5,
        {"photometric": "rgb", "extrasamples": ["unassalpha", "unspecified"]},
    ),
    "cmyk": (4, {"photometric": "separated"}),
    "cmyk and alpha": (5, {"photometric": "separated", "extrasamples": ["unassalpha"]}),
    "lab": (3, {"photometric": "cielab"}),
}


@pytest.mark.parametrize("options", [{}, {"compression": "lzw", "predictor": True}])
@pytest.mark.parametrize("mix", MIXES)
def test_a_tiff_comes_back_value_by_value(mix: str, options: dict[str, Any]) -> None:
    channels, photometry = MIXES[mix]
    planes = ("contig", "separate") if channels > 1 else (None,)
    for dtype, order, tile, planar in itertools.product(
        ("uint8", "uint16", "float32"), "<>", (None, (16, 16)), planes
    ):
        array = some(dtype, 21, 17, channels)
        file = io.BytesIO()
        tifffile.imwrite(
            file,
            np.moveaxis(array, 2, 0) if planar == "separate" else array,
            planarconfig=planar,
            byteorder=order,
            tile=tile,
            rowsperstrip=None if tile else 5,  # the last strip has one row
            bigtiff=order == "<",
            **options,
            **photometry,
        )
        check(file.getvalue(), array)


def test_a_tiff_is_turned_upright_as_it_is_for_rgb() -> None:
    array = some("uint16", 4, 6, 4)
    check(data := tiff(array, tags={274: 6}), np.rot90(array, -1))
    assert header_size(data) == (6, 4) and header_size(tiff(array)) == (4, 6)


def test_jpeg_palettes_and_bits_in_a_tiff_are_the_rgb_that_pillow_makes() -> None:
    image = Image.fromarray(decode(picture(3)))
    for made, options in [
        (image, {"compression": "jpeg"}),
        (image.convert("L"), {"compression": "jpeg"}),
        (image.convert("YCbCr"), {"compression": "tiff_lzw"}),
        (image.quantize(40), {"compression": "tiff_lzw"}),
        (image.quantize(40), {}),
        (image.convert("1"), {"compression": "group4"}),
    ]:
        data = saved(made, "TIFF", **options)
        rgb = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        np.testing.assert_array_equal(decode(data), rgb)
        check(data, rgb)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_png_comes_back_with_red_first(dtype: str, channels: int) -> None:
    array = (RNG.random((21, 17, channels)) * np.iinfo(dtype).max).astype(dtype)
    bgr = array[..., [2, 1, 0, 3][:channels]] if channels > 1 else array
    data = cv2.imencode(".png", bgr)[1].tobytes()
    check(data, array)
    for end in (20, len(data) // 2, len(data) - 1):
        with pytest.raises(SampleError, match="PNG"):
            decode_array(data[:end])
    broken = bytearray(data)
    broken[60] ^= 255
    with pytest.raises(SampleError, match="checksum"):
        decode_array(bytes(broken))


def test_what_has_no_more_than_8_bits_is_rgb() -> None:
    np.testing.assert_array_equal(decode_array(picture(3)), decode(picture(3)))


@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"GIF",
        b"\x93NUMPY",
        b"II*\0",
        b"MM\0*" + bytes(99),
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_what_is_no_image_is_a_bad_sample(data: bytes | None) -> None:
    with pytest.raises(SampleError):
        decode_array(data)


@pytest.mark.parametrize("name", ["tifffile", "imagecodecs"])
def test_without_the_extra_an_error_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    data = tiff(some("uint16", 6, 5, 4))
    for read in (decode_array, decode_any):
        with pytest.raises(
            ConfigError, match=r"pip install '.*\[arrays\]', on every node"
        ):
            read(data)
    rgb = some("uint8", 6, 5, 3)
    # needs it not
    np.testing.assert_array_equal(decode(tiff(rgb, tags={262: 2})), rgb)


def test_a_png_without_opencv_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raypipe.transform.decode.array.cv2", None)
    data = cv2.imencode(".png", some("uint16", 4, 4, 3))[1].tobytes()
    with pytest.raises(ConfigError, match=r"\[opencv\]', on every node"):
        decode_array(data)


def test_a_block_that_inflates_beyond_its_size_is_refused_there() -> None:
    array = some("uint8", 4, 4, 1)
    check(tiff(array, compression=8), array)  # what reads it is loaded
    PACKED[0] = lambda data: zlib.compress(data + bytes(50 << 20), 9)
    try:
        bomb = tiff(array, compression=0, tags={259: 8})
    finally:
        del PACKED[0]
    tracemalloc.start()
    with pytest.raises(SampleError, match="damaged TIFF"):
        decode_array(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_three_channels_are_shown_from_the_least_value_to_the_largest() -> None:
    shown = as_rgb(np.array([[[100, 180, 300, 9]]], np.uint16))
    assert shown.dtype == np.uint8 and shown.tolist() == [[[0, 102, 255]]]
    assert as_rgb(np.full((2, 3, 2), 7.5, np.float32)).shape == (2, 3, 3)
    endless = np.array(
        [[[np.nan, np.inf, -np.inf], [1, 2, 3]], [[1e308, -1e308, 0], [1, 2, 3]]]
    )
    assert not as_rgb(endless).any() and as_rgb(endless[:1]).max() == 255
    np.testing.assert_array_equal(as_rgb(decode(picture(3))), decode(picture(3)))


def test_to_be_looked_at_an_array_needs_no_setting() -> None:
    array = some("float32", 3, 4, 5)
    np.testing.assert_array_equal(decode_any(npy(array)), array)
    np.testing.assert_array_equal(decode_any(tiff(array)), array)
    np.testing.assert_array_equal(decode_any(picture(3)), decode(picture(3)))
    with pytest.raises(SampleError, match=r"truncated \.npy"):
        decode_any(npy(array)[:-1])
    with pytest.raises(
        SampleError, match=r"an array of numpy's: set transform\.decode='array'"
    ):
        decode(npy(array))
