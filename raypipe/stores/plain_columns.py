"""Samples of other sources as those of a writer: the types of their columns, and their values as plain ones."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from raypipe.errors import ConfigError, StoreError
from raypipe.stores.base import RENAMED, ColumnValues, missing
from raypipe.stores.numbers import exactly
from raypipe.stores.record import numpy_type

_INTEGERS = bool | int | np.integer | np.bool_
_FLOATS = float | np.floating
_JSON = list | dict | np.ndarray
_TIMES = datetime.date | datetime.time
_NO_JSON = (TypeError, ValueError, AttributeError)


def column_types(
    first: Mapping[str, Iterable[Any]], where: str, short_side: int = 0
) -> dict[str, str]:
    """Return the columns of a source with the types of the writers, by its first samples.

    Args:
        first: column → its first values.
        where: their origin, for errors.
        short_side: see `convert`; lists are then rejected, since they may be boxes in pixels.
    """
    if "image" not in first:
        raise StoreError(missing(where, "image", list(first), RENAMED["image"]))
    types: dict[str, str] = {}
    for name, values in first.items():
        if name == "label":
            with contextlib.suppress(ValueError):
                # vectors are an array, also where they are lists
                values = exactly(values)
        if (
            isinstance(values, np.ndarray)
            and values.ndim > 1
            and values.size
            and values.dtype.kind in "biuf"
        ):
            shape = ",".join(map(str, values.shape[1:]))
            types[name] = f"{values.dtype.name}[{shape}]"
        else:
            types[name] = _type_of(name, values, where, short_side)
    return types


def _type_of(name: str, values: Iterable[Any], where: str, short_side: int) -> str:
    """Return the type of a column by its first value that is not None; for arguments see `column_types`."""
    value = next((value for value in values if value is not None), None)
    if name == "label" and not isinstance(value, _INTEGERS | _FLOATS):
        raise StoreError(
            f"{where}: column 'label' has values of type {type(value).__name__}; labels are numbers, or "
            "arrays of one shape: number the classes"
        )
    if name == "image" or isinstance(value, bytes):
        return "binary"
    if isinstance(value, _INTEGERS | _FLOATS):
        are_floats = any(v is None or isinstance(v, _FLOATS) for v in values)
        return "float64" if are_floats else "int64"
    if value is None or isinstance(value, str | _TIMES):
        return "string"
    if not _is_json(value):
        raise StoreError(
            f"{where}: column {name!r} has values of type {type(value).__name__}; raypipe copies int, float, "
            "bytes, str and dates, and lists and dicts of int, float and str: leave it out, or convert from your "
            "own function, MODULE:NAME"
        )
    if short_side:
        raise ConfigError(
            f"{where}: column {name!r} has lists. If they are boxes in pixels, they would not fit the smaller "
            "images that --short-side makes: leave it out"
        )
    return "string"  # JSON, without loss, since writers have no type for lists


def plain(sample: ColumnValues, types: Mapping[str, str]) -> dict[str, Any]:
    """Return a sample with plain values, by the types of its columns; None as a float becomes NaN, dates text."""
    plain = dict(sample)
    for name, value in sample.items():
        kind = types.get(name, "")
        if numpy_type(kind) is not None:
            continue
        if value is None and kind == "float64" and name != "label":
            # nobody would notice a label of NaN
            plain[name] = math.nan
        if isinstance(value, bool | np.bool_):
            plain[name] = int(value)
        elif isinstance(value, _TIMES):
            plain[name] = str(value)
        elif isinstance(value, _JSON):
            try:
                plain[name] = _as_json(value)
            except _NO_JSON as error:
                raise StoreError(
                    f"column {name!r} has a value that cannot be copied as JSON: {error}"
                ) from None
    return plain


def _as_json(value: Any) -> str:
    return json.dumps(value, default=lambda array: array.tolist())


def _is_json(value: Any) -> bool:
    try:
        return isinstance(value, _JSON) and bool(_as_json(value))
    except _NO_JSON:  # bytes, dates and the like
        return False
