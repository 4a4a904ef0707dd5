"""Fields within the values of a column: structs or JSON, such as `json.caption`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def path_in(present: Collection[str], name: str) -> tuple[str, ...] | None:
    """Return the column that a name stands for, and the fields within its values, as in json.caption."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        column = ".".join(parts[:end])
        if column in present:
            return column, *parts[end:]
    return None


def field_at(value: Any, path: Sequence[str]) -> Any:
    """Return the field at a path in a value of structs or JSON; None if it is not there.

    Raises:
        ValueError: a text is not JSON.
    """
    for name in path:
        if isinstance(value, str | bytes):
            try:
                value = json.loads(value)
            except RecursionError as error:
                raise ValueError(str(error)) from None
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
