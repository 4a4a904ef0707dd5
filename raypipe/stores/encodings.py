"""Encodings of values in the shards of MDS, see `raypipe.stores.mds`.

    bytes, jpeg, png          unchanged
    str, json, str_int, …     text in UTF-8
    int, uint8, float32, …    little-endian

Pickles have no encoding here, since they are programs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

DAMAGE = (ValueError, LookupError, TypeError, OverflowError, RecursionError, struct.error)
"""Exceptions from decoding damaged bytes: a number over 64 bits raises OverflowError, deep JSON RecursionError."""

# Name, which is also numpy's → code of `struct`.
_NUMBERS = {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "int8": "b", "int16": "h", "int32": "i"}
_NUMBERS |= {"int64": "q", "float16": "e", "float32": "f", "float64": "d"}


@dataclass(frozen=True)
class Encoding:
    """Encoding of the values of one column.

    Attributes:
        decode: bytes → a value; raises one of `DAMAGE` for damaged bytes.
        dtype: dtype of numbers; None for other values.
        is_image: values may be encoded images.
    """

    decode: Callable[[bytes], Any]
    dtype: np.dtype[Any] | None = None
    is_image: bool = False


def _number(kind: str) -> Encoding:
    number = struct.Struct(f"<{_NUMBERS[kind]}")
    return Encoding(lambda data: number.unpack(data)[0], np.dtype(kind))


ENCODINGS: dict[str, Encoding] = {
    **dict.fromkeys(("bytes", "jpeg", "png"), Encoding(lambda data: data, is_image=True)),
    **{kind: _number(kind) for kind in _NUMBERS},
    "int": _number("int64"),
    "str_int": Encoding(lambda data: np.int64(int(data.decode())), np.dtype(np.int64)),
    "str_float": Encoding(lambda data: np.float64(data.decode()), np.dtype(np.float64)),
    "str": Encoding(lambda data: data.decode()),
    "json": Encoding(json.loads),
}
"""Name in an index, up to a colon, as in `jpeg:90` → encoding."""
