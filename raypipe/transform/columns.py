"""Columns of a sample besides image and targets: from stored values to batches.

    a store's value                         declared               in a batch of B
    number                                                         (B,), of its dtype
    array, of a shape that all have                                (B, …), of its dtype
    list of numbers                                                list of B tensors, on the host
                                            length: 8              (B, 8); a sample with fewer or more is bad
                                            length: 8, fill: 0     (B, 8), padded; NAME_length, int64 (B,)
    text, bytes                                                    list of B, on the host
    struct, list of texts, JSON                                    list of B, as JSON has them
    numbers as JSON, raw bytes or .npy      dtype, maybe length    as numbers are

The driver finds the types of a stream's columns once, from the first samples of its stores: see
`raypipe.transform.column_types`. `ColumnMaker` only checks that samples have these types.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raypipe.config import ColumnOptions
from raypipe.errors import ConfigError, SampleError
from raypipe.importing import import_name
from raypipe.plan.order import Domain
from raypipe.stores.base import ColumnValues
from raypipe.stores.nested import field_at
from raypipe.stores.numbers import InexactError, exactly, is_npy, stored_numbers
from raypipe.transform.fields import COLUMN, LABEL, Field, SampleFields, Shape
from raypipe.transform.keys import Key, KeyedGenerator
from raypipe.transform.process_state import drawn, seed_process
from raypipe.transform.user_code import failing, rng_parameter

MakeColumns = Callable[..., ColumnValues]
"""Columns of one sample, by name → those of the batch; it may take `rng`, a generator by the sample's key."""

ColumnFunction = MakeColumns | str | None
"""The same, or its `module:function`; None = no function."""
ColumnPath = tuple[str, ...]
"""A store's column, and fields within its values."""

_NUMBERS = "biuf"  # numpy's kinds


@dataclass(frozen=True)
class ColumnType(Field):
    """Type of a column: its field, with a known shape.

    Attributes:
        is_npy: the store has numbers as .npy; other bytes are damaged.
    """

    shape: Shape = ()
    is_npy: bool = False

    def __str__(self) -> str:
        if self.is_npy:
            return f"{replace(self, is_npy=False)} in .npy"
        if self.kind == "array":
            if self.shape:
                return f"{self.dtype} {self.shape}"
            return self.dtype
        if self.kind == "ragged":
            return f"lists of {self.dtype}"
        return self.kind


ColumnTypes = dict[str, ColumnType]
"""By the names of columns."""
CLASS = ColumnType("array", "int64")


@dataclass(frozen=True)
class SampleColumns:
    """The columns of a stream: a plain value that pickles.

    Attributes:
        paths: path of each column to read: the store's column, and fields within its values.
        options: options of the columns declared with them.
        function: `module:function` that makes the batch's columns from these; None = no function.
        types: type of each of the batch's columns, by name; `label` is the target.
        reads_class: whether the store's label, a class, is also read; else the target is one of the columns, or
            there is none, and labels are 0.
    """

    paths: dict[str, ColumnPath] = field(default_factory=dict)
    options: dict[str, ColumnOptions] = field(default_factory=dict)
    function: ColumnFunction = None
    types: ColumnTypes = field(default_factory=dict)
    reads_class: bool = True

    def __bool__(self) -> bool:
        return bool(self.paths)

    @property
    def stored(self) -> tuple[str, ...]:
        """The store's columns that are read."""
        return tuple(dict.fromkeys(path[0] for path in self.paths.values()))

    @property
    def has_target(self) -> bool:
        """True if batches have a target."""
        return self.reads_class or LABEL in self.types

    @property
    def target(self) -> ColumnType | None:
        """Type of the target; None = classes, int64."""
        target = self.types.get(LABEL)
        return None if target == CLASS else target

    def fields(self) -> dict[str, Field]:
        """The columns and the target as fields, see `raypipe.transform.fields`."""
        return {
            LABEL: CLASS,
            **{field_name(name): column for name, column in self.types.items()},
        }

    def described(self) -> dict[str, str]:
        """Describe the types of the columns in words, by name."""
        return {name: str(column) for name, column in self.types.items()}


NO_COLUMNS = SampleColumns()


def field_name(column: str) -> str:
    """The field that a column is: the target is `label`."""
    return LABEL if column == LABEL else f"{COLUMN}.{column}"


class ColumnMaker:
    """Makes the columns of samples. An object serves one thread at a time.

    Attributes:
        draws_globally: the function may draw from the generators of the process.
    """

    def __init__(self, columns: SampleColumns) -> None:
        self.columns = columns
        lengths = {
            length_name(name)
            for name, column in columns.types.items()
            if column.is_padded
        }
        self._names = [name for name in columns.types if name not in lengths]
        function = columns.function
        if isinstance(function, str):
            function = import_name(function, "transform.make_columns", trusted=True)
        self._function: MakeColumns | None = function
        self._keyed = KeyedGenerator(Domain.COLUMNS)
        self._rng_name = rng_parameter(function) if function else None
        self.draws_globally = function is not None and self._rng_name is None

    def one(self, values: ColumnValues, key: Key) -> SampleFields:
        """Make the columns of one sample, by field: numpy arrays, or bytes for text and JSON.

        Args:
            values: values of the store's columns, by name.
            key: the sample's key.

        Raises:
            SampleError: a value is missing, or its type or length differs from the first samples'.
        """
        unchecked = self.unchecked(values, key)
        columns: SampleFields = {}
        for name in self._names:
            columns |= self._typed(name, unchecked.get(name))
        return {field_name(name): value for name, value in columns.items()}

    def unchecked(self, values: ColumnValues, key: Key) -> SampleFields:
        """Return the unchecked values of the batch's columns, from the store or the function."""
        stored = {
            name: _field(values, path) for name, path in self.columns.paths.items()
        }
        if self._function is None:
            return stored
        computed = drawn(lambda: self._computed(stored, key))
        return ({LABEL: stored[LABEL]} if LABEL in stored else {}) | computed

    def _computed(self, stored: ColumnValues, key: Key) -> SampleFields:
        """Call the function, which draws under a sample's key."""
        assert self._function is not None
        rng = {}
        generator = self._keyed.rewind(key)
        if self._rng_name:
            rng[self._rng_name] = generator
        else:
            seed_process(*generator.integers(1 << 64, size=2, dtype=np.uint64).tolist())
        with failing("transform.make_columns"):
            # it may write into a list
            columns = self._function(copy.deepcopy(stored), **rng)
            if not isinstance(columns, Mapping):
                raise ConfigError(
                    f"transform.make_columns returned a {type(columns).__name__}: it must return a dict of the "
                    "batch's columns"
                )
            return {str(name): _as_numpy(value) for name, value in columns.items()}

    def _typed(self, name: str, value: Any) -> SampleFields:
        column = self.columns.types[name]
        if value is None:
            raise SampleError(
                f"column {name!r} has no value: fill it in, or leave the sample out"
            )
        if column.kind == "json":
            return {name: _as_json(name, value)}
        if column.kind in ("text", "bytes"):
            return {name: _as_bytes(name, value, column)}
        if column.is_npy and isinstance(value, bytes) and not is_npy(value):
            raise SampleError(
                f"column {name!r} does not begin as a .npy, as in the first samples: fix it"
            )
        array = column_numbers(name, value, self.columns.options.get(name))
        is_list = column.kind == "ragged" or column.is_padded
        of_element = column.shape[column.is_padded :]
        if is_list and not array.size:
            array = np.empty((0, *of_element), column.dtype)
        if array.shape[is_list:] != of_element or array.ndim < is_list:
            hint = f", or declare store.columns={{{name}: {{length: …, fill: …}}}} for lists of several lengths"
            varies = _varies(name, f"of shape {array.shape}", column)
            raise SampleError(varies if column.is_padded else varies + hint)
        typed: SampleFields = {name: _cast(name, array, column)}
        if column.is_padded:
            length = column.shape[0]
            if len(array) > length:
                raise SampleError(
                    f"column {name!r} has {len(array)} values, and its declared length is {length}: raise "
                    f"store.columns.{name}.length, or leave the sample out"
                )
            typed[length_name(name)] = np.int64(len(array))
        return typed


def _as_bytes(name: str, value: Any, column: ColumnType) -> bytes:
    """The bytes of a text, or of bytes; raises SampleError for a value of another type."""
    if not isinstance(value, str if column.kind == "text" else bytes):
        raise SampleError(_varies(name, f"a {type(value).__name__}", column))
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return value


def length_name(name: str) -> str:
    """Return the name of the column with the lengths of a padded one."""
    return f"{name}_length"


def _field(values: ColumnValues, path: ColumnPath) -> Any:
    """Return the value at a path: a column's, or a field of its structs or JSON."""
    try:
        return field_at(values[path[0]], path[1:])
    except ValueError as error:
        raise SampleError(f"column {path[0]!r} is no JSON: {error}") from error


def column_numbers(
    name: str, value: Any, options: ColumnOptions | None = None
) -> np.ndarray:
    """Numbers of a column: as they are, or written as JSON, as the bytes of an array, or as .npy.

    Raises:
        SampleError: they are none, or their array would hold others.
    """
    try:
        return stored_numbers(value, options.dtype if options else "")
    except InexactError as error:
        raise SampleError(f"column {name!r} has {error}") from None
    except (ValueError, TypeError, OverflowError, RecursionError, SampleError) as error:
        raise SampleError(f"column {name!r} holds no numbers: {error}") from error


def _cast(name: str, array: np.ndarray, column: ColumnType) -> np.ndarray:
    """Return values in the column's dtype; whole numbers keep their values."""
    dtype = np.dtype(column.dtype)
    if array.size and rank(array.dtype) > rank(dtype):
        raise SampleError(_varies(name, str(array.dtype), column))
    try:
        return exactly(array, dtype)
    except InexactError as error:
        raise SampleError(
            f"column {name!r} has {error}: declare a wider dtype"
        ) from None


def rank(dtype: np.dtype[Any]) -> int:
    """Return the place of a dtype's kind: bools fit integers, and these fit floats, but not the other way."""
    return _NUMBERS.index(dtype.kind.replace("u", "i"))


def _varies(name: str, kind: str, column: ColumnType) -> str:
    return f"column {name!r} is {kind}, where it is {column} in the first samples: mend or exclude it"


def _as_numpy(value: Any) -> Any:
    """Return a function's results, with tensors as arrays."""
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        return np.asarray(value)
    return value


def _as_json(name: str, value: Any) -> bytes:
    """Any value, in UTF-8; what JSON has no form for, such as a date, as text."""

    def plain(content: Any) -> Any:
        if hasattr(content, "tolist"):
            return content.tolist()
        text = str(content)
        if isinstance(content, set | frozenset) or hex(id(content)) in text:
            kind = type(content).__name__
            raise SampleError(
                f"column {name!r} has a {kind}, whose text differs from process to process"
            )
        return text

    return json.dumps(value, default=plain, ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
