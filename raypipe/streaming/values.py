"""Values of a store's columns as bytes, on their way from a reader to an actor. Nothing is pickled.

one byte for the kind | uint32 length | the value      of each column's name, as text, and its value, in turn

n   None                   s   text in UTF-8           b   bytes
a   .npy of an array       j   anything else, as JSON: numbers of Python, lists, dicts
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from raypipe.transform.columns import as_json

_HEAD = struct.Struct("<cI")


def pack_values(columns: Mapping[str, Any]) -> bytes:
    """The columns of one sample, by name."""
    parts = []
    for name, value in columns.items():
        for kind, content in (_packed(name), _packed(value)):
            parts += [_HEAD.pack(kind, len(content)), content]
    return b"".join(parts)


def unpack_values(data: bytes) -> dict[str, Any]:
    """The columns that `pack_values` was given; what only JSON can hold of them, as JSON has it."""
    found, at = [], 0
    while at < len(data):
        kind, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        found.append(_unpacked(kind, data[at : at + length]))
        at += length
    return dict(zip(found[::2], found[1::2], strict=True))


def _packed(value: Any) -> tuple[bytes, bytes]:
    if value is None:
        return b"n", b""
    if isinstance(value, str):
        return b"s", value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return b"b", value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return b"a", file.getvalue()
    return b"j", as_json(value)


def _unpacked(kind: bytes, content: bytes) -> Any:
    if kind == b"n":
        return None
    if kind == b"s":
        return content.decode("utf-8", "surrogatepass")
    if kind == b"b":
        return content
    return np.load(io.BytesIO(content), allow_pickle=False) if kind == b"a" else json.loads(content)
