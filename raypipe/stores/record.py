"""Contents of raypipe's own files: samples as records, and metadata of the whole file.

A record is one sample as one value, which files store and writers fingerprint:

    | fixed columns, 8 bytes each, little-endian | for each variable column: uint32 length | bytes |

Columns keep the order in which they were declared, but fixed ones (int64, float64) precede variable ones (binary,
string, and arrays of one shape: `float32[512]`, `uint8[2,3]`). A length of 0xFFFFFFFF means None.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import DAMAGE, StoreError
from raypipe.stores import arrow_values
from raypipe.stores.base import ColumnValues, as_text
from raypipe.stores.numbers import exactly

COLUMN_TYPES = ("int64", "float64", "binary", "string")
_ARRAY = re.compile(
    r"(bool|u?int(?:8|16|32|64)|float(?:16|32|64))\[([0-9]{1,9}(?:,[0-9]{1,9})*)\]"
)
DEFAULT_COLUMNS = {"image": "binary", "label": "int64"}

KEY = struct.Struct(">Q")
"""Key of a record in LMDB: its index."""
METADATA_KEY = b"__raypipe__"
"""Key of the file's `Metadata` in LMDB."""
RECORD_VERSION = 1

# Exceptions from parsing damage: a count of 1e999 raises OverflowError, a thousand brackets RecursionError.
_FIXED_CODES = {"int64": "q", "float64": "d"}
_LENGTH = struct.Struct("<I")
_NONE = 0xFFFFFFFF
_BYTES = bytes | bytearray | memoryview


def check_column_types(types: Mapping[str, str]) -> None:
    """Raise StoreError unless every type is in `COLUMN_TYPES` or an array type, and fits image and label."""
    for name, kind in types.items():
        if kind not in COLUMN_TYPES and numpy_type(kind) is None:
            allowed = f"{', '.join(COLUMN_TYPES)}, and arrays such as float32[512]"
            raise StoreError(f"column {name!r} has type {kind!r}; types are: {allowed}")
    if types.get("image", "binary") != "binary":
        raise StoreError(
            f"column 'image' has type {types['image']!r}; it must be binary"
        )
    if types.get("label") in ("binary", "string"):
        raise StoreError(
            f"column 'label' has type {types['label']!r}; it must be int64, float64 or an array"
        )


@functools.cache
def numpy_type(kind: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Return dtype and shape of a column of arrays; None for any other type."""
    match = _ARRAY.fullmatch(kind)
    if match is None:
        return None
    return np.dtype(match[1]).newbyteorder("<"), tuple(map(int, match[2].split(",")))


def arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a column of one of `COLUMN_TYPES`, or of arrays."""
    if (array := numpy_type(kind)) is not None:
        dtype, shape = array
        return arrow_values.array_type(dtype.newbyteorder("="), shape)
    return getattr(pa, kind)()


def arrow_column(kind: str, values: list[Any]) -> pa.Array:
    """Return the values of a column, in which None is a missing or damaged one, as Arrow.

    Args:
        kind: one of `COLUMN_TYPES`, or a type of arrays.
    """
    array = numpy_type(kind)
    if array is None:
        return pa.array(values, arrow_type(kind))
    dtype, shape = array
    is_null = np.array([value is None for value in values], bool)
    numbers = np.zeros((len(values), *shape), dtype.newbyteorder("="))
    for row in np.flatnonzero(~is_null).tolist():
        numbers[row] = values[row]
    return arrow_values.to_arrow(numbers, is_null)


def schema_of(types: Mapping[str, str], classes: Sequence[str] | None) -> pa.Schema:
    """Return the Arrow schema of columns, with the class names as a Hugging Face ClassLabel."""
    schema = pa.schema([(name, arrow_type(kind)) for name, kind in types.items()])
    if classes is None or types.get("label") != "int64":
        return schema
    features: dict[str, Any] = {
        name: {"dtype": kind, "_type": "Value"}
        for name, kind in types.items()
        if numpy_type(kind) is None
    }
    features["label"] = {"names": list(classes), "_type": "ClassLabel"}
    about = json.dumps({"info": {"features": features}})
    return schema.with_metadata({"huggingface": about})


class RecordLayout:
    """Packs samples into records and back; `types` has all columns, name → one of `COLUMN_TYPES`, in order."""

    def __init__(self, types: Mapping[str, str]) -> None:
        check_column_types(types)
        self.types = dict(types)
        self._fixed_names = [
            name for name, kind in types.items() if kind in _FIXED_CODES
        ]
        self._variable_names = [
            name for name, kind in types.items() if kind not in _FIXED_CODES
        ]
        self._arrays = {name: numpy_type(kind) for name, kind in types.items()}
        self._fixed = struct.Struct(
            "<" + "".join(_FIXED_CODES[types[name]] for name in self._fixed_names)
        )

    def pack(self, sample: ColumnValues) -> bytes:
        """Return the record of a sample; raise StoreError if its columns or their types were not declared so."""
        if sample.keys() != self.types.keys():
            raise StoreError(
                f"a sample has the columns {sorted(sample)}, but {sorted(self.types)} were declared"
            )
        record = [self._packed_numbers(sample)]
        for name in self._variable_names:
            content = self._encoded(name, sample[name])
            if content is None:
                record.append(_LENGTH.pack(_NONE))
                continue
            if len(content) >= _NONE:
                raise StoreError(
                    f"column {name!r} holds {len(content)} bytes; the limit is {_NONE - 1}"
                )
            record += (_LENGTH.pack(len(content)), content)
        return b"".join(record)

    def _packed_numbers(self, sample: ColumnValues) -> bytes:
        """Return the fixed columns of a sample."""
        values = {name: sample[name] for name in self._fixed_names}
        try:
            packed = self._fixed.pack(*values.values())
            for name, number in values.items():
                is_integer = isinstance(number, int | np.integer)
                if self.types[name] == "float64" and is_integer:
                    exactly(np.asarray(number), np.float64)
            return packed
        except (struct.error, ValueError, OverflowError) as error:
            reason = str(error)
            if any(number is None for number in values.values()):
                reason = "give it each number, or leave the column out"
            raise StoreError(
                f"a sample's numbers do not fit their columns: {values}: {reason}"
            ) from error

    def _encoded(self, name: str, value: Any) -> bytes | None:
        """Return the bytes of a value of a variable column; None for None."""
        if value is None:
            return None
        if (array := self._arrays[name]) is not None:
            return _array_bytes(name, value, *array)
        expected = str if self.types[name] == "string" else _BYTES
        if not isinstance(value, expected):
            raise StoreError(
                f"column {name!r} is {self.types[name]}, not {type(value).__name__}"
            )
        try:
            return value.encode() if isinstance(value, str) else bytes(value)
        except UnicodeEncodeError as error:
            raise StoreError(
                f"column {name!r} has text that is not Unicode: {error}"
            ) from None

    def native(self, names: Collection[str]) -> tuple[int, bytes]:
        """Return the number of fixed columns, and a byte for each variable one: 1 if it is requested, else 0."""
        return len(self._fixed_names), bytes(
            name in names for name in self._variable_names
        )

    def columns(
        self,
        fixed: bytes,
        variable: Sequence[Sequence[bytes | None]],
        names: Collection[str],
    ) -> dict[str, Any]:
        """Return the requested columns of n records, arrays and lists, from the output of `LMDBFile.records`."""
        numbers = np.frombuffer(fixed, "<i8")
        columns: dict[str, Any] = {}
        for number, name in enumerate(self._fixed_names):
            if name in names:
                values = numbers[number :: len(self._fixed_names)].copy()
                columns[name] = values.view(self.types[name])
        requested = (name for name in self._variable_names if name in names)
        for name, contents in zip(requested, variable, strict=True):
            is_plain = self.types[name] == "binary"
            columns[name] = [
                content if is_plain or content is None else self._value(name, content)
                for content in contents
            ]
        return columns

    def unpack(self, value: memoryview, names: Collection[str]) -> dict[str, Any]:
        """Return copies of the requested columns of a record.

        Damage never raises. A record shorter than its fixed columns returns no columns. A variable column that
        ends beyond the record is left out, with all after it; text that is not UTF-8 is None.
        """
        if len(value) < self._fixed.size:
            return {}
        numbers = zip(self._fixed_names, self._fixed.unpack_from(value), strict=True)
        row: dict[str, Any] = {
            name: number for name, number in numbers if name in names
        }
        start = self._fixed.size
        for name in self._variable_names:
            if start + _LENGTH.size > len(value):
                break
            (length,) = _LENGTH.unpack_from(value, start)
            start += _LENGTH.size
            if length == _NONE:
                continue
            end = start + length
            if end > len(value):
                break
            if name in names:
                content = bytes(value[start:end])
                row[name] = self._value(name, content)
            start = end
        return row

    def _value(self, name: str, content: bytes) -> Any:
        if (array := self._arrays[name]) is None:
            return content if self.types[name] == "binary" else as_text(content)
        dtype, shape = array
        if len(content) != dtype.itemsize * math.prod(shape):
            return None
        return np.frombuffer(content, dtype).reshape(shape)


def _array_bytes(
    name: str, value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> bytes:
    try:
        array = exactly(value)
        if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise StoreError(
                f"column {name!r} must be {dtype} {shape}, got {array.dtype} {array.shape}"
            )
        return exactly(array, dtype).tobytes()
    except ValueError as error:
        raise StoreError(
            f"column {name!r} must be {dtype} {shape}, got {error}"
        ) from None


class Fingerprint:
    """Hash of a store's contents: its columns, its classes, and every record in order."""

    def __init__(
        self, types: Mapping[str, str], classes: Collection[str] | None
    ) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.add(
            json.dumps(
                [list(types.items()), None if classes is None else list(classes)]
            ).encode()
        )

    def add(self, record: bytes) -> None:
        # The length is hashed first, so that bytes moved from one record to the next change the hash.
        self._hash.update(len(record).to_bytes(8, "little"))
        self._hash.update(record)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Metadata:
    """Metadata that raypipe's writers add to a file: the number of samples, and facts about all samples.

    {"version": 1, "count": …, "columns": [{"name": …, "type": …}, …], "classes": […] or null, "fingerprint": …}
    """

    count: int
    types: dict[str, str]
    classes: tuple[str, ...] | None
    fingerprint: str

    def to_json(self) -> bytes:
        content = {
            "version": RECORD_VERSION,
            "count": self.count,
            "columns": [
                {"name": name, "type": kind} for name, kind in self.types.items()
            ],
            "classes": self.classes,
            "fingerprint": self.fingerprint,
        }
        return json.dumps(content).encode()

    @staticmethod
    def from_json(text: bytes, where: str) -> Metadata:
        """Parse JSON; raise StoreError, which begins with `where`, if it is damaged or has another version."""
        try:
            content = json.loads(text)
            if content["version"] != RECORD_VERSION:
                raise StoreError(
                    f"version {content['version']}; this raypipe reads version {RECORD_VERSION}"
                )
            types = {
                str(column["name"]): str(column["type"])
                for column in content["columns"]
            }
            check_column_types(types)
            classes = content["classes"]
            if classes is not None:
                classes = _one_of_equals(tuple(map(str, classes)))
            fingerprint = str(content["fingerprint"])
            return Metadata(int(content["count"]), types, classes, fingerprint)
        except (*DAMAGE, StoreError) as error:
            raise StoreError(f"{where}: {error!s:.500}") from error


@functools.cache
def _one_of_equals(classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return equal names as one object, so that a pickled store of many shards contains them only once."""
    return classes
