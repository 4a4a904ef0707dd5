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
    try:
        content = read_json(address)
        fingerprint, bad = content["fingerprint"], [entry["index"] for entry in content["bad"]]
        if fingerprint != store.fingerprint:
            raise ValueError(f"it was made of {content.get('store')} with fingerprint {fingerprint}")
        for index in bad:
            if type(index) is not int or not 0 <= index < len(store):
                raise ValueError(f"it names sample {index!r}, outside the samples 0 to {len(store) - 1}")
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{setting}: {address} is no list of bad samples of {store.address}, which has fingerprint "
            f"{store.fingerprint} ({type(error).__name__}: {error}): make one by `raypipe inspect {store.address} "
            "--verify`"
        ) from error
    left_out = np.unique(np.array(bad, np.int64))
    if len(left_out) == len(store):
        raise ConfigError(f"{setting}: {address} leaves out all {len(store)} samples: mend {store.address}")
    return left_out


def write_bad_list(address: str | Path, store: Store, bad: list[dict[str, Any]]) -> None:
    """Write a store's list, whole or not at all, in place of one that is there; `bad` has the entries.

    Raises:
        ConfigError: it cannot be written.
    """
    about = {"store": store.address, "fingerprint": store.fingerprint, "num_samples": len(store)}
    write_json(address, {**about, "bad": bad})
