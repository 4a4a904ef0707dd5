"""Lists of bad samples: `raypipe inspect STORE --verify` writes one, and a run leaves its samples out.

    {"store": address, "fingerprint": …, "num_samples": N, "bad": [{"index": i, "name": "…", "error": "…"}, …]}

A list belongs to the very contents that it was made of, which the fingerprint tells.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.storage.whole_file import read_json, write_json
from raypipe.stores.base import Store


def read_bad_list(address: str | Path, store: Store | None, setting: str) -> np.ndarray:
    """The indices of the samples that a list names: int64 (k,), sorted, each once.

    Args:
        address: of the list; empty = there is none.
        store: that it must be a list of; None = the run reads none.
        setting: that the address comes from, for errors.

    Raises:
        ConfigError: the list cannot be read, is malformed, was made of another store, or leaves no sample.
    """
    if not str(address):
        return np.empty(0, np.int64)
    if store is None:
        raise ConfigError(f"{setting}: there is {address}, but no store that it could be a list of")
    mend = f"make a list of {store.address} by `raypipe inspect {store.address} --verify`"
    try:
        content = read_json(address)
        fingerprint, bad = content["fingerprint"], [entry["index"] for entry in content["bad"]]
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except (KeyError, TypeError) as error:
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
    """Write a store's list, whole or not at all, in place of one that is there; `bad` has the entries.

    Raises:
        ConfigError: it cannot be written.
    """
    about = {"store": store.address, "fingerprint": store.fingerprint, "num_samples": len(store)}
    write_json(address, {**about, "bad": bad})
