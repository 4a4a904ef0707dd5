"""Shards of MDS and LitData: the table of a shard's samples, the encodings of their values, compression.

    uint32 n | uint32 offsets (n + 1) | … | samples, from one offset to the next

    bytes, jpeg, png, …       as they are
    jpeg_array, list[jpeg]    the one image of a list
    str, json, str_int, …     text in UTF-8
    int, uint8, float32, …    little-endian
    pil                       uint32 width, height and length of the mode's name | name | pixels
    ndarray                   of MDS: type and axes, as far as the name of the encoding lacks them | values
    numpy, tensor             of LitData: uint32 type, number of axes, and axes | values

Pickles are programs, so they are not opened.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.storage.filesystem import join_address
from raypipe.storage.read_limit import check_read, read_limit
from raypipe.stores.base import RENAMED, ColumnValues, others, stored_names
from raypipe.stores.lmdb_values import is_image
from raypipe.stores.sources.format_source import (
    Asked,
    Source,
    explained,
    opened,
    size_of,
)

logger = logging.getLogger(__name__)

_CODECS = {
    "zstd": "zstd",
    "gz": "gzip",
    "br": "brotli",
    "bz2": "bz2",
    "snappy": "snappy",
}
"""Name in an index → pyarrow's."""

_USUAL = {"image": ("jpg", "jpeg", "png"), "label": ("class", "cls")}
_SMALLER = "write smaller shards"
_PICKLES = ("pkl", "pickle")
_PIL_HEAD = struct.Struct("<III")
_PIL_MODES = {b"L", b"RGB", b"RGBA", b"CMYK", b"1", b"LA"}

Decode = Callable[[bytes], Any]


class ShardFile(NamedTuple):
    """A file of samples, by its index.

    Attributes:
        name: its path in the folder.
        num_samples: how many it has.
        unpack: its address, for errors, and its stored bytes → its bytes.
    """

    name: str
    num_samples: int
    unpack: Callable[[str, bytes], bytes]


class Value(NamedTuple):
    """A value of a sample that becomes a column.

    Attributes:
        position: its place among the values.
        decode: its bytes → the value.
        shape: the one of all its arrays; empty if they have none, or several.
    """

    position: int
    decode: Decode
    shape: tuple[int, ...]


def shards_source(
    folder: str,
    encodings: Mapping[str, str],
    sizes: Sequence[int | None],
    shards: Sequence[ShardFile],
    asked: Asked,
) -> Source:
    """Return the samples of a folder of shards.

    Args:
        encodings: name of each value → its encoding.
        sizes: fixed size of each value; None = each sample has it before its values.
    """
    values = values_of(folder, encodings, asked)
    return Source(
        _samples(folder, shards, sizes, values),
        num_samples=sum(shard.num_samples for shard in shards),
        arrays=[
            column
            for column, value in values.items()
            if value.shape and column != "image"
        ],
    )


def values_of(
    where: str, encodings: Mapping[str, str], asked: Asked
) -> dict[str, Value]:
    """Return column → value, `image` and `label` first; encodings that are not read are left out, and said.

    Raises:
        StoreError: there is no image, or image or label has an encoding that is not read.
    """
    names = stored_names(where, encodings, asked._asdict(), _USUAL)
    names |= {name: name for name in others(encodings, names)}
    values: dict[str, Value] = {}
    for column, name in names.items():
        encoding = encodings[name]
        decode, shape = _decoder(encoding)
        if decode is not None:
            values[column] = Value(list(encodings).index(name), decode, shape)
            continue
        is_pickle = encoding in _PICKLES
        what = "a pickle, which may run a program" if is_pickle else repr(encoding)
        if column in RENAMED:
            raise StoreError(
                f"{where}: {name!r} is {what}, which raypipe does not read: name another value by "
                f"store.{RENAMED[column]}, or yield the samples from your own function, MODULE:NAME"
            )
        logger.warning("%s: %r is left out: it is %s", where, name, what)
    return values


def _samples(
    folder: str,
    shards: Sequence[ShardFile],
    fixed_sizes: Sequence[int | None],
    values: Mapping[str, Value],
) -> Iterator[ColumnValues]:
    head = struct.Struct(f"<{fixed_sizes.count(None)}I")
    for shard in shards:
        where = join_address(folder, shard.name)
        content = _content(folder, shard)
        with explained(where):
            table = np.frombuffer(content, "<u4", shard.num_samples + 2).tolist()
        num_samples, *offsets = table
        if num_samples != shard.num_samples or offsets[-1] > len(content):
            raise StoreError(
                f"{where} is truncated, damaged, or not the shard of this index; copy it again"
            )
        for number, (start, end) in enumerate(itertools.pairwise(offsets)):
            stored = content[start:end]
            sample = {}
            with explained(f"{where}, sample {number}"):
                given = iter(head.unpack_from(stored))
                sizes = [next(given) if size is None else size for size in fixed_sizes]
                begins = list(itertools.accumulate(sizes, initial=head.size))
                if begins[-1] != len(stored):
                    raise ValueError("it has values of other sizes")
            for column, (position, decode, _) in values.items():
                data = stored[begins[position] : begins[position + 1]]
                with explained(f"{where}, sample {number}: the value for {column!r}"):
                    sample[column] = decode(data)
            yield sample


def _content(folder: str, shard: ShardFile) -> bytes:
    """Return the bytes of a shard.

    Raises:
        StoreError: its name leads out of the folder, it cannot be read, or it unpacks to more than the limit.
    """
    parts = PurePosixPath(shard.name).parts
    leads_out = not parts or parts[0] == "/" or ".." in parts
    if leads_out or "\0" in shard.name or "\\" in shard.name:
        raise StoreError(
            f"{folder}: its index names {shard.name!r}, which is not a file in this folder"
        )
    address = join_address(folder, *parts)
    with opened(address) as file:
        stored_bytes = size_of(file)
        check_read(address, stored_bytes, stored_bytes, _SMALLER)
        return shard.unpack(address, file.read())


def unpacked(
    where: str, content: bytes, codec: str, num_bytes: int | None = None
) -> bytes:
    """Return the bytes of a shard, or a part of one.

    Args:
        content: as they are stored.
        codec: one of `_CODECS`, a level may follow; empty = they are not compressed.
        num_bytes: their number by the index; None = the index has none.

    Raises:
        ValueError: the codec is unknown.
        StoreError: they have another size, or one over the limit.
    """
    stored_bytes = len(content)
    if codec:
        kind = _CODECS.get(codec.partition(":")[0])
        if kind is None:
            raise ValueError(
                f"its compression is {codec!r}; raypipe reads {', '.join(_CODECS)}"
            )
        check_read(where, num_bytes or 0, stored_bytes, _SMALLER)
        max_bytes = read_limit(stored_bytes) if num_bytes is None else max(0, num_bytes)
        if kind == "snappy":  # pyarrow unpacks it at once, and needs its size
            content = pa.decompress(content, max_bytes, kind, asbytes=True)
        else:
            packed = pa.BufferReader(content)
            with pa.CompressedInputStream(packed, kind) as stream:
                # a bomb unpacks no further
                content = bytes(stream.read(max_bytes + 1))
    if num_bytes not in (None, len(content)):
        raise StoreError(
            f"{where} has {len(content)} bytes of {num_bytes}; copy it again"
        )
    check_read(where, len(content), stored_bytes, _SMALLER)
    return content


# Encodings


def _number(dtype: np.dtype[Any], data: bytes) -> Any:
    return np.frombuffer(data, dtype).item()


def _one_of(data: bytes) -> bytes:
    """Return the image of a list of one: uint32 number | uint32 sizes | images."""
    if is_image(data):
        return data
    (num,) = struct.unpack_from("<I", data)
    if num != 1:
        raise ValueError(f"it has {num} images, and a sample has one")
    return data[8:]


def _picture(data: bytes) -> bytes:
    """Return pixels as PNG, which loses nothing."""
    from PIL import Image

    width, height, num_letters = _PIL_HEAD.unpack_from(data)
    start = _PIL_HEAD.size + num_letters
    mode = data[_PIL_HEAD.size : start]
    if mode not in _PIL_MODES or not 0 < width * height <= 8 * len(data):
        raise ValueError(f"pixels of {width} x {height}, mode {mode[:20]!r}")
    image = Image.frombytes(mode.decode(), (width, height), data[start:])
    if mode == b"CMYK":
        image = image.convert("RGB")
    out = io.BytesIO()
    image.save(out, "PNG", compress_level=1)
    return out.getvalue()


def _of_mds(
    dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: bytes
) -> np.ndarray:
    start = 0
    if dtype is None:
        # the number of bits, and the kind
        dtype = np.dtype(f"{'uif'[data[0] % 8]}{data[0] // 8}")
        start = 1
    if shape is None:
        num_axes = data[start] >> 2
        axis = np.dtype(f"<u{1 << data[start] % 4}")
        shape = tuple(np.frombuffer(data, axis, num_axes, start + 1).tolist())
        start += 1 + num_axes * axis.itemsize
    return _shaped(data, start, dtype, shape)


def _of_litdata(types: Mapping[int, str], data: bytes) -> np.ndarray:
    # The head of a tensor was little-endian, as that of numpy's arrays is, and is big-endian in newer versions.
    order = "<" if struct.unpack_from("<I", data)[0] in types else ">"
    kind, num_axes = struct.unpack_from(f"{order}II", data)
    shape = tuple(np.frombuffer(data, f"{order}u4", num_axes, 8).tolist())
    return _shaped(data, 8 + 4 * num_axes, np.dtype(types[kind]), shape)


def _shaped(
    data: bytes, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray:
    values = np.frombuffer(data[start:], dtype)
    if math.prod(shape) != len(values):
        # numpy would take a product over 64 bits for another
        raise ValueError(f"{len(values)} values in an array of {shape}")
    return values.reshape(shape)


# The types of arrays are numbers in the data: in LitData of numpy, and in LitData of torch.
_NUMPY_TYPES = {
    **dict(
        enumerate(("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"))
    ),
    13: "?",
}
_TORCH_TYPES = {
    0: "f4",
    1: "f4",
    2: "f8",
    3: "f8",
    8: "f2",
    9: "f2",
    11: "u1",
    12: "i1",
    13: "i2",
    14: "i2",
    15: "i4",
    16: "i4",
    17: "i8",
    18: "i8",
    19: "?",
    20: "u2",
}
_NUMBERS = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64", "int", "float", "bool"),
    )
}
_HEADLESS = {"no_header_numpy": _NUMPY_TYPES, "no_header_tensor": _TORCH_TYPES}
_DECODERS: dict[str, Decode] = {
    **{name: partial(_number, dtype) for name, dtype in _NUMBERS.items()},
    **dict.fromkeys(("bytes", "jpeg", "png", "tifffile", "file", "image"), bytes),
    **dict.fromkeys(("str", "text", "str_decimal"), bytes.decode),
    **dict.fromkeys(("jpeg_array", "jpegarray", "list[jpeg]", "list[png]"), _one_of),
    "str_int": int,
    "str_float": float,
    "json": json.loads,
    "pil": _picture,
    "numpy": partial(_of_litdata, _NUMPY_TYPES),
    "tensor": partial(_of_litdata, _TORCH_TYPES),
}


def _decoder(encoding: str) -> tuple[Decode | None, tuple[int, ...]]:
    """Return the decoder of an encoding, such as `int`, `jpeg:90` or `ndarray:uint8:32,32,3`; None for others.

    The second value is the shape of all its arrays; empty if they have none, or several.
    """
    kind, _, details = encoding.partition(":")
    if kind == "ndarray":
        dtype, shape = _array_of(details)
        return partial(_of_mds, dtype, shape), shape or ()
    if types := _HEADLESS.get(kind):
        dtype_name = types.get(int(details)) if details.isdecimal() else None
        if dtype_name is None:
            return None, ()
        return partial(np.frombuffer, dtype=dtype_name), ()
    return _DECODERS.get(kind), ()


def _array_of(details: str) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None]:
    """Return dtype and shape of arrays from `uint8:32,32,3`; None for what it leaves open."""
    name, _, axes = details.partition(":")
    dtype = _NUMBERS[name] if name else None
    return dtype, tuple(map(int, axes.split(","))) if axes else None
