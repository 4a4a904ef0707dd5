"""Lists of bad samples: `raypipe inspect STORE --verify` writes one, and a run leaves its samples out.

    {"store": address, "fingerprint": …, "num_samples": N, "bad": [{"index": i, "name": "…", "error": "…"}, …]}

A list belongs to the very contents that it was made of, which the fingerprint tells.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.storage.files import read_json, write_json
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
    problem = ""
    try:
        content = read_json(address)
        fingerprint, bad = content["fingerprint"], [entry["index"] for entry in content["bad"]]
        if fingerprint != store.fingerprint:
            problem = (
                f"was made of {content.get('store', 'another store')} with fingerprint {fingerprint}, "
                f"{store.address} has fingerprint {store.fingerprint}"
            )
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except (KeyError, TypeError) as error:
        problem, bad = f"is no list of bad samples ({type(error).__name__}: {error})", []
    outside = [index for index in bad if type(index) is not int or not 0 <= index < len(store)]
    if outside and not problem:
        problem = f"names sample {outside[0]!r}, outside the samples 0 to {len(store) - 1} of {store.address}"
    if problem:
        raise ConfigError(
            f"{setting}: {address} {problem}: make a list of {store.address} by "
            f"`raypipe inspect {store.address} --verify`"
        )
    left_out = np.unique(np.array(bad, np.int64))
    if len(left_out) == len(store):
        raise ConfigError(
            f"{setting}: {address} leaves out all {len(store)} samples of {store.address}: mend the store"
        )
    return left_out


def write_bad_list(address: str | Path, store: Store, bad: list[dict[str, Any]]) -> None:
    """Write a store's list, whole or not at all, in place of one that is there; `bad` has the entries.

    Raises:
        ConfigError: it cannot be written.
    """
    about = {"store": store.address, "fingerprint": store.fingerprint, "num_samples": len(store)}
    write_json(address, {**about, "bad": bad})
