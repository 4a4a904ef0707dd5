"""Types of a stream's columns, found on its driver: by the schemas of its stores, and by values where these cannot
tell, as in JSON, in results of a function, and in numbers that are written as text or bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.config import ColumnOptions
from raypipe.errors import ConfigError, SampleError
from raypipe.stores.arrow_values import array_of, is_bytes, is_list, is_text
from raypipe.stores.base import RENAMED, Store, is_class, missing, name_of, title_of
from raypipe.stores.joined import JoinedStore
from raypipe.stores.nested import path_in
from raypipe.stores.numbers import InexactError, exactly, is_npy
from raypipe.transform.columns import (
    CLASS,
    ColumnFunction,
    ColumnMaker,
    ColumnPath,
    ColumnType,
    ColumnTypes,
    SampleColumns,
    column_numbers,
    length_name,
    rank,
)
from raypipe.transform.fields import IMAGE, LABEL
from raypipe.transform.process_state import process_kept

Options = Mapping[str, ColumnOptions]
"""By the names of columns."""

NUM_PROBED = 16  # samples that tell a column's type, if one of them has a value
# Dtypes of numbers in lists of different lengths, which are read as Python's.
_IN_LISTS = {"i": "int64", "u": "int64", "f": "float64", "b": "bool"}
_KINDS = {
    "number": bool | int | float | np.generic,
    "list": list | tuple | np.ndarray,
    "text": str,
    "bytes": bytes,
}


@process_kept()
def find_columns(
    stores: Mapping[Any, Store],
    declared: Options,
    function: ColumnFunction,
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
    by_store = list[tuple[str, SampleColumns]]()
    for split, store in stores.items():
        parts = [(store, first(split)[:NUM_PROBED])]
        if isinstance(store, JoinedStore):
            parts = [
                (part, np.arange(min(NUM_PROBED, len(part))))
                for part in store.parts.values()
            ]
        for part, indices in parts:
            columns = _of_store(part, declared, function, indices, label)
            by_store.append((part.address, columns))
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


def _of_store(
    store: Store,
    declared: Options,
    function: ColumnFunction,
    indices: np.ndarray,
    label: bool,
) -> SampleColumns:
    options = {
        name: options
        for name, options in declared.items()
        if options != ColumnOptions()
    }
    paths = _paths_in(store, declared, function, label)
    columns = SampleColumns(paths, options, function)
    if not paths and function is not None:
        raise ConfigError(
            "transform.make_columns makes columns of columns: name those that it needs in store.columns "
            f"({store.address} has {', '.join(store.schema.names)})"
        )
    types: ColumnTypes = {}
    if paths and len(indices):  # a store without samples has no types, and none to give
        for name, kind in types_in(store, columns, indices).items():
            types[name] = _target_type(store, name, kind, options)
            if kind.is_padded:
                types[length_name(name)] = CLASS
    reads_class = label and LABEL not in {*paths, *types}
    may_lack = function is not None and not types
    if reads_class and not may_lack and LABEL not in store.schema.names:
        raise ConfigError(
            f"{missing(store.address, LABEL, store.schema.names, RENAMED[LABEL])}; set it to one of them, or to "
            "'' for batches without a target"
        )
    return replace(columns, types=types, reads_class=reads_class)


def _paths_in(
    store: Store,
    declared: Options,
    function: ColumnFunction,
    label: bool,
) -> dict[str, ColumnPath]:
    """Return the path of each column to read; a column that is a class is read as the store's label."""
    names = dict.fromkeys(declared)
    if label and not is_class(store):
        names[LABEL] = None
    paths: dict[str, ColumnPath] = {}
    for name in names:
        path = path_in(store.schema.names, name)
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
    store: Store, name: str, kind: ColumnType, options: Options
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


def types_in(store: Store, columns: SampleColumns, indices: np.ndarray) -> ColumnTypes:
    """Return the types of a batch's columns.

    Args:
        columns: without types yet.
        indices: the store's first samples, int64 (n,), at least one.

    Raises:
        ConfigError: the type of a column is not to be told, or is not what its options need.
    """
    found: ColumnTypes = {}
    for name, path in columns.paths.items():
        if len(path) == 1 and columns.function is None:
            stored = store.schema.field(path[0]).type
            if kind := type_by_schema(stored, columns.options.get(name)):
                found[name] = kind
    unknown = {name: path for name, path in columns.paths.items() if name not in found}
    if unknown:
        found |= _types_by_values(store, replace(columns, paths=unknown), indices)
    if missing_names := [name for name in columns.options if name not in found]:
        raise ConfigError(
            f"store.columns has options of {missing_names[0]!r}, and transform.make_columns makes "
            f"{', '.join(found)}: make it too, or leave its options out"
        )
    types: ColumnTypes = {}
    for name in dict.fromkeys([*columns.paths, *found]):
        if name in found:
            options = columns.options.get(name)
            types[name] = as_declared(name, found[name], options, store.address)
            if types[name].is_padded and length_name(name) in found:
                raise ConfigError(
                    f"column {length_name(name)!r} has the name that the lengths of a padded column have: rename "
                    "it"
                )
    return types


def type_by_schema(
    kind: pa.DataType, options: ColumnOptions | None
) -> ColumnType | None:
    """Return the type of a column in a store's schema; None if only values tell it.

    They do of numbers that text and bytes hold, and of lists of lists, which may have one length.
    """
    if numbers := array_of(kind):
        of_number, shape = numbers
        return ColumnType("array", np.dtype(of_number.to_pandas_dtype()).name, shape)
    if is_list(kind):
        if numbers := array_of(kind.value_type):
            of_number, shape = numbers
            kind_of_number = np.dtype(of_number.to_pandas_dtype()).kind
            return ColumnType("ragged", _IN_LISTS[kind_of_number], shape)
        return None if is_list(kind.value_type) else ColumnType("json")
    if options is not None or pa.types.is_null(kind):
        return None
    if is_text(kind):
        return ColumnType("text")
    return ColumnType("bytes" if is_bytes(kind) else "json")


def _types_by_values(
    store: Store, columns: SampleColumns, indices: np.ndarray
) -> ColumnTypes:
    """Return the types of a batch's columns, by their values in the first samples that are not bad."""
    maker = ColumnMaker(columns)
    read = store.read(indices, columns.stored)
    stored = {name: read[name] for name in columns.stored}
    values: dict[str, list[Any]] = {}
    problem = ""
    for row, index in enumerate(indices.tolist()):
        sample = {name: column[row] for name, column in stored.items()}
        try:
            made = maker.unchecked(sample, (index, 0))
        except SampleError as error:
            title = title_of(store.address, index, name_of(store, index))
            problem = f"{title}: {error}"
            continue
        for name, value in made.items():
            values.setdefault(name, []).append(value)
    if problem and not values:
        raise ConfigError(
            f"none of the {len(indices)} samples that tell types has columns; {problem}"
        )
    types: ColumnTypes = {}
    for name, column in values.items():
        where = f"column {name!r} of {store.address}"
        options = columns.options.get(name)
        present = [value for value in column if value is not None]
        is_fixed = columns.function is not None
        types[name] = type_by_values(name, present, options, is_fixed, where)
    return types


def _untold(name: str, where: str) -> ConfigError:
    """Return the error of a column whose type no value tells."""
    return ConfigError(
        f"{where} has no value in the first samples, which would tell its type: write [] for no numbers and "
        f"declare store.columns={{{name}: {{dtype: float32}}}}; or write it as numbers, lists or text to Parquet, "
        "whose schema has the type; or leave it out"
    )


def type_by_values(
    name: str,
    values: Sequence[Any],
    options: ColumnOptions | None,
    is_fixed: bool,
    where: str,
) -> ColumnType:
    """Return the type of a column, by some of its values, without None.

    Args:
        is_fixed: arrays have one shape, and are not lists of different lengths.
        where: name of the column, for errors.

    Raises:
        ConfigError: there are values of several kinds, or no numbers where they are declared; or none tells it.
    """
    if not values:
        raise _untold(name, where)
    if options is None:
        kinds = {_kind_of(value) for value in values}
        if len(kinds) > 1:
            names = ", ".join(sorted({type(value).__name__ for value in values}))
            raise ConfigError(
                f"{where} has values of several types, {names}: fix the store"
            )
        (kind,) = kinds
        if kind in ("text", "bytes"):
            return ColumnType(kind)
    arrays: list[np.ndarray] = []
    problem = ""
    has_npy = any(map(is_npy, values))
    for value in values:
        if has_npy and isinstance(value, bytes) and not is_npy(value):
            continue  # its first bytes are damaged
        try:
            arrays.append(column_numbers(name, value, options))
        except SampleError as error:
            problem = str(error)
    if options is None and problem:
        return ColumnType("json")
    if not arrays:
        raise ConfigError(f"{where}: {problem}")
    declared = options.dtype if options else ""
    has_arrays = any(isinstance(value, np.ndarray) for value in values)
    if not (declared or has_arrays or any(array.size for array in arrays)):
        raise _untold(name, where)
    is_array = is_fixed and all(isinstance(value, np.ndarray) for value in values)
    kind = _type_of_numbers(arrays, declared, is_array, where)
    if kind.kind == "json":
        return kind
    return replace(kind, is_npy=has_npy)


def _type_of_numbers(
    arrays: Sequence[np.ndarray], declared: str, is_array: bool, where: str
) -> ColumnType:
    """Return the type of a column of numbers.

    Args:
        declared: its dtype; empty = by the numbers.
        is_array: arrays of one shape are no lists.
    """
    told = [array for array in arrays if array.size] or arrays
    dtype = np.result_type(*told)
    if declared:
        # damaged values of some columns may be floats
        dtypes = [array.dtype for array in arrays if array.size]
        dtype = min(dtypes, key=rank, default=np.dtype(declared))
    shapes = sorted({array.shape for array in told})
    if len(set(map(len, shapes))) > 1:
        raise ConfigError(
            f"{where} has numbers of several shapes, {shapes}: fix the store"
        )
    if shapes == [()] or (is_array and len(shapes) == 1):
        return ColumnType("array", dtype.name, shapes[0])
    inner = {shape[1:] for shape in shapes}
    if len(inner) > 1:
        return ColumnType("json")
    return ColumnType("ragged", dtype.name, inner.pop())


def as_declared(
    name: str, kind: ColumnType, options: ColumnOptions | None, where: str
) -> ColumnType:
    """Return the type that a column of a store has in batches; raise ConfigError if its options do not fit."""
    if options is None:
        return kind
    where = f"column {name!r} of {where}"
    has_length = kind.kind == "ragged" or bool(kind.shape)
    if options.length and not has_length:
        raise ConfigError(
            f"{where} is declared with a length, but its values are {kind}"
        )
    if kind.kind not in ("array", "ragged"):
        return kind
    dtype = np.dtype(options.dtype or kind.dtype)
    if rank(np.dtype(kind.dtype)) > rank(dtype):
        raise ConfigError(
            f"{where} has {kind.dtype}, and store.columns.{name}.dtype is {dtype}: give another"
        )
    if not options.length:
        return replace(kind, dtype=dtype.name)
    fill = options.fill or 0
    is_whole = dtype.kind != "f" and fill % 1 == 0
    try:
        exactly(int(fill) if is_whole else float(fill), dtype)
    except (InexactError, OverflowError):
        raise ConfigError(
            f"store.columns.{name}.fill is {options.fill}, which {dtype} cannot hold: set its dtype"
        ) from None
    inner = (kind.shape or ())[kind.kind == "array" :]
    return ColumnType(
        "array",
        dtype.name,
        (options.length, *inner),
        fill,
        is_padded=options.fill is not None,
        is_npy=kind.is_npy,
    )


def _kind_of(value: Any) -> Any:
    kinds = (kind for kind, types in _KINDS.items() if isinstance(value, types))
    return next(kinds, type(value).__name__)
