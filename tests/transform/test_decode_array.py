"""Arrays as they are stored: every value, dtype and channel comes back, and nothing of a bomb's size is taken."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import picture

from raypipe.errors import SampleError
from raypipe.transform.decode import decode
from raypipe.transform.decode_array import array_size, as_rgb, decode_any, decode_array

RNG = np.random.default_rng(0)
DTYPES = ["uint8", "uint16", "int16", "uint32", "float16", "float32", "float64"]


def some(dtype: str, *shape: int) -> np.ndarray:
    return (RNG.random(shape) * 250).astype(dtype)


def npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


def tiff(
    array: np.ndarray,
    *,
    order: str = "<",
    block: tuple[int, int] = (4, 0),
    tiled: bool = False,
    deflated: bool = False,
    separate: bool = False,
    predictor: int = 1,
    tags: dict[int, int] | None = None,
) -> bytes:
    """A TIFF (H, W, C), written by its specification: strips of 4 rows, or tiles."""
    height, width, channels = array.shape
    rows, columns = block[0], block[1] or width
    stored = []
    for part in np.split(array, channels, axis=2) if separate else [array]:
        for top in range(0, height, rows):
            for left in range(0, width, columns):
                values = part[top : top + rows, left : left + columns]
                if tiled:
                    ends = [(0, full - side) for full, side in zip((rows, columns), values.shape, strict=False)]
                    values = np.pad(values, (*ends, (0, 0)))
                if predictor == 2:
                    values = np.diff(values, axis=1, prepend=np.zeros_like(values[:, :1]))
                data = np.ascontiguousarray(values, array.dtype.newbyteorder(order)).tobytes()
                if predictor == 3:
                    h, w, c = values.shape
                    planes = np.ascontiguousarray(values, array.dtype.newbyteorder(">")).view(np.uint8)
                    planes = planes.reshape(h, w * c, -1).transpose(0, 2, 1).reshape(h, -1, c)
                    data = np.diff(planes, axis=1, prepend=np.zeros_like(planes[:, :1])).tobytes()
                stored.append(zlib.compress(data) if deflated else data)
    kind = {"u": 1, "i": 2, "f": 3}[array.dtype.kind]
    entries: dict[int, list[int]] = {
        256: [width],
        257: [height],
        258: [array.itemsize * 8] * channels,
        259: [8 if deflated else 1],
        262: [1],
        277: [channels],
        284: [2 if separate else 1],
        317: [predictor],
        339: [kind] * channels,
    }
    places, at = [], 8
    for data in stored:
        places.append(at)
        at += len(data)
    counts = list(map(len, stored))
    entries |= {322: [columns], 323: [rows], 324: places, 325: counts} if tiled else {}
    entries |= {} if tiled else {273: places, 278: [rows], 279: counts}
    entries |= {tag: [value] for tag, value in (tags or {}).items()}
    more, directory = b"", b""
    start = at + 2 + 12 * len(entries) + 4
    for tag, values in sorted(entries.items()):
        packed = struct.pack(f"{order}{len(values)}I", *values)
        place = packed
        if len(packed) > 4:
            place = struct.pack(f"{order}I", start + len(more))
            more += packed
        directory += struct.pack(f"{order}HHI", tag, 4, len(values)) + place
    head = b"II*\0" if order == "<" else b"MM\0*"
    return (
        head
        + struct.pack(f"{order}I", at)
        + b"".join(stored)
        + struct.pack(f"{order}H", len(entries))
        + directory
        + bytes(4)
        + more
    )


def check(data: bytes, array: np.ndarray) -> None:
    found = decode_array(data)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype.newbyteorder("=") and found.dtype.isnative
    assert found.flags.c_contiguous and found.flags.writeable and found.flags.aligned


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_npy_comes_back_in_its_dtype_with_an_axis_for_its_channels(dtype: str) -> None:
    for channels in (1, 3, 4, 12):
        array = some(dtype, 5, 7, channels)
        check(npy(array), array)
        check(npy(np.asfortranarray(array)), array)
        check(npy(array.astype(array.dtype.newbyteorder(">"))), array)
    flat = some(dtype, 5, 7)
    check(npy(flat), flat[..., None])
    assert array_size(npy(flat)) == (5, 7)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (npy(some("uint16", 5, 7))[:-1], "truncated .npy"),
        (npy(some("uint16", 5, 7)) + b"1", "damaged .npy"),
        (npy(some("uint16", 5, 7))[:20], "damaged .npy|truncated .npy"),
        (npy(np.array([[{}]], object), allow_pickle=True), "objects, which only a pickle holds"),
        (npy(np.zeros((2, 2), complex)), "complex128"),
        (npy(np.zeros((2, 2), "U3")), "U3"),
        (npy(np.zeros(3)), r"shape \(3,\)"),
        (npy(np.zeros((2, 0, 3))), r"shape \(2, 0, 3\)"),
        (npy(np.zeros((2, 2), [("a", "u1")])), "a"),
    ],
)
def test_an_npy_that_is_no_array_of_numbers_is_a_bad_sample(data: bytes, reason: str) -> None:
    with pytest.raises(SampleError, match=reason):
        decode_array(data)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("deflated", [False, True])
@pytest.mark.parametrize("channels", [1, 4, 7])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
def test_a_tiff_comes_back_value_by_value(dtype: str, channels: int, deflated: bool, order: str) -> None:
    array = some(dtype, 10, 9, channels)
    options: Any = {"order": order, "deflated": deflated}
    check(tiff(array, **options), array)  # the last strip has two rows
    check(tiff(array, block=(16, 16), tiled=True, **options), array)
    check(tiff(array, block=(4, 3), tiled=True, separate=True, **options), array)
    check(tiff(array, separate=True, **options), array)
    if np.dtype(dtype).kind in "ui":
        check(tiff(array, predictor=2, **options), array)
    elif deflated:
        check(tiff(array, predictor=3, **options), array)


def test_a_tiff_is_turned_upright_as_it_is_for_rgb() -> None:
    array = some("uint16", 4, 6, 4)
    check(data := tiff(array, tags={274: 6}), np.rot90(array, -1))
    assert array_size(data) == (6, 4) and array_size(tiff(array)) == (4, 6)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_a_tiff_that_cv2_has_compressed_comes_back_with_red_first(dtype: str, channels: int) -> None:
    array = some(dtype, 21, 17, channels)
    swapped = array[..., [2, 1, 0, 3][:channels]] if channels > 1 else array
    _, lzw = cv2.imencode(".tiff", swapped, [cv2.IMWRITE_TIFF_COMPRESSION, 5])
    check(lzw.tobytes(), array)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_png_comes_back_with_red_first(dtype: str, channels: int) -> None:
    array = (RNG.random((21, 17, channels)) * np.iinfo(dtype).max).astype(dtype)
    _, png = cv2.imencode(".png", array[..., [2, 1, 0, 3][:channels]] if channels > 1 else array)
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
    "data", [None, b"", b"GIF", b"\x93NUMPY", b"II*\0", b"MM\0*" + bytes(99), b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_image_is_a_bad_sample(data: bytes | None) -> None:
    with pytest.raises(SampleError):
        decode_array(data)


def test_any_cut_and_any_changed_byte_of_a_header_is_a_bad_sample_or_an_array() -> None:
    for data in (tiff(some("uint16", 6, 5, 4), deflated=True), npy(some("float32", 3, 4, 2))):
        for end in range(len(data)):
            with pytest.raises(SampleError):
                decode_array(data[:end])
        for at in range(len(data)):
            for value in (0, 255, data[at] ^ 1):
                changed = data[:at] + bytes([value]) + data[at + 1 :]
                try:
                    decode_array(changed)
                except SampleError as error:
                    assert str(error)


def bombs() -> dict[str, bytes]:
    small = some("uint16", 4, 4, 4)
    npy_header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 19, 1 << 19, 64)}
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, npy_header)
    ihdr = b"IHDR" + struct.pack(">IIBBBBB", 30000, 30000, 16, 6, 0, 0, 0)
    png = struct.pack(">I", 13) + ihdr + struct.pack(">I", zlib.crc32(ihdr))
    return {
        "npy": file.getvalue(),
        "tiff sides": tiff(small, tags={256: 1 << 14, 257: 1 << 14}),
        "tiff channels": tiff(small, tags={277: 1 << 30}),
        "tiff tile": tiff(small, block=(16, 16), tiled=True, tags={322: 1 << 15, 323: 1 << 15}),
        "tiff rows": tiff(small, deflated=True, tags={257: 1 << 26}),
        "png": b"\x89PNG\r\n\x1a\n" + png,
    }


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_is_refused_before_memory_is_taken_for_it(name: str) -> None:
    data = bombs()[name]
    tracemalloc.start()
    with pytest.raises(SampleError, match=r"limit|truncated"):
        decode_array(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_block_that_inflates_beyond_its_size_is_cut_there() -> None:
    array = some("uint8", 4, 4, 1)
    data = tiff(array, deflated=True)
    at = data.index(zlib.compress(array.tobytes()))
    bomb = zlib.compress(array.tobytes() + bytes(50 << 20), 9)
    # Behind the file, where the strip's place is set to.
    place = struct.pack("<HHII", 273, 4, 1, at)
    moved = data.replace(place, struct.pack("<HHII", 273, 4, 1, len(data)))
    length = struct.pack("<HHII", 279, 4, 1, len(zlib.compress(array.tobytes())))
    moved = moved.replace(length, struct.pack("<HHII", 279, 4, 1, len(bomb))) + bomb
    tracemalloc.start()
    np.testing.assert_array_equal(decode_array(moved), array)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_three_channels_are_shown_from_the_least_value_to_the_largest() -> None:
    shown = as_rgb(np.array([[[100, 180, 300, 9]]], np.uint16))
    assert shown.dtype == np.uint8 and shown.tolist() == [[[0, 102, 255]]]
    assert as_rgb(np.full((2, 3, 2), 7.5, np.float32)).shape == (2, 3, 3)
    endless = np.array([[[np.nan, np.inf, -np.inf], [1, 2, 3]], [[1e308, -1e308, 0], [1, 2, 3]]])
    assert not as_rgb(endless).any() and as_rgb(endless[:1]).max() == 255
    np.testing.assert_array_equal(as_rgb(decode(picture(3))), decode(picture(3)))


def test_to_be_looked_at_an_array_needs_no_setting() -> None:
    array = some("float32", 3, 4, 5)
    np.testing.assert_array_equal(decode_any(npy(array)), array)
    np.testing.assert_array_equal(decode_any(tiff(array)), array)
    np.testing.assert_array_equal(decode_any(picture(3)), decode(picture(3)))
    with pytest.raises(SampleError, match=r"truncated \.npy"):
        decode_any(npy(array)[:-1])
    with pytest.raises(SampleError, match=r"an array of numpy's: set transform\.decode_as='array'"):
        decode(npy(array))
