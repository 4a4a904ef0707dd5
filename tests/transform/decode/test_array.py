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


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
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
            npy(np.array([[{}]], object), allow_pickle=True),
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


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint64", "float32"])
def test_a_tiff_comes_back_value_by_value(
    dtype: str, channels: int, compression: int, order: str
) -> None:
    array = some(dtype, 10, 9, channels)
    predictors = [1]
    if compression not in (1, 32773):
        predictors += [2, 3] if np.dtype(dtype).kind == "f" else [2]
    for predictor, is_big, fill_order in itertools.product(
        predictors, (False, True), (1, 2)
    ):
        options: Any = {
            "order": order,
            "compression": compression,
            "predictor": predictor,
        }
        options |= {"is_big": is_big, "fill_order": fill_order}
        check(tiff(array, **options), array)  # the last strip has two rows
        check(tiff(array, block=(10, 0), **options), array)
        check(tiff(array, block=(16, 16), tiled=True, **options), array)
        check(tiff(array, block=(4, 3), tiled=True, separate=True, **options), array)
        check(tiff(array, separate=True, **options), array)


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


@pytest.mark.parametrize("mix", MIXES)
def test_no_photometry_changes_a_value(mix: str) -> None:
    channels, options = MIXES[mix]
    for dtype in ("uint8", "uint16", "float32"):
        array = some(dtype, 21, 17, channels)
        file = io.BytesIO()
        planar = "contig" if channels > 1 else None
        tifffile.imwrite(file, array, planarconfig=planar, **options)
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
        file = io.BytesIO()
        made.save(file, "TIFF", **options)
        with Image.open(io.BytesIO(file.getvalue())) as opened:
            rgb = np.asarray(opened.convert("RGB"))
        np.testing.assert_array_equal(decode(file.getvalue()), rgb)
        check(file.getvalue(), rgb)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_png_comes_back_with_red_first(dtype: str, channels: int) -> None:
    array = (RNG.random((21, 17, channels)) * np.iinfo(dtype).max).astype(dtype)
    _, png = cv2.imencode(
        ".png", array[..., [2, 1, 0, 3][:channels]] if channels > 1 else array
    )
    check(png.tobytes(), array)
    data = png.tobytes()
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
    with Image.open(io.BytesIO(tiff(some("uint8", 6, 5, 3), tags={262: 2}))) as opened:
        # needs it not
        np.testing.assert_array_equal(
            decode(tiff(np.asarray(opened), tags={262: 2})), opened
        )


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
