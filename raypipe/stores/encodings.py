"""Encodings of values in the shards of MDS, see `raypipe.stores.mds`.

    bytes, jpeg, png, …       unchanged
    str, json, str_int, …     text in UTF-8
    int, uint8, float32, …    little-endian
    ndarray                   type and axes, unless the name of the encoding has them | values

Pickles have no encoding here, since they are programs.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

DAMAGE = (ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error)
"""Exceptions from decoding damaged bytes: a number over 64 bits raises OverflowError, deep JSON RecursionError."""

# Name, which is also numpy's → code of `struct`.
_NUMBERS = {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "int8": "b", "int16": "h", "int32": "i"}
_NUMBERS |= {"int64": "q", "float16": "e", "float32": "f", "float64": "d"}
# Number in the data → type of an array.
_MDS_TYPES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 18: "f2", 32: "u4", 33: "i4", 34: "f4"}
_MDS_TYPES |= {64: "u8", 65: "i8", 66: "f8"}


@dataclass(frozen=True)
class Encoding:
    """Encoding of the values of one column.

    Attributes:
        decode: bytes → a value; raises one of `DAMAGE` for damaged bytes.
        dtype: dtype of numbers, and of arrays of one shape; None for other values.
        is_image: values may be encoded images.
        shape: common shape of arrays, which then also have a dtype.
        is_array: values are lists or arrays of numbers.
    """

    decode: Callable[[bytes], Any]
    dtype: np.dtype[Any] | None = None
    is_image: bool = False
    shape: tuple[int, ...] = ()
    is_array: bool = False


def encoding_of(name: str) -> Encoding | None:
    """Return the encoding that an index names, such as `int`, `jpeg:90` or `ndarray:uint8:32,32,3`.

    Returns None for pickles and for unknown names.
    """
    kind, _, rest = name.partition(":")
    make = ENCODINGS.get(kind)
    with contextlib.suppress(ValueError):  # the name is damaged
        return make(rest) if make else None
    return None


def _as_it_is(_: str) -> Encoding:
    return Encoding(lambda data: data, is_image=True)


def _number(kind: str, _: str) -> Encoding:
    number = struct.Struct(f"<{_NUMBERS[kind]}")
    return Encoding(lambda data: number.unpack(data)[0], np.dtype(kind))


def _text(_: str) -> Encoding:
    return Encoding(lambda data: data.decode())


def _ndarray(rest: str) -> Encoding:
    """Return the encoding of arrays, which become lists unless they have one shape."""
    name, _, axes = rest.partition(":")
    dtype = np.dtype(name) if name in _NUMBERS else None
    shape = tuple(map(int, axes.split(","))) if axes else None
    if (name and dtype is None) or min(shape or (1,)) < 1:
        raise ValueError(f"the encoding ndarray:{rest}")
    whole = Encoding(lambda data: _of_mds(data, dtype, shape), is_array=True)
    return whole if dtype is None or shape is None else replace(whole, dtype=dtype, shape=shape)


def _of_mds(data: bytes, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> list[Any]:
    start = 0
    if dtype is None:
        dtype, start = np.dtype(_MDS_TYPES[data[0]]), 1
    if shape is None:
        num_axes, axis = data[start] >> 2, np.dtype(f"<u{1 << data[start] % 4}")
        shape = tuple(np.frombuffer(data, axis, num_axes, start + 1).tolist())
        start += 1 + num_axes * axis.itemsize
    values = np.frombuffer(memoryview(data)[start:], dtype)
    if math.prod(shape) != len(values):  # in numpy a product over 64 bits would wrap around
        raise ValueError(f"{len(values)} values in an array of {tuple(shape)}")
    # A shape of four billion rows without values would make as many lists.
    rows: list[Any] = values.reshape(shape).tolist() if len(values) else []
    return rows


ENCODINGS: dict[str, Callable[[str], Encoding | None]] = {
    **dict.fromkeys(("bytes", "jpeg", "png"), _as_it_is),
    **{kind: partial(_number, kind) for kind in _NUMBERS},
    "int": partial(_number, "int64"),
    "str_int": lambda _: Encoding(lambda data: np.int64(int(data.decode())), np.dtype(np.int64)),
    "str_float": lambda _: Encoding(lambda data: np.float64(data.decode()), np.dtype(np.float64)),
    **dict.fromkeys(("str", "str_decimal"), _text),
    "json": lambda _: Encoding(json.loads),
    "ndarray": _ndarray,
}
"""Name → function that makes the encoding from the rest of its name in an index; it may return None."""
