"""Checks of what a run's folder says: it may be damaged, or come from a stranger."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from raypipe.errors import ConfigError, RaypipeError

MAX_NUMBER = 1 << 62
"""Numbers of samples, steps and ranks in a record are below it."""
_DTYPES = (None, "float32", "float16", "bfloat16", "float64", "uint8")
_STREAM = {
    "arguments": dict,
    "stores": dict,
    "code": dict,
    "versions": dict,
    "plan": str,
    "quarantine": str,
    "device": str,
    "augment": dict | None,
    "dtype": str | None,
}
_PART = {
    "name": str,
    "address": str,
    "fingerprint": str,
    "in_groups": bool,
    "samples": int,
}
_MAX_TEXT = 200  # characters of an error about a value


@contextlib.contextmanager
def damage_told(where: str) -> Iterator[None]:
    """Context manager for reading a record: a value of the wrong kind is one error that names the file.

    Args:
        where: the file, and what of it is read.
    """
    try:
        yield
    except RaypipeError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        text = f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        raise ConfigError(
            f"{where} is damaged, or raypipe did not write it ({text}): restore the file from a copy"
        ) from error


def whole_number(value: Any, name: str, least: int = 0) -> int:
    """Return a whole number of a record; raise ValueError for anything else."""
    if type(value) is not int or not least <= value < MAX_NUMBER:
        raise ValueError(
            f"{name} must be a number from {least} on, got {_shown(value)}"
        )
    return value


def check_stream(described: Any) -> None:
    """Raise ValueError unless a start's record of its stream has the kinds of `opened.stream_record`."""
    _check("the stream", described, _STREAM)
    if described["dtype"] not in _DTYPES:
        raise ValueError(
            f"dtype must be a dtype of images, got {_shown(described['dtype'])}"
        )
    for name in ("code", "versions"):
        for key, value in described[name].items():
            _check(f"{name}.{key}", value, str | None)
    stores = described["stores"]
    if "train" not in stores or stores.keys() - {"train", "val"}:
        raise ValueError(f"stores must be of train and val, got {_shown(list(stores))}")
    for split, parts in stores.items():
        _check(f"stores.{split}", parts, list)
        if not parts:
            raise ValueError(f"stores.{split} must have a store")
        for part in parts:
            _check(f"stores.{split}", part, _PART)
            whole_number(part["samples"], f"stores.{split}: samples")


def _check(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError unless a value has a type, or a mapping's entries have their types."""
    if not isinstance(value, dict if isinstance(kind, dict) else kind):
        raise ValueError(f"{name} must be of another kind than {_shown(value)}")
    if isinstance(kind, dict):
        for key, inner in kind.items():
            _check(f"{name}: {key}", value.get(key), inner)


def _shown(value: Any) -> str:
    return repr(value)[:_MAX_TEXT]
