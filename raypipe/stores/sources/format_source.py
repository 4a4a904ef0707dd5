"""The samples of a format, its files, and the names of its columns: the code that sources share."""

from __future__ import annotations

import contextlib
import io
from collections.abc import (
    Collection,
    Iterator,
)
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

from raypipe.errors import ConfigError, RaypipeError, StoreError
from raypipe.packages import to_install
from raypipe.storage.files import open_input, read_json
from raypipe.storage.filesystem import join_address, open_filesystem
from raypipe.storage.retries import error_reason
from raypipe.stores.base import RENAMED, ColumnValues

MAX_CHUNK_BYTES = 32 << 20
"""Bytes of rows that are read at a time."""

NUM_PROBED = 64
"""Samples that show what the columns of a format are."""

INDEX = "index.json"

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """The samples of another format, which are read once, in their order.

    Attributes:
        samples: mappings from columns to values, see `raypipe.convert`.
        classes: class names, position = label; None if the format does not name them.
        num_samples: how many there are; None = unknown before the end.
        arrays: columns whose values are arrays of one shape.
    """

    samples: Iterator[ColumnValues]
    classes: tuple[str, ...] | None = None
    num_samples: int | None = None
    arrays: Collection[str] = ()

    def closing(self, stack: contextlib.ExitStack) -> Source:
        """Return the same, which closes its files at the end."""

        def samples() -> Iterator[ColumnValues]:
            with stack:
                yield from self.samples

        return replace(self, samples=samples())


class Asked(NamedTuple):
    """Which columns of a format become `image` and `label`.

    Attributes:
        image: its name in the format; "image" = the usual names.
        label: the same; "label" = the usual names, or no labels; empty = no labels.
    """

    image: str = "image"
    label: str = "label"


def library(name: str, format_name: str) -> Any:
    """Import a library; raise StoreError that names the extra if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        raise StoreError(
            f"{format_name} needs {name.replace('_', '-')}: {to_install('sources')}"
        ) from None


@contextlib.contextmanager
def opened(address: str) -> Iterator[io.BufferedReader]:
    """Context manager: a regular file, or an object, open for reading and seeking."""
    with explained(address), open_input(*open_filesystem(address)) as file:
        yield io.BufferedReader(file, _READ_BYTES)  # type: ignore[arg-type]  # it has what a raw file has


@contextlib.contextmanager
def explained(where: str) -> Iterator[None]:
    """Context manager: turn an error of a library, which may have any type, into StoreError."""
    try:
        yield
    except (RaypipeError, KeyboardInterrupt, GeneratorExit):
        raise
    except Exception as error:
        raise StoreError(
            f"{where} cannot be read: {type(error).__name__}: {error_reason(error)}; copy it again"
        ) from error


def index_at(folder: str) -> Any:
    """Return the index of a folder of shards."""
    try:
        return read_json(join_address(folder, INDEX))
    except ConfigError as error:
        raise StoreError(f"{error}; copy it again") from None


def size_of(file: io.BufferedReader) -> int:
    """Return a file's size; its position is its start."""
    num_bytes = file.seek(0, io.SEEK_END)
    file.seek(0)
    return num_bytes


def check_unasked(kind: str, asked: Asked) -> None:
    """Raise ConfigError if columns are asked for in a format whose columns have no other names."""
    for column, name in asked._asdict().items():
        if name not in (column, ""):
            raise ConfigError(
                f"store.{RENAMED[column]}={name!r}: {kind} has no columns of other names: leave it out"
            )
