"""JSON and text files at a local path or a URI: read with one clear error, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow.fs

from raypipe.errors import ConfigError
from raypipe.storage.filesystem import (
    check_bucket,
    check_lasting,
    explained,
    is_remote,
    open_filesystem,
    open_input,
)

# What a scan of 14 million members takes; the longest runs' digests are a tenth of it.
_MAX_JSON_BYTES = 1 << 30


def read_json(address: str | Path) -> Any:
    """What a file of up to 1 GiB holds.

    Raises:
        ConfigError: it cannot be read, is larger, or is no JSON.
    """
    content = _read(address, _MAX_JSON_BYTES)
    try:
        return json.loads(content)
    except ValueError as error:
        raise ConfigError(f"{address} is no JSON: {error}") from error


def read_text(address: str | Path, max_bytes: int) -> str:
    """What a small file holds.

    Raises:
        ConfigError: it cannot be read, is larger than `max_bytes`, or is no UTF-8.
    """
    content = _read(address, max_bytes)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{address} is no text: {error}") from error


def _read(address: str | Path, max_bytes: int) -> bytes:
    with explained(ConfigError, f"{address} cannot be read"):
        filesystem, path = open_filesystem(address)
        with open_input(filesystem, path) as file:
            if file.size() <= max_bytes:
                return file.read()
    raise ConfigError(f"{address} cannot be read: it has more than {max_bytes:,} bytes")


def write_json(address: str | Path, content: dict[str, Any]) -> None:
    """`write_text` of an object."""
    write_text(address, json.dumps(content, indent=1))


def write_text(address: str | Path, text: str) -> None:
    """Write a file in place of one that is there; readers see the old or the new one.

    Raises:
        ConfigError: it cannot be written.
    """
    with explained(ConfigError, f"{address} cannot be written"):
        filesystem, path = open_filesystem(address)
        if is_remote(address):  # an object is there once it is written whole
            with synced_output(filesystem, path) as file:
                file.write(text.encode())
            return
        partial = Path(path).with_name(f".{Path(path).name}.partial-{secrets.token_hex(4)}")
        try:
            with synced_output(filesystem, str(partial)) as file:
                file.write(text.encode())
            partial.replace(path)
            sync_folder(filesystem, str(partial.parent))
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def synced_output(filesystem: pyarrow.fs.FileSystem, path: str) -> Iterator[IO[bytes]]:
    """A new file to write to. At the end its content is on the disk, and not in the machine's memory alone."""
    if not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        with filesystem.open_output_stream(path) as stream:
            yield stream
        return
    with Path(path).open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(filesystem: pyarrow.fs.FileSystem, path: str) -> None:
    """Put on the disk which files a folder has; object storage has done so already."""
    if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_place(address: str | Path) -> None:
    """Raise ConfigError where no file can be written, before the work of making its content."""
    with explained(ConfigError, f"{address} cannot be written"):
        _, path = open_filesystem(address)
        check_lasting(str(address), "the file to write")
    if is_remote(address):
        check_bucket(str(address))
        return
    folder = Path(path).parent
    if not folder.is_dir() or Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{address} cannot be written: expected is a file in a folder that can be written to")
