"""Types of a stream's columns, found on its driver: by the schemas of its stores, and by values where these cannot
tell, as in JSON, in results of a function, and in numbers that are written as text or bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.config import ColumnOptions
from raypipe.errors import ConfigError, SampleError
from raypipe.stores.arrow_values import array_of, array_type, is_bytes, is_list, is_text
from raypipe.stores.base import RENAMED, Store, is_class, missing, name_of, title_of
from raypipe.stores.joined import JoinedStore
from raypipe.stores.nested import column_in
from raypipe.stores.numbers import InexactError, exactly
from raypipe.transform.columns import (
    CLASS,
    ColumnMaker,
    ColumnType,
    MakeColumns,
    SampleColumns,
    column_numbers,
    is_npy,
    length_name,
    rank,
)
from raypipe.transform.fields import IMAGE, LABEL
from raypipe.transform.process_state import process_kept

logger = logging.getLogger(__name__)

NUM_PROBED = 16  # samples that tell a column's type, if one of them has a value
_NUM_AT_ONCE = 1024  # samples that are read at a time in search of a value
_JSON = pa.json_()
_NPY = {"stored": "npy"}  # metadata of a field whose numbers are stored as .npy


@process_kept()
def find_columns(
    stores: Mapping[Any, Store],
    declared: Mapping[str, ColumnOptions],
    function: MakeColumns | str | None,
    first: Callable[[Any], np.ndarray],
    label: bool = True,
) -> SampleColumns:
    """The columns of a stream.

    Args:
        stores: by split.
        declared: columns, with their options; the target as `label`. Where a function makes columns, it gets those
            that the store has, and options may be of those that it makes.
        function: see `SampleColumns`.
        first: indices of a split's first samples, int64 (n,), to learn the types by.
        label: the stores' label is the target; else there is none, unless the function makes one.

    Raises:
        ConfigError: a column, or the target, is missing; or its type is not to be told, or differs between stores.
        StoreError: a store cannot be read.
    """
    if LABEL in declared and not label:
        raise ConfigError(
            "store.columns names 'label', the target, and target_column is '': leave one of them out"
        )
    by_store = [
        (part_store.address, _of_store(part_store, declared, function, indices, label))
        for split, store in stores.items()
        for part_store, indices in _parts(store, first(split))
    ]
    with_types = [
        (address, columns)
        for address, columns in by_store
        if columns.types or not columns
    ]
    # a store without samples has columns without types
    (address, columns), *other_stores = with_types or by_store
    for other_address, of_other in other_stores:
        for name in {*columns.types, *of_other.types}:
            kind, other_kind = (
                of.types.get(name) or "not there" for of in (columns, of_other)
            )
            if kind != other_kind:
                raise ConfigError(
                    f"column {name!r} is {kind} in {address}, and {other_kind} in {other_address}: a column has "
                    f"one type; declare store.columns.{name}.dtype, or fix one of the stores"
                )
    return columns


def _parts(store: Store, indices: np.ndarray) -> list[tuple[Store, np.ndarray]]:
    """The stores that a mixture joins, each with its first samples; another store is its own part."""
    if isinstance(store, JoinedStore):
        return [
            (part_store, np.arange(min(NUM_PROBED, len(part_store))))
            for part_store in store.parts.values()
        ]
    return [(store, indices[:NUM_PROBED])]


def _of_store(
    store: Store,
    declared: Mapping[str, ColumnOptions],
    function: MakeColumns | str | None,
    indices: np.ndarray,
    label: bool,
) -> SampleColumns:
    options = {
        name: options
        for name, options in declared.items()
        if options != ColumnOptions()
    }
    paths = _paths_in(store, declared, function, label)
    reads_class = label and LABEL not in paths
    if reads_class and function is None:
        _check_label(store)
    columns = SampleColumns(paths, options, function, reads_class=reads_class)
    if not paths and function is not None:
        raise ConfigError(
            "transform.make_columns makes columns of columns: name those that it needs in store.columns "
            f"({store.address} has {', '.join(store.schema.names)})"
        )
    if not paths or not len(indices):
        return columns  # a store without samples has no types, and none to give
    types: dict[str, ColumnType] = {}
    for name, kind in types_in(store, columns, indices).items():
        types[name] = _target_type(store, name, kind, options)
        if kind.is_padded:
            types[length_name(name)] = CLASS
    reads_class = reads_class and LABEL not in types
    if reads_class:
        _check_label(store)
    return replace(columns, types=types, reads_class=reads_class)


def _paths_in(
    store: Store,
    declared: Mapping[str, ColumnOptions],
    function: MakeColumns | str | None,
    label: bool,
) -> dict[str, tuple[str, ...]]:
    """Return the path of each column to read; a column that is a class is read as the store's label."""
    names = dict.fromkeys(declared)
    if label and not is_class(store):
        names[LABEL] = None
    paths: dict[str, tuple[str, ...]] = {}
    for name in names:
        path = _path_of(store, name)
        if path is not None:
            paths[name] = path
        elif function is None and name != LABEL:
            raise ConfigError(
                missing(store.address, name, store.schema.names, "store.columns")
            )
        if path is not None and path[0] == IMAGE:
            raise ConfigError(
                f"store.columns names {name!r}: every batch has images, so leave it out"
            )
    return paths


def _target_type(
    store: Store, name: str, kind: ColumnType, options: Mapping[str, ColumnOptions]
) -> ColumnType:
    """Return a column's type, which for an integer target is a class of any width."""
    if name != LABEL:
        return kind
    if kind.kind != "array":
        raise ConfigError(
            f"column {name!r} of {store.address} is the target, and is {kind}: targets are numbers, or lists of "
            "one length; declare store.columns={label: {length: …}}, or name another store.target_column"
        )
    is_integer = np.dtype(kind.dtype).kind in "iu"
    return CLASS if is_integer and not kind.shape and name not in options else kind


def types_in(
    store: Store, columns: SampleColumns, indices: np.ndarray
) -> dict[str, ColumnType]:
    """Return the types of a batch's columns.

    Args:
        columns: without types yet.
        indices: the store's first samples, int64 (n,), at least one.

    Raises:
        ConfigError: the type of a column is not to be told, or is not what its options need.
    """
    fields = {
        name: pa.field(name, _as_read(store.schema.field(path[0]).type))
        for name, path in columns.paths.items()
        if len(path) == 1
        and columns.function is None
        and _tells_type(store.schema.field(path[0]).type, columns.options.get(name))
    }
    if len(fields) < len(columns.paths):
        unknown = {
            name: path for name, path in columns.paths.items() if name not in fields
        }
        schema = schema_of_values(store, replace(columns, paths=unknown), indices)
        fields |= {field.name: field for field in schema}
    if missing_names := [name for name in columns.options if name not in fields]:
        raise ConfigError(
            f"store.columns has options of {missing_names[0]!r}, and transform.make_columns makes "
            f"{', '.join(fields)}: make it too, or leave its options out"
        )
    in_order = [*columns.paths, *fields]
    types: dict[str, ColumnType] = {}
    for name in dict.fromkeys(name for name in in_order if name in fields):
        where = f"column {name!r} of {store.address}"
        types[name] = type_of_field(fields[name], columns.options.get(name), where)
        length = length_name(name)
        if types[name].is_padded and length in fields:
            raise ConfigError(
                f"column {length!r} has the name that the lengths of a padded column have: rename it"
            )
    return types


def _as_read(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column's values as they are read: lists of different lengths hold Python's numbers."""
    numbers = array_of(kind.value_type) if is_list(kind) else None
    if numbers is None or array_of(kind) is not None:
        return kind
    of_element, shape = numbers
    if pa.types.is_integer(of_element):
        return pa.list_(array_type(np.int64, shape))
    return pa.list_(
        array_type(np.float64, shape)
        if pa.types.is_floating(of_element)
        else kind.value_type
    )


def _tells_type(kind: pa.DataType, options: ColumnOptions | None) -> bool:
    """Return whether a type of Arrow tells that of a column: not whether text or bytes hold numbers, nor whether
    lists of lists have one length."""
    if pa.types.is_null(kind):
        return False
    if array_of(kind) is not None:
        return True
    if is_list(kind):
        return not is_list(kind.value_type) or array_of(kind.value_type) is not None
    return options is None


def schema_of_values(
    store: Store, columns: SampleColumns, indices: np.ndarray
) -> pa.Schema:
    """Return the schema of a batch's columns, by their values in the first samples.

    A column of whose first values none has a number or text has the type of its first later value that has.
    """
    maker = ColumnMaker(columns)
    values: dict[str, list[Any]] = {}
    reasons: list[str] = []
    unknown: set[str] = set()
    for number, rows in enumerate(_rows(store, indices)):
        if number == 2:
            logger.warning(
                "%s: the first %d samples have no value in %s, and a value tells its type: the search continues, "
                "up to sample %d. Numbers and lists that the store's schema describes need none",
                *(store.address, rows[0], ", ".join(sorted(unknown)), len(store)),
            )
        for sample in _samples(store, columns, maker, rows, reasons):
            for name, value in sample.items():
                if number == 0 or (name in unknown and not _is_empty(value)):
                    values.setdefault(name, []).append(value)
        if not values:
            raise ConfigError(
                f"none of the first {len(rows)} samples has columns; {reasons[-1]}"
            )
        unknown = {
            name for name, column in values.items() if all(map(_is_empty, column))
        }
        if not unknown:
            break
    return pa.schema(
        [
            field_of_values(
                name,
                column,
                columns.options.get(name),
                columns.function is not None,
                f"column {name!r} of {store.address}",
            )
            for name, column in values.items()
        ]
    )


def _rows(store: Store, indices: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the first samples, then those after them, many at a time."""
    yield indices
    for first in range(int(indices.max()) + 1, len(store), _NUM_AT_ONCE):
        yield np.arange(first, min(first + _NUM_AT_ONCE, len(store)))


def _samples(
    store: Store,
    columns: SampleColumns,
    maker: ColumnMaker,
    indices: np.ndarray,
    reasons: list[str],
) -> Iterator[dict[str, Any]]:
    """Yield the columns of samples, unchecked; the reason for one that has none is added to `reasons`."""
    read = store.read(indices, columns.stored)
    stored = {name: read[name] for name in columns.stored}
    for row, index in enumerate(indices.tolist()):
        sample = {name: values[row] for name, values in stored.items()}
        try:
            yield maker.unchecked(sample, (index, 0))
        except SampleError as error:
            title = title_of(store.address, index, name_of(store, index))
            reasons.append(f"{title}: {error}")


def _is_empty(value: Any) -> bool:
    """Return whether a value is none, or a list without elements, and so tells no type."""
    if isinstance(value, str | bytes):
        return value.strip() in ("[]", b"[]")
    return value is None or (
        isinstance(value, list | tuple | np.ndarray) and not len(value)
    )


def _check_label(store: Store) -> None:
    if LABEL not in store.schema.names:
        raise ConfigError(
            f"{missing(store.address, LABEL, store.schema.names, RENAMED[LABEL])}; set it to one of them, or to "
            "'' for batches without a target"
        )


def _path_of(store: Store, name: str) -> tuple[str, ...] | None:
    """A column, or a field within the values of one, `json.caption`; None = there is none."""
    column = column_in(store.schema.names, name)
    if column is None:
        return None
    fields = name[len(column) + 1 :]
    return (column, *fields.split(".")) if fields else (column,)


def field_of_values(
    name: str,
    values: Sequence[Any],
    options: ColumnOptions | None,
    fixed: bool,
    where: str,
) -> pa.Field:
    """Return the field of a column, by some of its values.

    Args:
        fixed: arrays have one shape, and are not lists of different lengths.
        where: name of the column, for errors.

    Raises:
        ConfigError: there are no values, or values of several kinds.
    """
    present = [value for value in values if value is not None]
    if not present:
        raise ConfigError(
            f"{where} has no value in any of the first {len(values)} samples: fix the store"
        )
    if options is None:
        for kind, python in ((pa.string(), str), (pa.binary(), bytes)):
            if all(isinstance(value, python) for value in present):
                return pa.field(name, kind)
        if len(set(map(_family, present))) > 1:
            names = ", ".join(sorted({type(value).__name__ for value in present}))
            raise ConfigError(
                f"{where} has values of several types, {names}: fix the store"
            )
    has_npy = any(map(is_npy, present))
    if has_npy:  # the first bytes of others are damaged
        present = [
            value for value in present if is_npy(value) or not isinstance(value, bytes)
        ]
    arrays, problem = _numbers_in(name, present, options)
    if options is None and problem:
        return pa.field(name, _JSON)
    if not arrays:
        raise ConfigError(f"{where}: {problem}")
    is_array = fixed and all(isinstance(value, np.ndarray) for value in present)
    kind = _type_of_arrays(arrays, options, is_array, where)
    return pa.field(name, kind, metadata=_NPY if has_npy else None)


def _numbers_in(
    name: str, values: Sequence[Any], options: ColumnOptions | None
) -> tuple[list[np.ndarray], str]:
    """Return the numbers of values that have such, and why another has none."""
    arrays = []
    problem = ""
    for value in values:
        try:
            arrays.append(column_numbers(name, value, options))
        except SampleError as error:
            problem = str(error)
    return arrays, problem


def _type_of_arrays(
    arrays: list[np.ndarray], options: ColumnOptions | None, is_array: bool, where: str
) -> pa.DataType:
    filled = [array for array in arrays if array.size] or arrays
    dtype = np.result_type(*filled)
    if options and options.dtype:
        declared = np.dtype(options.dtype)
        fits = any(rank(array.dtype) <= rank(declared) for array in filled)
        dtype = declared if fits else filled[0].dtype
    shapes = {array.shape for array in filled}
    if len(set(map(len, shapes))) > 1:
        raise ConfigError(
            f"{where} has numbers of several shapes, {sorted(shapes)}: fix the store"
        )
    if len(shapes) == 1 and (is_array or () in shapes):
        return array_type(dtype, shapes.pop())
    inner = {shape[1:] for shape in shapes}
    if len(inner) > 1:
        return _JSON
    return pa.list_(array_type(dtype, inner.pop()))


def type_of_field(
    field: pa.Field, options: ColumnOptions | None, where: str
) -> ColumnType:
    """Return the type of a column in batches.

    Args:
        field: its type in the store.
        where: name of the column, for errors.

    Raises:
        ConfigError: its options do not fit.
    """
    kind = field.type
    numbers = array_of(kind)
    has_list = numbers is None and is_list(kind)
    if has_list:
        numbers = array_of(kind.value_type)
    if numbers is None:
        if options and options.length:
            raise _no_length(where, kind)
        if is_text(kind):
            return ColumnType("text")
        return ColumnType("bytes" if is_bytes(kind) else "json")
    stored, shape = numbers
    dtype = np.dtype(stored.to_pandas_dtype())
    if options and options.dtype:
        declared = np.dtype(options.dtype)
        if rank(dtype) > rank(declared):
            raise ConfigError(
                f"{where} has {dtype}, and store.columns.{field.name}.dtype is {declared}: give another"
            )
        dtype = declared
    npy = field.metadata is not None and b"stored" in field.metadata
    if options and options.length:
        if not has_list and not shape:
            raise _no_length(where, kind)
        fill = options.fill or 0
        if not _can_hold(dtype, fill):
            raise ConfigError(
                f"store.columns.{field.name}.fill is {options.fill}, which {dtype} cannot hold: set its dtype"
            )
        inner = shape if has_list else shape[1:]
        is_padded = options.fill is not None
        length = (options.length, *inner)
        return ColumnType("array", dtype.name, length, fill, is_padded, is_npy=npy)
    return ColumnType("ragged" if has_list else "array", dtype.name, shape, is_npy=npy)


def _no_length(where: str, kind: pa.DataType) -> ConfigError:
    return ConfigError(f"{where} is declared with a length, but its values are {kind}")


def _can_hold(dtype: np.dtype[Any], number: float) -> bool:
    is_whole = dtype.kind != "f" and number % 1 == 0
    try:
        exactly(int(number) if is_whole else float(number), dtype)
    except (InexactError, OverflowError):
        return False
    return True


def _family(value: Any) -> str:
    if isinstance(value, bool | int | float | np.generic):
        return "number"
    if isinstance(value, list | tuple | np.ndarray):
        return "list"
    return type(value).__name__
