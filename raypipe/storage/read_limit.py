"""Limits in bytes: the memory that one read may take, whatever size the file declares, and limits in variables.

A file of a few bytes can declare, or unpack to, gigabytes. A reader calls `check_read` with the size of what it is
about to read at once, before it allocates memory: a row group, a record, a shard, a chunk.
"""

from __future__ import annotations

from raypipe.environment import variable
from raypipe.errors import ConfigError, StoreError

DEFAULT_BYTES = 1 << 29
"""The limit unless RAYPIPE_READ_BYTES is set. Images hardly compress, so a read may also take `GROWTH` times its
stored bytes, up to `MOST_GROWN_BYTES`."""

GROWTH = 3
MOST_GROWN_BYTES = 4 << 30

_VARIABLE = "RAYPIPE_READ_BYTES"


def check_read(
    where: str, num_bytes: int, stored_bytes: int = 0, remedy: str = ""
) -> None:
    """Raise StoreError if a read takes more memory than the limit.

    Args:
        where: the file, and the place in it, for the error.
        num_bytes: bytes in memory.
        stored_bytes: bytes in the file.
        remedy: how to write the file instead.
    """
    limit = read_limit(stored_bytes)
    if num_bytes > limit:
        instead = f"{remedy}, or " if remedy else ""
        raise StoreError(
            f"{where} would unpack to {num_bytes:,} bytes; the limit is {limit:,}: {instead}raise {_VARIABLE} on "
            "every node if you trust the file"
        )


def read_limit(stored_bytes: int = 0) -> int:
    """Return the most bytes that a read may take, of such a size in its file."""
    limit = byte_limit(_VARIABLE)
    least = DEFAULT_BYTES if limit is None else limit
    return max(least, min(GROWTH * stored_bytes, MOST_GROWN_BYTES))


def byte_limit(name: str) -> int | None:
    """Return a variable that is a number of bytes; None if it is not set; raise ConfigError if it is none."""
    text = variable(name)
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name} must be a whole number of bytes, got {text!r}")
    return int(text)
