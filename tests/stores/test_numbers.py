"""Numbers keep their values or are refused, and a .npy is as large as it says."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from raypipe.errors import SampleError, StoreError
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore
from raypipe.stores.numbers import InexactError, exactly, read_npy
from raypipe.stores.record import RecordLayout

U63, U64 = np.uint64(1 << 63), np.uint64((1 << 64) - 1)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], "float32"),
        ([0.1, np.nan, np.inf], "float32"),  # fractions are rounded
        ([1 << 24, -(1 << 63)], "float32"),
        (np.array([U63]), "float64"),
        (np.array([65504]), "float16"),
        (np.array([True]), "int8"),
        (np.array(5), "float32"),
        ([(1 << 53), 0.5], None),
        (np.empty(0), "uint8"),
    ],
)
def test_a_cast_that_changes_no_number_is_made(values: Any, dtype: Any) -> None:
    made = exactly(values, dtype)
    assert np.array_equal(
        made, np.asarray(values, dtype), equal_nan=True
    ) and made.dtype == (dtype or "float64")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([(1 << 53) + 1, 0.5], None),
        ([[0.5], [(1 << 53) + 1]], "float64"),
        ([int(U64), -1], None),
        ([(1 << 24) + 1], "float32"),
        (np.array([(1 << 63) - 1]), "float64"),
        (np.array([U64]), "float64"),
        (np.array([U63]), "int64"),
        (np.array([-1]), "uint64"),
        (np.array([70000]), "float16"),
        (np.array([300]), "uint8"),
        (np.array([2]), "bool"),
        ([1e39], "float32"),
        ([1.5], "int64"),
    ],
)
def test_a_cast_that_changes_a_number_is_refused_with_the_number(
    values: Any, dtype: Any
) -> None:
    with pytest.raises(InexactError, match=r"the number \S+, and \w+ cannot hold it"):
        exactly(values, dtype)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def declared(descr: str, shape: str, num_bytes: int = 8) -> bytes:
    header = (
        f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    )
    return (
        b"\x93NUMPY\x01\0"
        + len(header).to_bytes(2, "little")
        + header
        + bytes(num_bytes)
    )


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(0),
        np.zeros((0, 3)),
        np.array(3.5),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(3, dtype=">f4"),
        np.array([True]),
    ],
)
def test_a_sound_npy_is_what_numpy_reads(array: np.ndarray) -> None:
    found = read_npy(npy(array))
    assert np.array_equal(found, array) and found.shape == array.shape
    assert (
        found.dtype == array.dtype.newbyteorder("=")
        and found.flags.writeable
        and found.flags.c_contiguous
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            declared("'<f8'", "(1000000000000,)"),
            r"truncated \.npy: 8 bytes .* declares float64 of shape \(10{12},\)",
        ),
        (declared("'<f8'", "(0, 1000000000000000000000)", 0), "damaged"),
        (declared("'<f8'", "(-1, -1)"), "damaged"),
        (declared("'<f8'", "(" + "1, " * 65 + ")"), "damaged"),
        (declared("'<f8'", "-" * 9000 + "1"), "damaged"),
        (declared("'<f8'", "(1,)", 9), r"damaged \.npy: 9 bytes"),
        (declared("'<f16'", "()", 16), "store integers or floats"),
        (declared("'|O'", "(1,)"), "need a pickle"),
        (declared("('<f4', (2,))", "(1,)"), "store integers or floats"),
        (b"\x93NUMPY\x03\0\x01\0\0\0x", r"version \(3, 0\)"),
        (b"\x93NUM", "damaged"),
        (b"", "damaged"),
    ],
)
def test_a_npy_that_is_not_what_it_declares_is_refused(
    data: bytes, message: str
) -> None:
    with pytest.raises(SampleError, match=message):
        read_npy(data)


# Where stores cast


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int8[2]", [300, 1]),
        ("float32[1]", [1e39]),
        ("float32[1]", [(1 << 24) + 1]),
        ("float64", (1 << 53) + 1),
    ],
)
def test_a_record_refuses_a_number_that_its_column_cannot_hold(
    kind: str, value: Any
) -> None:
    with pytest.raises(StoreError, match=r"the number \S+, and \w+ cannot hold it"):
        RecordLayout({"image": "binary", "a": kind}).pack({"image": b"x", "a": value})


def test_stores_of_several_dtypes_are_joined_without_a_change() -> None:
    def joined(first: Any, second: Any) -> Any:
        parts = [
            MemoryStore([b"x"], None, columns={"a": np.array([value])})
            for value in (first, second)
        ]
        return (
            JoinedStore(dict(zip("ab", parts, strict=True)))
            .read(np.arange(2), ("a",))["a"]
            .tolist()
        )

    assert joined(np.int8(-1), U63 - np.uint64(1 << 62)) == [-1, 1 << 62] and joined(
        np.float32(0.5), 3
    ) == [
        0.5,
        3,
    ]
    with pytest.raises(StoreError, match=r"column 'a' .*the number 9007199254740993"):
        joined(0.5, (1 << 53) + 1)
