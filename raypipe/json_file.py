"""JSON files at a local path or a URI: read with one clear error, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError
from raypipe.runlog import as_uri


def read_json(address: str | Path) -> Any:
    """What a file holds.

    Raises:
        ConfigError: it cannot be read, or is no JSON.
    """
    try:
        filesystem, path = pyarrow.fs.FileSystem.from_uri(as_uri(str(address)))
        with filesystem.open_input_stream(path) as file:
            return json.loads(file.read())
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{address} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{address} is no JSON: {error}") from error


def write_json(address: str | Path, content: dict[str, Any]) -> None:
    """Write a file in place of one that is there; readers see the old or the new one.

    Raises:
        ConfigError: it cannot be written.
    """
    data = json.dumps(content, indent=1).encode()
    filesystem, path = _place(address)
    folder, _, name = path.rpartition("/")
    partial = f"{folder}/.{name}.partial-{secrets.token_hex(4)}"
    try:
        with filesystem.open_output_stream(partial) as file:
            file.write(data)
        filesystem.move(partial, path)
    except (pa.ArrowException, OSError) as error:
        with contextlib.suppress(pa.ArrowException, OSError):
            filesystem.delete_file(partial)
        raise ConfigError(f"{address} cannot be written: {error}") from error


def check_place(address: str | Path) -> None:
    """Raise ConfigError where no file can be written, before the work of making its content."""
    filesystem, path = _place(address)
    folder = path.rpartition("/")[0]
    if not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        return
    if not Path(folder).is_dir() or Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{address} cannot be written: expected is a file in a folder that can be written to")


def _place(address: str | Path) -> tuple[pyarrow.fs.FileSystem, str]:
    try:
        return pyarrow.fs.FileSystem.from_uri(as_uri(str(address)))
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{address} cannot be written: {error}") from error
