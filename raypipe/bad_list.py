"""Lists of bad samples: `raypipe inspect STORE --verify` writes one, and a run leaves its samples out.

    {"store": address, "fingerprint": …, "num_samples": N, "bad": [{"index": i, "error": "…"}, …]}

A list belongs to the very contents that it was made of, which the fingerprint tells.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs

from raypipe.errors import ConfigError
from raypipe.runlog import as_uri
from raypipe.stores.base import Store


def read_bad_list(address: str | Path, store: Store | None, setting: str) -> np.ndarray:
    """The indices of the samples that a list names, of the store that it must be a list of.

    Args:
        address: of the list, a local path or a URI; empty = there is none.
        store: the store that a run reads; None = it reads none.
        setting: that the address comes from, for errors.

    Returns:
        int64 (k,), sorted, each once.

    Raises:
        ConfigError: the list cannot be read, is malformed, was made of another store, or leaves no sample.
    """
    if not str(address):
        return np.empty(0, np.int64)
    if store is None:
        raise ConfigError(f"{setting}: there is {address}, but no store that it could be a list of")
    try:
        filesystem, path = pyarrow.fs.FileSystem.from_uri(as_uri(str(address)))
        with filesystem.open_input_stream(path) as file:
            text = file.read()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{setting}: {address} cannot be read: {error}") from error
    mend = f"make a list of {store.address} by `raypipe inspect {store.address} --verify`"
    try:
        content = json.loads(text)
        fingerprint, bad = content["fingerprint"], [entry["index"] for entry in content["bad"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{setting}: {address} is no list of bad samples ({type(error).__name__}: {error}); {mend}"
        ) from None
    if fingerprint != store.fingerprint:
        raise ConfigError(
            f"{setting}: {address} was made of {content.get('store', 'another store')} with fingerprint "
            f"{fingerprint}, {store.address} has fingerprint {store.fingerprint}: {mend}"
        )
    for index in bad:
        if type(index) is not int or not 0 <= index < len(store):
            raise ConfigError(
                f"{setting}: {address} names sample {index!r}, outside the samples 0 to {len(store) - 1} of "
                f"{store.address}; {mend}"
            )
    left_out = np.unique(np.array(bad, np.int64))
    if len(left_out) == len(store):
        raise ConfigError(
            f"{setting}: {address} leaves out all {len(store)} samples of {store.address}: there is nothing to "
            "read. Mend the store"
        )
    return left_out


def write_bad_list(address: str | Path, store: Store, bad: list[dict[str, Any]]) -> None:
    """Write a list, whole or not at all, in place of one that is there.

    Args:
        address: of the list, a local path or a URI.
        store: that it is a list of.
        bad: `index` and `error` of each bad sample.

    Raises:
        ConfigError: it cannot be written.
    """
    content = {
        "store": store.address,
        "fingerprint": store.fingerprint,
        "num_samples": len(store),
        "bad": bad,
    }
    filesystem, path = _place(address)
    folder, _, name = path.rpartition("/")
    partial = f"{folder}/.{name}.partial-{secrets.token_hex(4)}"
    try:
        with filesystem.open_output_stream(partial) as file:
            file.write(json.dumps(content, indent=1).encode())
        filesystem.move(partial, path)
    except (pa.ArrowException, OSError) as error:
        with contextlib.suppress(pa.ArrowException, OSError):
            filesystem.delete_file(partial)
        raise ConfigError(f"{address} cannot be written: {error}") from error


def check_place(address: str | Path) -> None:
    """Raise ConfigError where no list can be written, before the work of making one."""
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
