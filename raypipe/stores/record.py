"""What raypipe's own files hold, samples as records and a note of the whole file, and the base of their writers.

A record is one sample as one value, which files store and writers fingerprint:

    | fixed columns, 8 bytes each, little-endian | for each variable column: uint32 length | bytes |

Columns keep the order in which they were declared, the fixed ones (int64, float64) going before the
variable ones (binary, string). A length of 0xFFFFFFFF says None.
"""

from __future__ import annotations

import hashlib
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from raypipe.errors import StoreError

COLUMN_TYPES = ("int64", "float64", "binary", "string")
DEFAULT_COLUMNS = {"image": "binary", "label": "int64"}

NAME = "__raypipe__"
"""The key of what the writer of an LMDB file notes in it."""
VERSION = 1

# What parsing damage raises: OverflowError for a count of 1e999, RecursionError for a thousand brackets.
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, StoreError)

_FIXED_CODES = {"int64": "q", "float64": "d"}
_LENGTH = struct.Struct("<I")
_NONE = 0xFFFFFFFF


def check_column_types(types: Mapping[str, str]) -> None:
    """Raise StoreError unless every column type is one of `COLUMN_TYPES` and image, label are usable."""
    for name, kind in types.items():
        if kind not in COLUMN_TYPES:
            raise StoreError(f"column {name!r} has type {kind!r}; types are: {', '.join(COLUMN_TYPES)}")
    for name, kind in DEFAULT_COLUMNS.items():
        if types.get(name, kind) != kind:
            raise StoreError(f"column {name!r} has type {types[name]!r}; it must be {kind}")


class RecordLayout:
    """Packs samples into records and back.

    Args:
        types: all columns, name → one of `COLUMN_TYPES`, in order.
    """

    def __init__(self, types: Mapping[str, str]) -> None:
        check_column_types(types)
        self.types = dict(types)
        self._fixed_names = [name for name, kind in types.items() if kind in _FIXED_CODES]
        self._variable_names = [name for name, kind in types.items() if kind not in _FIXED_CODES]
        self._fixed = struct.Struct("<" + "".join(_FIXED_CODES[types[name]] for name in self._fixed_names))

    def pack(self, sample: Mapping[str, Any]) -> bytes:
        """Return the record of a sample.

        Raises:
            StoreError: a column is missing, undeclared, or of another type than declared.
        """
        if sample.keys() != self.types.keys():
            raise StoreError(f"a sample has the columns {sorted(sample)}, but {sorted(self.types)} were declared")
        try:
            parts = [self._fixed.pack(*(sample[name] for name in self._fixed_names))]
        except struct.error as error:
            values = {name: sample[name] for name in self._fixed_names}
            raise StoreError(f"a sample's numbers do not fit their columns: {values}: {error}") from error
        for name in self._variable_names:
            value = sample[name]
            if value is None:
                parts.append(_LENGTH.pack(_NONE))
                continue
            if not isinstance(value, str if self.types[name] == "string" else bytes | bytearray | memoryview):
                raise StoreError(f"column {name!r} is {self.types[name]}, not {type(value).__name__}")
            encoded = value.encode() if isinstance(value, str) else bytes(value)
            if len(encoded) >= _NONE:
                raise StoreError(f"column {name!r} holds {len(encoded)} bytes; the limit is {_NONE - 1}")
            parts += (_LENGTH.pack(len(encoded)), encoded)
        return b"".join(parts)

    def unpack(self, value: memoryview, wanted: Collection[str]) -> dict[str, Any]:
        """Return the wanted columns of a record, copied out of it.

        Damage never raises. A record shorter than its fixed columns has no columns at all; a variable
        column that ends beyond the record, or is no UTF-8, is None, and so are those after it.
        """
        row: dict[str, Any] = {}
        if len(value) < self._fixed.size:
            return row
        if self._fixed_names:
            numbers = zip(self._fixed_names, self._fixed.unpack_from(value), strict=True)
            row.update((name, number) for name, number in numbers if name in wanted)
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
            if name in wanted:
                content = bytes(value[start:end])
                row[name] = content if self.types[name] == "binary" else _text(content)
            start = end
        return row


def _text(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


class Fingerprint:
    """Hash of a store's contents: its columns, its classes, and every record in order."""

    def __init__(self, types: Mapping[str, str], classes: Collection[str] | None) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.add(json.dumps([list(types.items()), None if classes is None else list(classes)]).encode())

    def add(self, record: bytes) -> None:
        # The length goes in first: otherwise moving bytes from one record to the next would not show.
        self._hash.update(len(record).to_bytes(8, "little"))
        self._hash.update(record)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Metadata:
    """What raypipe's writers note in a file of theirs.

    {"version": 1, "count": …, "columns": [{"name": …, "type": …}, …], "classes": […] or null, "fingerprint": …}

    Attributes:
        count: samples in it.
        types: column → its type, in order.
        classes: names, position = label; None where there are none.
        fingerprint: of its samples.
    """

    count: int
    types: dict[str, str]
    classes: tuple[str, ...] | None
    fingerprint: str

    def to_json(self) -> bytes:
        content = {
            "version": VERSION,
            "count": self.count,
            "columns": [{"name": name, "type": kind} for name, kind in self.types.items()],
            "classes": self.classes,
            "fingerprint": self.fingerprint,
        }
        return json.dumps(content).encode()

    @staticmethod
    def from_json(text: bytes, where: str) -> Metadata:
        """Raises StoreError, which begins with `where`, when the text is damaged or of another version."""
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                raise StoreError(f"version {content['version']}; this raypipe reads version {VERSION}")
            count = int(content["count"])
            types = {str(column["name"]): str(column["type"]) for column in content["columns"]}
            check_column_types(types)
            classes = content["classes"]
            names = None if classes is None else tuple(str(name) for name in classes)
            return Metadata(count, types, names, str(content["fingerprint"]))
        except _DAMAGE as error:
            raise StoreError(f"{where}: {error!s:.500}") from error


class FileWriter(ABC):
    """Writes one new file, sample after sample.

    A writer is a context manager. Leaving it normally finishes the file; leaving it by an exception removes it.
    Writers write where they are told: that a store is whole or not there is up to `raypipe.stores.destination`.

    Args:
        path: the file to make; it must not exist.
        columns: all columns, name → one of `COLUMN_TYPES`, in order; None for `image` and `label` alone.
        classes: class names, position = label; None where there are none.
    """

    failures: ClassVar[tuple[type[Exception], ...]]
    """What is raised where a file cannot be written."""

    def __init__(
        self,
        path: str | Path,
        columns: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._path = Path(path)
        self._layout = RecordLayout(DEFAULT_COLUMNS if columns is None else columns)
        self._classes = None if classes is None else tuple(classes)
        self._fingerprint = Fingerprint(self._layout.types, self._classes)

    @property
    def fingerprint(self) -> str:
        """Of what has been written so far."""
        return self._fingerprint.hexdigest()

    def __enter__(self) -> Self:
        try:
            self._path.open("xb").close()
            try:
                self._begin()
            except BaseException:
                self._path.unlink()
                raise
        except self.failures as error:
            raise StoreError(f"{self._path} cannot be made: {error}") from error
        return self

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add one sample with exactly the declared columns; None is allowed in binary and string ones."""
        record = self._layout.pack(sample)
        self._fingerprint.add(record)
        try:
            self._add(sample, record)
        except self.failures as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error

    def __exit__(self, *exc: object) -> None:
        finished = False
        try:
            if exc[0] is None:
                self._finish()
                finished = True
        except self.failures as error:
            raise StoreError(f"{self._path} cannot be written: {error}") from error
        finally:
            self._close()
            if not finished:
                self._path.unlink(missing_ok=True)

    @abstractmethod
    def _begin(self) -> None:
        """Open the file, which is there and empty."""

    @abstractmethod
    def _add(self, sample: Mapping[str, Any], record: bytes) -> None: ...

    @abstractmethod
    def _finish(self) -> None:
        """Put all on the disk."""

    @abstractmethod
    def _close(self) -> None:
        """Close the file, finished or not."""
