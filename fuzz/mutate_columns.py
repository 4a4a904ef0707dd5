"""Columns and labels in sound stores of every format, of which one value is damaged; and what each of them means.

A case is one form of a column in one format: how a store of it is written, the values that it may hold, and the
meaning of a value by the library of its format (numpy, json, struct, pyarrow, Pillow), which fails where the value
is damaged.
"""

from __future__ import annotations

import io
import json
import re
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from mutate import ANY, EDGES, Mutation
from PIL import Image

from raypipe.stores.record import COLUMN_TYPES, KEY, METADATA_KEY, Metadata

SIDE = 6
NUM = 17
"""Samples of a store: the first 16 tell the types of its columns."""
_pixels = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
IMAGE = cv2.imencode(".png", _pixels)[1].tobytes()

Values = list[Any]
Write = Callable[[Path, Values], Any]


@dataclass(frozen=True)
class Case:
    """One form of a column in one format.

    Attributes:
        form: what it is, for reports: a column kind, a label's encoding, …
        store: the format, by its name in raypipe's table of stores.
        write: (path, values) → the address of a store of so many samples.
        seeds: sound values, as they are stored.
        mean: a stored value → what it means, by the library of its format; raises anything where it is damaged.
        damage: name → what may become of a stored value.
        column: where its meaning is in a batch: `label`, `image`, `mask`, … or the name of a column.
        columns: the stream's.
        transform: settings.
        options: of the store.
    """

    form: str
    store: str
    write: Write
    seeds: Sequence[Any]
    mean: Callable[[Any], Any]
    damage: Mapping[str, Mutation] = field(default_factory=lambda: ANY)
    column: str = "value"
    columns: Mapping[str, Any] = field(default_factory=dict)
    transform: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.store}: {self.form}"


# Forms: values as bytes or text, and their meaning


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy_header(data: bytes, rng: np.random.Generator) -> bytes:
    """Another shape, dtype, order or expression in the header of a .npy, whose length is set right."""
    shapes = [
        "(1000000000000,)",
        "(2,)",
        "(3, 1)",
        "(-1,)",
        "()",
        "(0,)",
        "(0, 4)",
        "(99999999999, 99999999999)",
    ]
    shapes += [
        "-" * 9000 + "1",
        "(" * 150,
        "(True,)",
        "(1.5,)",
        "(" + "1," * 40 + ")",
        "'x'",
    ]
    descrs = [
        "'<f4'",
        "'>f4'",
        "'<f8'",
        "'<i4'",
        "'<u8'",
        "'|b1'",
        "'|O'",
        "'<U4'",
        "'<c8'",
        "'<f2'",
        "'<f16'",
    ]
    descrs += ["[('a', '<f4')]", "('<f4', (2,))", "'<M8[s]'", "3"]
    shape, descr = (
        [each[int(rng.integers(len(each)))], None][int(rng.integers(2))]
        for each in (shapes, descrs)
    )
    array = np.load(io.BytesIO(data))
    order = ["True", "False", "3"][int(rng.integers(3))]
    header = f"{{'descr': {descr or repr(array.dtype.str)}, 'fortran_order': {order}, "
    text = f"{header}'shape': {shape or array.shape}, }}".encode()
    version = [b"\x01\0", b"\x02\0", b"\x03\0", b"\x01\x01"][
        min(3, int(rng.integers(8)))
    ]
    length = struct.pack("<H" if version[0] == 1 else "<I", len(text))
    return b"\x93NUMPY" + version + length + text + array.tobytes()


def as_numbers(value: Any) -> np.ndarray:
    """Numbers of lists, each the one that it was."""
    exact = np.asarray(value, object)
    if not all(
        isinstance(each, bool | int | float | np.number | np.bool_)
        for each in exact.flat
    ):
        raise ValueError("no numbers")
    return exact


def raw(data: bytes, dtype: str = "<f4") -> np.ndarray:
    return np.frombuffer(data, dtype)


def load_npy(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data), allow_pickle=False)


def from_json(data: bytes) -> np.ndarray:
    return as_numbers(json.loads(data))


def checked_png(data: bytes) -> Image.Image:
    """A PNG whose checksums hold, where they are of its pixels."""
    at, kind = 8, b""
    while kind != b"IEND" and at + 12 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 8 + length
        checksum = int.from_bytes(data[end : end + 4], "big")
        if (
            end + 4 <= len(data)
            and kind[:1].isupper()
            and zlib.crc32(data[at + 4 : end]) != checksum
        ):
            raise ValueError("a checksum")
        at = end + 4
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def mask_of(data: bytes) -> np.ndarray:
    return np.asarray(checked_png(data), np.uint8)


def boxes_of(data: bytes) -> np.ndarray:
    """The boxes of a value, cut at the image, or its keypoints; float32 has to hold all of it."""
    return _targets(data, 5)


def keypoints_of(data: bytes) -> np.ndarray:
    return _targets(data, 3)


def _targets(data: bytes, width: int) -> np.ndarray:
    if data.strip().endswith(b"]") or not data.strip():
        numbers = from_json(data) if data.strip() else np.empty(0)
    else:
        numbers = raw(data)
    rows = numbers.reshape(-1, width).astype(np.float32)
    labels = rows[:, -1]
    if (
        not (labels == numbers.reshape(-1, width)[:, -1]).all()
        or not np.isfinite(rows).all()
    ):
        raise ValueError("float32 does not hold them")
    if width == 5:
        rows[:, :4] = np.clip(rows[:, :4], 0, SIDE)
    else:
        outside = ~((rows[:, :2] >= 0) & (rows[:, :2] < SIDE)).all(1)
        rows[:, 2] = np.where(outside, -2 - labels, labels)
    return rows


def png(pixels: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", **options)
    return file.getvalue()


def json_numbers(data: bytes, rng: np.random.Generator) -> bytes:
    """A number of the JSON in place of another, at the edge of a type or beyond it, or no number at all."""
    others = [
        *map(str, EDGES),
        "1e39",
        "1e309",
        "-1e400",
        "NaN",
        "Infinity",
        "0.5",
        "null",
        '"1"',
        "true",
        "[1]",
        "{}",
    ]
    others += ["9" * 5000, "[" * 2000, "16777217.0"]
    places = [found.span() for found in re.finditer(rb"[-\d.]+", data)] or [(1, 1)]
    start, end = places[int(rng.integers(len(places)))]
    return data[:start] + others[int(rng.integers(len(others)))].encode() + data[end:]


def float_bits(data: bytes, rng: np.random.Generator) -> bytes:
    """One of the little-endian float32 is of any size."""
    odd = [np.nan, np.inf, -1, 0.5, 2**24, 2**24 + 2, 3e38, 1e-40, 65536, -0.0]
    at = 4 * int(rng.integers(len(data) // 4))
    return (
        data[:at] + struct.pack("<f", odd[int(rng.integers(len(odd)))]) + data[at + 4 :]
    )


_BOX = np.array([[1, 1, 4, 5, 2], [0, 0, 6, 6, 16777216]], "<f4")
_POINT = np.array([[1, 1, 2], [-3, 9, 16777216]], "<f4")
_VECTORS = [np.arange(4, dtype=np.float32), np.array([0.25, -1, 3e38], np.float32)]
_MASKS = [
    png(np.arange(36, dtype=np.uint8).reshape(6, 6) * 7, compress_level=level)
    for level in (0, 9)
]
_PALETTE = io.BytesIO()
Image.fromarray(_pixels).quantize(9).save(_PALETTE, "PNG", compress_level=0)
_RGBA = png(np.dstack([_pixels, _pixels[..., 0]]), compress_level=0)


@dataclass(frozen=True)
class Form:
    """A form of values that are bytes, or text in UTF-8, in any store that has such columns."""

    seeds: Sequence[bytes]
    mean: Callable[[bytes], Any]
    damage: Mapping[str, Mutation] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=lambda: {"value": {}})
    column: str = "value"
    transform: Mapping[str, Any] = field(default_factory=dict)
    is_text: bool = False


def _target(
    name: str,
    seeds: Sequence[bytes],
    mean: Any,
    damage: dict[str, Mutation],
    text: bool = False,
) -> Form:
    return Form(seeds, mean, damage, {}, name, {"targets": {name: "value"}}, text)


_FLOAT = {"value": {"dtype": "float32"}}
FORMS: dict[str, Form] = {
    "ragged, .npy": Form(
        [npy(each) for each in _VECTORS], load_npy, {"header": npy_header}, _FLOAT
    ),
    "array, .npy": Form(
        [npy(np.arange(4.0) * (i + 1)) for i in range(2)],
        load_npy,
        {"header": npy_header},
        {"value": {"dtype": "float32", "length": 4}},
    ),
    "array, .npy padded": Form(
        [npy(np.arange(i + 1)) for i in range(3)],
        load_npy,
        {"header": npy_header},
        {"value": {"dtype": "int16", "length": 4, "fill": -1}},
    ),
    "array, .npy scalar": Form(
        [npy(np.float64(i)) for i in range(2)],
        load_npy,
        {"header": npy_header},
        {"value": {"dtype": "float64"}},
    ),
    "ragged, raw": Form(
        [each.tobytes() for each in _VECTORS], raw, {"float": float_bits}, _FLOAT
    ),
    "ragged, JSON": Form(
        [b"[1, 2, 3]", b"[0.5]", b"[]"],
        from_json,
        {"number": json_numbers},
        {"value": {"dtype": "float64"}},
        is_text=True,
    ),
    "array, JSON integers": Form(
        [b"[1, 200]", b"[0, 255]"],
        from_json,
        {"number": json_numbers},
        {"value": {"dtype": "uint8", "length": 2}},
        is_text=True,
    ),
    "text": Form([b"a text", "ä ☃".encode(), b""], bytes.decode, is_text=True),
    "bytes": Form([b"a\0\xff", b""], bytes),
    "json": Form(
        [b'{"a": [1, "x"], "b": 3}', b'{"a": [2, "y"], "b": 4}'],
        lambda data: json.loads(data)["a"],
        {},
        {"value.a": {}},
        "value.a",
        is_text=True,
    ),
    "mask": _target("mask", [*_MASKS, _PALETTE.getvalue()], mask_of, {}),
    "boxes, raw": _target(
        "boxes",
        [_BOX.tobytes(), _BOX[:1].tobytes(), b""],
        boxes_of,
        {"float": float_bits},
    ),
    "boxes, JSON": _target(
        "boxes",
        [b"[[1, 1, 4, 5, 2]]", b"[1, 1, 4, 5, 2]"],
        boxes_of,
        {"number": json_numbers},
        True,
    ),
    "keypoints, raw": _target(
        "keypoints",
        [_POINT.tobytes(), _POINT[:1].tobytes()],
        keypoints_of,
        {"f": float_bits},
    ),
    "keypoints, JSON": _target(
        "keypoints",
        [b"[[1, 1, 4]]", b"[1, 1, 2, -4, 9.5, 0]"],
        keypoints_of,
        {"number": json_numbers},
        True,
    ),
}
IMAGES: dict[str, Form] = {
    "array image, .npy": Form(
        [
            npy(np.arange(36, dtype=np.float32).reshape(6, 6) * (i + 1))
            for i in range(2)
        ],
        lambda data: load_npy(data).reshape(6, 6, -1),
        {"header": npy_header},
        {},
        "image",
        {"decode": "array"},
    ),
    "image, PNG": Form(
        [IMAGE, _RGBA, _PALETTE.getvalue()],
        lambda data: np.asarray(checked_png(data).convert("RGB")),
        {},
        {},
        "image",
    ),
}


# Stores: how each of them is written, of values in a column `value`, `label` or `image`

_FIXED = {"image": IMAGE, "label": 1}


def columns_of(column: str, values: Values) -> dict[str, Values]:
    fixed: dict[str, Values] = {
        name: [value] * len(values) for name, value in _FIXED.items()
    }
    return fixed | {column: values}


def write_table(column: str, arrow: Any, path: Path, values: Values) -> Path:
    """Parquet; `arrow` makes the column of the values."""
    columns = {
        name: pa.array(each)
        for name, each in columns_of(column, values).items()
        if name != column
    }
    table = pa.table(columns | {column: arrow(values)})
    path = path.with_suffix(".parquet")
    pq.write_table(table, path, row_group_size=10, write_statistics=False)
    return path


def _strings(values: Sequence[bytes]) -> pa.Array:
    """Text that need not be UTF-8, as a damaged file may have it."""
    ends = np.cumsum([0, *map(len, values)]).astype(np.int32)
    return pa.StringArray.from_buffers(
        len(values), pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(values))
    )


def write_lmdb(
    types: Mapping[str, str], pack: Callable[[Any], bytes], path: Path, values: Values
) -> Path:
    path = path.with_suffix(".lmdb")
    note = Metadata(len(values), dict(types), None, "0" * 32).to_json()
    with (
        lmdb.open(str(path), subdir=False, lock=False, map_size=4 << 20) as env,
        env.begin(write=True) as txn,
    ):
        for number, value in enumerate(values):
            txn.put(KEY.pack(number), pack(value))
        txn.put(METADATA_KEY, note)
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as env:
        needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if path.stat().st_size < needed:
        with path.open("ab") as file:
            file.truncate(needed)
    return path


def _variable(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


def _lmdb_of(form: Form, path: Path, values: Values) -> Path:
    types = {
        "image": "binary",
        "label": "int64",
        "value": "string" if form.is_text else "binary",
    }
    return write_lmdb(
        types,
        lambda value: struct.pack("<q", 1) + _variable(IMAGE) + _variable(value),
        path,
        values,
    )


def _lmdb_images(path: Path, values: Values) -> Path:
    types = {"image": "binary", "label": "int64"}
    return write_lmdb(
        types, lambda value: struct.pack("<q", 1) + _variable(value), path, values
    )


def write_tar(
    members: Callable[[int, Any], Mapping[str, bytes]], path: Path, values: Values
) -> Path:
    path = path.with_suffix(".tar")
    with tarfile.open(path, "w") as tar:
        for number, value in enumerate(values):
            for name, content in members(number, value).items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def _member(suffix: str, number: int, value: bytes) -> dict[str, bytes]:
    content = {"png": IMAGE, "cls": b"1"} | {suffix: value}
    return {f"{number:04d}.{name}": each for name, each in content.items()}


def write_folder(suffix: str, path: Path, values: Values) -> Path:
    (path / "a").mkdir(parents=True)
    for number, value in enumerate(values):
        (path / "a" / f"{number:04d}.{suffix}").write_bytes(value)
    return path


def carriers(form: Form) -> Iterator[tuple[str, Write]]:
    """The formats that have columns of bytes, or of text, and how a store of a form's values is written."""
    yield "lmdb", partial(_lmdb_of, form)
    yield (
        "parquet",
        partial(write_table, "value", _strings if form.is_text else pa.array),
    )


def image_carriers(suffix: str) -> Iterator[tuple[str, Write]]:
    yield "lmdb", _lmdb_images
    yield "parquet", partial(write_table, "image", pa.array)
    yield (
        "tar",
        partial(
            write_tar,
            lambda n, value: {f"{n:04d}.{suffix}": value, f"{n:04d}.cls": b"1"},
        ),
    )
    yield "folder", partial(write_folder, suffix)


def column_cases() -> Iterator[Case]:
    """Every form of a column, and of an array as an image, in every format that has it."""
    for name, form in FORMS.items():
        common = (
            form.seeds,
            form.mean,
            {**ANY, **form.damage},
            form.column,
            form.columns,
            form.transform,
        )
        for store, write in carriers(form):
            yield Case(name, store, write, *common)
        suffix = "txt" if form.is_text else "bin"
        columns = {
            suffix + column.removeprefix("value"): options
            for column, options in form.columns.items()
        }
        transform = {
            setting: dict.fromkeys(names, suffix)
            for setting, names in form.transform.items()
        }
        column = suffix + form.column.removeprefix("value") if columns else form.column
        write = partial(write_tar, partial(_member, suffix))
        yield Case(name, "tar", write, *common[:3], column, columns, transform)
    for name, form in IMAGES.items():
        for store, write in image_carriers("npy" if ".npy" in name else "png"):
            damage = {**ANY, **form.damage}
            yield Case(
                name,
                store,
                write,
                form.seeds,
                form.mean,
                damage,
                "image",
                {},
                form.transform,
            )


# Records of LMDB: damage between the values


RECORD = {
    "image": "binary",
    "label": "int64",
    "weight": "float64",
    "name": "string",
    "value": "float32[3]",
}
_REST = ("label", "weight", "name", "value")


def _record(number: int) -> bytes:
    vector = np.full(3, number, "<f4").tobytes()
    return struct.pack("<qd", number, number / 3) + b"".join(
        map(_variable, (IMAGE, b"a name", vector))
    )


def record_of(data: bytes) -> dict[str, Any]:
    """All columns of a record but the image, as docs of `raypipe.stores.record` say."""
    label, weight = struct.unpack_from("<qd", data)
    at, parts = 16, []
    for _ in range(3):
        (length,) = struct.unpack_from("<I", data, at)
        if length > len(data) - at - 4:
            raise ValueError("beyond the end")
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    vector = np.frombuffer(parts[2], "<f4")
    if len(vector) != 3:
        raise ValueError("another shape")
    return {
        "label": label,
        "weight": weight,
        "name": parts[1].decode(),
        "value": vector,
    }


def record_cases() -> Iterator[Case]:
    names = {"weight": {}, "name": {}, "value": {}}
    write = partial(write_lmdb, RECORD, bytes)
    yield Case(
        "record", "lmdb", write, [*map(_record, range(3))], record_of, ANY, "", names
    )


# Labels


LABELS = [
    0,
    1,
    2,
    -1,
    (1 << 31) - 1,
    (1 << 53) + 1,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    (1 << 64) - 1,
]


def other_label(value: Any, rng: np.random.Generator) -> Any:
    """A number at the edge of a type."""
    return LABELS[int(rng.integers(len(LABELS)))]


def no_label(value: Any, rng: np.random.Generator) -> None:
    return None


def numeric_types() -> list[pa.DataType]:
    """Arrow's types of one number."""
    integers = [
        getattr(pa, f"{sign}int{bits}")()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    ]
    return [pa.bool_(), *integers, pa.float16(), pa.float32(), pa.float64()]


def _within(kind: pa.DataType, value: Any, rng: np.random.Generator) -> Any:
    """A value that a type holds, at its edges too."""
    if pa.types.is_boolean(kind):
        return bool(rng.integers(2))
    dtype = np.dtype(kind.to_pandas_dtype())
    if dtype.kind == "f":
        return [float("nan"), float("inf"), float(np.finfo(dtype).max), 0.1][
            int(rng.integers(4))
        ]
    info = np.iinfo(dtype)
    return int(rng.choice(np.array([info.min, info.max, info.max - 1, 0], object)))


def _arrow_of(kind: pa.DataType, values: Values) -> pa.Array:
    if pa.types.is_float16(kind):
        return pa.array(
            [None if value is None else np.float16(value) for value in values], kind
        )
    return pa.array(values, kind)


def _arrow_lists(kind: pa.DataType, values: Values) -> pa.Array:
    ends = np.cumsum([0, *(len(value or ()) for value in values)])
    offsets = pa.array(
        [
            None if value is None else end
            for value, end in zip([*values, []], ends, strict=True)
        ],
        pa.int32(),
    )
    return pa.ListArray.from_arrays(
        offsets, _arrow_of(kind, [each for value in values for each in value or ()])
    )


def _list_of(kind: pa.DataType, value: list[Any] | None) -> list[Any]:
    if value is None:
        raise ValueError("no value")
    return _arrow_of(kind, value).to_pylist()


def _within_list(
    kind: pa.DataType, value: list[Any], rng: np.random.Generator
) -> list[Any]:
    return [*value[1:], _within(kind, value[0], rng)]


def _lists(list_type: pa.DataType, values: Values) -> pa.Array:
    return pa.array(values, list_type)


def _changed_list(value: list[Any] | None, rng: np.random.Generator) -> Any:
    """A list of another length, with a null, or a null."""
    kinds = (
        [[*value, value[0]], value[:1], [value[0], None], None, []] if value else [None]
    )
    return kinds[int(rng.integers(len(kinds)))]


def arrow_labels() -> Iterator[Case]:
    for of_type in numeric_types():
        is_class = pa.types.is_integer(of_type)
        seeds = [True, False] if pa.types.is_boolean(of_type) else [0, 1, 2]
        damage = {"null": no_label, "edge": partial(_within, of_type)}
        write = partial(write_table, "label", partial(_arrow_of, of_type))
        mean = partial(_exact_of, of_type)
        yield Case(f"label {of_type}", "parquet", write, seeds, mean, damage, "label")
        value = partial(write_table, "value", partial(_arrow_of, of_type))
        yield Case(
            f"array {of_type}",
            "parquet",
            value,
            seeds,
            mean,
            damage,
            "value",
            {"value": {}},
        )
        for dtype in ("float32", "int16", "uint64"):
            options = {"dtype": dtype}
            if is_class:
                columns = {"label": options}
                yield Case(
                    f"label {of_type} as {dtype}",
                    "parquet",
                    write,
                    seeds,
                    mean,
                    damage,
                    "label",
                    columns,
                )
            if is_class or dtype == "float32":
                columns = {"value": options}
                yield Case(
                    f"array {of_type} as {dtype}",
                    "parquet",
                    value,
                    seeds,
                    mean,
                    damage,
                    "value",
                    columns,
                )
        lists = partial(write_table, "value", partial(_arrow_lists, of_type))
        of_lists = [[each, each] for each in seeds]
        damage = {"list": _changed_list, "edge": partial(_within_list, of_type)}
        yield Case(
            f"ragged {of_type}",
            "parquet",
            lists,
            of_lists,
            partial(_list_of, of_type),
            damage,
            "value",
            {"value": {}},
        )
    for list_type in (
        pa.list_(pa.int64()),
        pa.large_list(pa.float32()),
        pa.list_(pa.int16(), 2),
    ):
        options = {} if pa.types.is_fixed_size_list(list_type) else {"length": 2}
        damage = {"list": _changed_list} if options else {"null": no_label}
        write = partial(write_table, "label", partial(_lists, list_type))
        seeds = [[1, 2], [0, 5]]
        yield Case(
            f"label {list_type}",
            "parquet",
            write,
            seeds,
            as_numbers,
            damage,
            "label",
            {"label": options},
        )


def _exact_of(kind: pa.DataType, value: Any) -> Any:
    found = (
        pa.scalar(np.float16(value), kind)
        if pa.types.is_float16(kind)
        else pa.scalar(value, kind)
    )
    return as_numbers(found.as_py())


# Labels of LMDB and of WebDataset, by struct and numpy


def _shaped(data: bytes, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    values = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
    if int(np.prod(np.array(shape, object), initial=1)) != len(values):
        raise ValueError("another size")
    return values.reshape(shape)


def _number_of(code: str, data: bytes) -> Any:
    return as_numbers(struct.unpack(f"<{code}", data)[0])


def digits(data: bytes, rng: np.random.Generator) -> bytes:
    """Text that is another number, or none."""
    others = [
        b"9" * 30,
        b"1e999",
        b"nan",
        b"1_0",
        b" 7 ",
        "٣".encode(),
        b"",
        b"0x1",
        b"-1",
        b"1.5",
        b"9" * 5000,
    ]
    return others[int(rng.integers(len(others)))]


def other_labels() -> Iterator[Case]:
    for kind in (*COLUMN_TYPES, "float32[2]", "uint8[2]"):
        if kind in ("binary", "string"):  # no labels
            continue
        code = {"int64": "q", "float64": "d"}.get(kind)
        types = {"image": "binary", "label": kind}
        if code:
            seeds = [struct.pack(f"<{code}", i) for i in range(3)]
            write = partial(write_lmdb, types, lambda value: value + _variable(IMAGE))
            # The image stands behind it: a value of another size moves that, which `record` tries.
            damage = {name: partial(_same_size, mutate) for name, mutate in ANY.items()}
            yield Case(
                f"label {kind}",
                "lmdb",
                write,
                seeds,
                partial(_number_of, code),
                damage,
                "label",
            )
            continue
        dtype = kind.partition("[")[0]
        seeds = [np.array(pair, dtype).tobytes() for pair in ([1, 0], [3, 2])]
        write = partial(
            write_lmdb, types, lambda value: _variable(IMAGE) + _variable(value)
        )
        mean = partial(_shaped, dtype=dtype, shape=(2,))
        yield Case(f"label {kind}", "lmdb", write, seeds, mean, ANY, "label")
    write = partial(write_tar, partial(_member, "cls"))
    mean_int = lambda data: as_numbers(int(data))  # noqa: E731
    yield Case(
        "label cls",
        "tar",
        write,
        [b"1", b"20\n"],
        mean_int,
        {**ANY, "digits": digits},
        "label",
    )
    for name, seeds, options in (
        ("integer", [b"1", b"2"], {}),
        ("number", [b"0.5", b"2"], {}),
        ("list", [b"[1, 2]", b"[3, 4]"], {}),
    ):
        write = partial(write_tar, lambda number, value: _json_member(number, value))
        columns = {"label": options} if options else {}
        damage = {**ANY, "number": json_numbers}
        yield Case(
            f"label JSON {name}",
            "tar",
            write,
            seeds,
            from_json,
            damage,
            "label",
            columns,
        )


def _json_member(number: int, value: bytes) -> dict[str, bytes]:
    return {
        f"{number:04d}.png": IMAGE,
        f"{number:04d}.json": b'{"label": ' + value + b"}",
    }


def _same_size(mutate: Mutation, data: bytes, rng: np.random.Generator) -> bytes:
    return (mutate(data, rng) + data)[: len(data)]


GROUPS: dict[str, Callable[[], list[Case]]] = {
    "columns": lambda: [*column_cases(), *record_cases()],
    "labels": lambda: [*arrow_labels(), *other_labels()],
}
"""The cases, by the kind that names them in test_mutations.py."""
