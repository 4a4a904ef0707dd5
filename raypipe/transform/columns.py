"""Columns of a sample beside its image, its mask and its boxes: from what stores hold to what batches have.

    a store's value                         declared               in a batch of B
    number                                                         (B,), of its dtype
    array, of a shape that all have                                (B, …), of its dtype
    list of numbers                                                list of B tensors, on the host
                                            length: 8              (B, 8); a sample with fewer or more is bad
                                            length: 8, fill: 0     (B, 8), padded; NAME_length, int64 (B,)
    text, bytes                                                    list of B, on the host
    struct, list of texts, JSON                                    list of B, as JSON has them
    numbers as JSON, raw bytes or .npy      dtype, maybe length    as numbers are

What a stream's columns are is found once, on its driver, by the first samples of its stores: see
`raypipe.transform.column_types`. Who makes micro-batches only checks that samples are so: `ColumnMaker`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raypipe.config import ColumnOptions
from raypipe.errors import ConfigError, SampleError
from raypipe.lookup import import_name
from raypipe.plan.order import Domain
from raypipe.stores.numbers import NPY, InexactError, exactly, read_npy
from raypipe.transform.fields import COLUMN, LABEL, Field, Kind
from raypipe.transform.process_state import seed_process
from raypipe.transform.sample_transform import Key, KeyedGenerator, rng_parameter
from raypipe.transform.user_code import NOT_OF_A_SAMPLE, failed

MakeColumns = Callable[..., Mapping[str, Any]]
"""Columns of one sample, by name → those of the batch; it may take `rng`, a generator by the sample's key."""

_NUMBERS = "biuf"  # numpy's kinds


@dataclass(frozen=True)
class ColumnType:
    """What a column holds.

    Attributes:
        kind: "array" (numbers of one shape), "ragged" (of any length), "text", "bytes", or "json".
        dtype: of numbers, numpy's name.
        shape: of a sample's array; of a ragged one, that of its elements.
        is_npy: the store has the numbers as .npy; bytes of any other form are damaged.
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_npy: bool = False

    def __str__(self) -> str:
        if self.is_npy:
            return f"{replace(self, is_npy=False)} in .npy"
        if self.kind == "array":
            return f"{self.dtype} {self.shape}" if self.shape else self.dtype
        return f"lists of {self.dtype}" if self.kind == "ragged" else self.kind


CLASS = ColumnType("array", "int64")


@dataclass(frozen=True)
class SampleColumns:
    """The columns of a stream: a plain value that pickles.

    Attributes:
        paths: of each column that is read, the store's column, and the fields within its values.
        options: of those that were declared with options.
        function: makes the batch's columns of those; None, or `module:function`.
        types: of each of the batch's columns, by name; `label` is the target.
        reads_class: the store's label is read beside them, a class; else the target is among them, or there is
            none, and labels are 0.
    """

    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    options: dict[str, ColumnOptions] = field(default_factory=dict)
    function: MakeColumns | str | None = None
    types: dict[str, ColumnType] = field(default_factory=dict)
    reads_class: bool = True

    def __bool__(self) -> bool:
        return bool(self.paths)

    @property
    def stored(self) -> tuple[str, ...]:
        """The store's columns that are read."""
        return tuple(dict.fromkeys(path[0] for path in self.paths.values()))

    @property
    def has_target(self) -> bool:
        """Whether batches have a target."""
        return self.reads_class or LABEL in self.types

    @property
    def target(self) -> ColumnType | None:
        """What the target is; None = classes, int64."""
        found = self.types.get(LABEL)
        return None if found == CLASS else found

    def fields(self) -> dict[str, Field]:
        """The columns and the target as fields, see `raypipe.transform.fields`."""
        found = {LABEL: Field(dtype="int64", shape=())}
        for name, kind in self.types.items():
            options = self.options.get(name)
            fill = (options.fill or 0) if options else 0
            found[field_name(name)] = Field(kind.kind, kind.dtype, kind.shape, fill)
        return found

    def described(self) -> dict[str, str]:
        """In words, by name."""
        return {name: str(kind) for name, kind in self.types.items()}


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
        lengths = {length_name(name) for name, each in columns.options.items() if each.fill is not None}
        self._names = [name for name in columns.types if name not in lengths]
        function = columns.function
        if isinstance(function, str):
            function = import_name(function, "transform.make_columns")
        self._function: MakeColumns | None = function
        self._keyed = KeyedGenerator(Domain.COLUMNS)
        self._rng_name = rng_parameter(function) if function else None
        self.draws_globally = function is not None and self._rng_name is None

    def one(self, values: Mapping[str, Any], key: Key) -> dict[str, Any]:
        """The columns of one sample, by their fields: numpy arrays, of text and the like bytes.

        Args:
            values: of the store's columns, by name.
            key: of the sample.

        Raises:
            SampleError: a value is missing, or is of another type or length than those of the first samples.
        """
        given = self.given(values, key)
        made: dict[str, Any] = {}
        for name in self._names:
            made |= {field_name(each): value for each, value in self._typed(name, given.get(name)).items()}
        return made

    def given(self, values: Mapping[str, Any], key: Key) -> dict[str, Any]:
        """What the store, or the function, gives for each of the batch's columns, not checked yet."""
        found = {name: _field(values, path) for name, path in self.columns.paths.items()}
        if self._function is None:
            return found
        more = {}
        generator = self._keyed.rewind(key)
        if self._rng_name:
            more[self._rng_name] = generator
        else:
            seed_process(*generator.integers(1 << 64, size=2, dtype=np.uint64).tolist())
        try:
            made = self._function(dict(found), **more)
        except NOT_OF_A_SAMPLE:
            raise
        except Exception as error:
            raise failed("transform.make_columns", error) from error
        if not isinstance(made, Mapping):
            raise ConfigError(
                f"transform.make_columns returned a {type(made).__name__}: it must return a dict of the batch's "
                "columns"
            )
        label = {LABEL: found[LABEL]} if LABEL in found else {}
        return label | {str(name): _as_numpy(value) for name, value in made.items()}

    def _typed(self, name: str, value: Any) -> dict[str, Any]:
        kind, options = self.columns.types[name], self.columns.options.get(name)
        if value is None:
            raise SampleError(f"column {name!r} has no value: fill it in, or leave the sample out")
        if kind.kind == "json":
            return {name: as_json(value)}
        if kind.kind in ("text", "bytes"):
            expected = str if kind.kind == "text" else bytes
            if not isinstance(value, expected):
                raise SampleError(_varies(name, f"a {type(value).__name__}", kind))
            return {name: value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value}
        if kind.is_npy and isinstance(value, bytes) and not is_npy(value):
            raise SampleError(f"column {name!r} does not begin as a .npy, as in the first samples: mend it")
        array = numbers_of(name, value, options)
        if options and options.fill is not None:
            return self._padded(name, array, kind, options.fill)
        shape = array.shape[1:] if kind.kind == "ragged" else array.shape
        if kind.kind == "ragged" and not array.size:
            array, shape = np.empty((0, *kind.shape), kind.dtype), kind.shape
        if shape != kind.shape or (kind.kind == "ragged" and not array.ndim):
            raise SampleError(
                f"{_varies(name, f'of shape {array.shape}', kind)}, or declare "
                f"store.columns={{{name}: {{length: …, fill: …}}}} for lists of several lengths"
            )
        return {name: _cast(name, array, kind)}

    def _padded(self, name: str, array: np.ndarray, kind: ColumnType, fill: float) -> dict[str, Any]:
        length = kind.shape[0]
        if not array.size:
            array = np.empty((0, *kind.shape[1:]), kind.dtype)
        if array.shape[1:] != kind.shape[1:] or not array.ndim:
            raise SampleError(_varies(name, f"of shape {array.shape}", kind))
        if len(array) > length:
            raise SampleError(
                f"column {name!r} has {len(array)} values, and its declared length is {length}: raise "
                f"store.columns.{name}.length, or leave the sample out"
            )
        padded = np.full(kind.shape, fill, kind.dtype)
        padded[: len(array)] = _cast(name, array, kind)
        return {name: padded, length_name(name): np.int64(len(array))}


def length_name(name: str) -> str:
    """The column that tells how long the lists of a padded one are."""
    return f"{name}_length"


def _field(held: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """What is at a path: a column's value, or a field of the structs or the JSON that it is."""
    value = held[path[0]]
    for name in path[1:]:
        if isinstance(value, str | bytes):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise SampleError(f"column {path[0]!r} is no JSON: {error}") from error
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def numbers_of(name: str, value: Any, options: ColumnOptions | None = None) -> np.ndarray:
    """Numbers of a column: as they are, or written as JSON, as the bytes of an array, or as .npy.

    Raises:
        SampleError: they are none, or their array would hold others.
    """
    try:
        if isinstance(value, str):
            value = json.loads(value)
        elif is_npy(value):
            value = read_npy(value)
        elif isinstance(value, bytes) and options and options.dtype:
            value = np.frombuffer(value, np.dtype(options.dtype).newbyteorder("<"))
        elif isinstance(value, bytes):
            value = json.loads(value)
        array = exactly(value)
    except InexactError as error:
        raise SampleError(f"column {name!r} has {error}") from None
    except (ValueError, TypeError, OverflowError, RecursionError, SampleError) as error:
        raise SampleError(f"column {name!r} holds no numbers: {error}") from error
    if array.dtype.kind not in _NUMBERS:
        raise SampleError(f"column {name!r} holds {_kind_of(value)}, and no numbers")
    return array


def is_npy(value: Any) -> bool:
    """Whether a value is the bytes of an array of numpy's, by its first ones."""
    return isinstance(value, bytes) and value.startswith(NPY)


def _cast(name: str, array: np.ndarray, kind: ColumnType) -> np.ndarray:
    """In the column's dtype; whole numbers keep their values."""
    dtype = np.dtype(kind.dtype)
    if array.size and _NUMBERS.index(_unsigned(array.dtype)) > _NUMBERS.index(_unsigned(dtype)):
        raise SampleError(_varies(name, str(array.dtype), kind))
    try:
        return exactly(array, dtype)
    except InexactError as error:
        raise SampleError(f"column {name!r} has {error}: declare a wider dtype") from None


def _unsigned(dtype: np.dtype[Any]) -> str:
    return dtype.kind.replace("u", "i")


def _varies(name: str, found: str, kind: ColumnType) -> str:
    return f"column {name!r} is {found}, where it is {kind} in the first samples: mend it, or leave the sample out"


def _kind_of(value: Any) -> str:
    return f"a {type(value).__name__}"


def _as_numpy(value: Any) -> Any:
    """What a function made: tensors as arrays."""
    return np.asarray(value) if hasattr(value, "__array__") and not isinstance(value, np.generic) else value


def as_json(value: Any) -> bytes:
    """Any value, in UTF-8; what JSON has no form for, such as a date, as text."""

    def plain(part: Any) -> Any:
        return part.tolist() if hasattr(part, "tolist") else str(part)

    return json.dumps(value, default=plain, ensure_ascii=False).encode("utf-8", "surrogatepass")
