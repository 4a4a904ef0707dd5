"""Types of a stream's columns, found on its driver from the first samples of its stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raypipe.config import ColumnOptions
from raypipe.errors import ConfigError, SampleError
from raypipe.stores.base import RENAMED, Store, is_class, missing, name_of, title_of
from raypipe.stores.joined import JoinedStore
from raypipe.transform.columns import (
    CLASS,
    ColumnMaker,
    ColumnType,
    MakeColumns,
    SampleColumns,
    is_npy,
    length_name,
    numbers_of,
    rank,
)
from raypipe.transform.fields import IMAGE, LABEL
from raypipe.transform.process_state import process_kept

NUM_PROBED = 16  # samples that tell a column's type, if one of them has a value
_NUM_AT_ONCE = 1024  # samples that are read at a time in search of a value


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
        (part.address, _of_store(part, declared, function, indices, label))
        for split, store in stores.items()
        for part, indices in _parts(store, first(split))
    ]
    known = [
        (address, columns)
        for address, columns in by_store
        if columns.types or not columns
    ]
    # a store without samples has columns without types
    (address, columns), *others = known or by_store
    for other, of_other in others:
        for name in {*columns.types, *of_other.types}:
            kind, other_kind = (
                of.types.get(name) or "not there" for of in (columns, of_other)
            )
            if kind != other_kind:
                raise ConfigError(
                    f"column {name!r} is {kind} in {address}, and {other_kind} in {other}: a column has one type; "
                    f"declare store.columns.{name}.dtype, or fix one of the stores"
                )
    return columns


def _parts(store: Store, indices: np.ndarray) -> list[tuple[Store, np.ndarray]]:
    """The stores that a mixture joins, each with its first samples; another store is its own part."""
    if isinstance(store, JoinedStore):
        return [
            (part, np.arange(min(NUM_PROBED, len(part))))
            for part in store.parts.values()
        ]
    return [(store, indices[:NUM_PROBED])]


def _of_store(
    store: Store,
    declared: Mapping[str, ColumnOptions],
    function: MakeColumns | str | None,
    indices: np.ndarray,
    label: bool,
) -> SampleColumns:
    options = {name: own for name, own in declared.items() if own != ColumnOptions()}
    wanted = dict.fromkeys(
        [*declared, *([LABEL] if label and not is_class(store) else [])]
    )
    paths = {name: path for name in wanted if (path := _path_of(store, name))}
    for name in wanted:
        if name not in paths and function is None and name != LABEL:
            raise ConfigError(
                missing(store.address, name, store.columns, "store.columns")
            )
        if paths.get(name, ("",))[0] == IMAGE:
            raise ConfigError(
                f"store.columns names {name!r}: every batch has images, so leave it out"
            )
    reads_class = label and LABEL not in paths
    if reads_class and function is None:
        _check_label(store)
    columns = SampleColumns(paths, options, function, reads_class=reads_class)
    if not paths:
        if function is not None:
            raise ConfigError(
                "transform.make_columns makes columns of columns: name those that it needs in store.columns "
                f"({store.address} has {', '.join(store.columns)})"
            )
        return columns
    if not len(indices):
        return columns  # a store without samples has no types, and none to give
    read = store.read(indices, columns.stored)
    fixed = {
        name
        for name, path in paths.items()
        if len(path) == 1 and isinstance(read[path[0]], np.ndarray)
    }
    maker = ColumnMaker(columns)
    values = dict[str, list[Any]]()
    reason = ""
    for index, *row in zip(
        indices.tolist(), *(read[name] for name in columns.stored), strict=True
    ):
        try:
            unchecked = maker.unchecked(
                dict(zip(columns.stored, row, strict=True)), (index, 0)
            )
        except SampleError as error:
            reason = f"{title_of(store.address, index, name_of(store, index))}: {error}"
            continue
        for name, value in unchecked.items():
            values.setdefault(name, []).append(value)
    if not values:
        raise ConfigError(
            f"none of the first {len(indices)} samples has columns; {reason}"
        )
    _add_later(store, columns, maker, values, int(indices.max()) + 1)
    if unknown := [name for name in options if name not in values]:
        raise ConfigError(
            f"store.columns has options of {unknown[0]!r}, and transform.make_columns makes {', '.join(values)}: "
            "make it too, or leave its options out"
        )
    types: dict[str, ColumnType] = {}
    for name, of_column in values.items():
        where = f"column {name!r} of {store.address}"
        kind = type_of(
            name,
            of_column,
            options.get(name),
            name in fixed or function is not None,
            where,
        )
        if name == LABEL and kind.kind != "array":
            raise ConfigError(
                f"{where} is the target, and is {kind}: targets are numbers, or lists of one length; declare "
                "store.columns={label: {length: …}}, or name another store.target_column"
            )
        if (
            name == LABEL
            and name not in options
            and not kind.shape
            and np.dtype(kind.dtype).kind in "iu"
        ):
            kind = CLASS  # any width
        types[name] = kind
        if kind.is_padded:
            types[length := length_name(name)] = CLASS
            if length in values:
                raise ConfigError(
                    f"column {length!r} has the name that the lengths of a padded column have: rename it"
                )
    if reads_class and LABEL not in types:
        _check_label(store)
    return replace(columns, types=types, reads_class=reads_class and LABEL not in types)


def _add_later(
    store: Store,
    columns: SampleColumns,
    maker: ColumnMaker,
    values: dict[str, list[Any]],
    start: int,
) -> None:
    """Add to columns without a number or text in their values the first later value that has one, for the type.
    If none has, the values become empty arrays of the type in the store's schema."""
    unknown = {
        name
        for name, of_column in values.items()
        if all(map(_tells_nothing, of_column))
    }
    for first in range(start, len(store) if unknown else 0, _NUM_AT_ONCE):
        indices = np.arange(first, min(first + _NUM_AT_ONCE, len(store)))
        read = store.read(indices, columns.stored)
        for index, *row in zip(
            indices.tolist(), *(read[name] for name in columns.stored), strict=True
        ):
            try:
                unchecked = maker.unchecked(
                    dict(zip(columns.stored, row, strict=True)), (index, 0)
                )
            except SampleError:
                continue
            for name in [
                name for name in unknown if not _tells_nothing(unchecked.get(name))
            ]:
                values[name].append(unchecked[name])
                unknown.remove(name)
        if not unknown:
            return
    element_type = getattr(store, "element_type", lambda name: None)
    for name in unknown:
        path = columns.paths.get(name, ())
        if len(path) == 1 and columns.function is None:
            kind = element_type(path[0])
        else:
            kind = None
        if kind is not None:  # an empty list by itself is float64
            values[name] = [
                None if value is None else np.empty(0, kind) for value in values[name]
            ]


def _tells_nothing(value: Any) -> bool:
    """Return whether a value is none, or a list without elements."""
    if isinstance(value, str | bytes):
        return value.strip() in ("[]", b"[]")
    return value is None or (
        isinstance(value, list | tuple | np.ndarray) and not len(value)
    )


def _check_label(store: Store) -> None:
    if LABEL not in store.columns:
        raise ConfigError(
            f"{missing(store.address, LABEL, store.columns, RENAMED[LABEL])}; set it to one of them, or to '' for "
            "batches without a target"
        )


def _path_of(store: Store, name: str) -> tuple[str, ...] | None:
    """A column, or a field within the values of one, `json.caption`; None = there is none."""
    if name in store.columns:
        return (name,)
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (column := ".".join(parts[:end])) in store.columns:
            return column, *parts[end:]
    return None


def type_of(
    name: str,
    values: Sequence[Any],
    options: ColumnOptions | None,
    fixed: bool,
    where: str,
) -> ColumnType:
    """Find the type of a column from some of its values.

    Args:
        fixed: arrays have one shape, and are not lists of different lengths.
        where: name of the column, for errors.

    Raises:
        ConfigError: there are no values, or values of several kinds.
    """
    values, num = [value for value in values if value is not None], len(values)
    if not values:
        raise ConfigError(
            f"{where} has no value in any of the first {num} samples: fix the store"
        )
    if options is None:
        for kind, python in (("text", str), ("bytes", bytes)):
            if all(isinstance(value, python) for value in values):
                return ColumnType(kind)  # type: ignore[arg-type]
        if len({_family(value) for value in values}) > 1:
            names = ", ".join(sorted({type(value).__name__ for value in values}))
            raise ConfigError(
                f"{where} has values of several types, {names}: fix the store"
            )
    arrays = []
    problem = ""
    npy = any(map(is_npy, values))
    for value in values:
        try:
            if is_npy(value) or not (
                npy and isinstance(value, bytes)
            ):  # the first bytes of others are damaged
                arrays.append(numbers_of(name, value, options))
        except SampleError as error:
            problem = str(error)
    if options is None and problem:
        return ColumnType("json")
    if not arrays:
        raise ConfigError(f"{where}: {problem}")
    filled = [array for array in arrays if array.size] or arrays
    if options and options.dtype:
        dtype = np.dtype(options.dtype)
    else:
        dtype = np.result_type(*filled)
    if (
        options
        and options.dtype
        and all(rank(array.dtype) > rank(dtype) for array in filled)
    ):
        raise ConfigError(
            f"{where} has {filled[0].dtype}, and store.columns.{name}.dtype is {dtype}: give another"
        )
    shapes = {array.shape for array in filled}
    if len({len(shape) for shape in shapes}) > 1:
        raise ConfigError(
            f"{where} has numbers of several shapes, {sorted(shapes)}: fix the store"
        )
    if options and options.length:
        inner = {shape[1:] for shape in shapes}
        if () in shapes or len(inner) > 1:
            raise ConfigError(
                f"{where} is declared with a length, but its first samples have shapes {sorted(shapes)}"
            )
        if not _can_hold(dtype, options.fill or 0):
            raise ConfigError(
                f"store.columns.{name}.fill is {options.fill}, which {dtype} cannot hold: set its dtype"
            )
        shape = (options.length, *inner.pop())
        return ColumnType(
            "array",
            dtype.name,
            shape,
            options.fill or 0,
            options.fill is not None,
            is_npy=npy,
        )
    if shapes == {()}:
        return ColumnType("array", dtype.name, is_npy=npy)
    if (
        fixed
        and len(shapes) == 1
        and all(isinstance(value, np.ndarray) for value in values)
    ):
        return ColumnType("array", dtype.name, shapes.pop())
    inner = {shape[1:] for shape in shapes}
    if len(inner) > 1:
        return ColumnType("json")
    return ColumnType("ragged", dtype.name, inner.pop(), is_npy=npy)


def _can_hold(dtype: np.dtype[Any], number: float) -> bool:
    if dtype.kind == "f":
        return not np.isfinite(number) or bool(abs(number) <= np.finfo(dtype).max)
    least, most = (
        (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    )
    return least <= number <= most and number == int(number)


def _family(value: Any) -> str:
    if isinstance(value, bool | int | float | np.generic):
        return "number"
    if isinstance(value, list | tuple | np.ndarray):
        return "list"
    return type(value).__name__
