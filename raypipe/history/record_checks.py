"""Checks of what a run's folder says: it may be damaged, or come from a stranger."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from raypipe.errors import DAMAGE, ConfigError, RaypipeError
from raypipe.section import shown
from raypipe.storage.files import read_whole

T = TypeVar("T")
MAX_NUMBER = 1 << 62
"""Numbers of samples, steps and ranks in a record are below it."""
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
    except DAMAGE as error:
        text = f"{type(error).__name__}: {error}"[:_MAX_TEXT]
        raise ConfigError(
            f"{where} is damaged, or raypipe did not write it ({text}): restore the file from a copy"
        ) from error


def read_lines(address: str, made_of: Callable[[Any], T]) -> list[T]:
    """Return what a function makes of each value in a file of JSON lines; empty where there is none."""
    with damage_told(address):
        lines = (read_whole(address) or b"").splitlines()
        return [made_of(json.loads(line)) for line in lines]


def whole_number(value: Any, name: str, least: int = 0) -> int:
    """Return a whole number of a record; raise ValueError for anything else."""
    if type(value) is not int or not least <= value < MAX_NUMBER:
        raise ValueError(f"{name} must be a number from {least} on, got {shown(value)}")
    return value
