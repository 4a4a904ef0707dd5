"""Lists of bad samples, which `raypipe verify STORE` writes and a run can exclude.

The fingerprint ties a list to the contents of its store. Your own list may have only names, {"bad": [{"name":
"cat/1.jpg"}, …]}, which are those of the store's column `name`:

    {"store": address, "fingerprint": …, "num_samples": N, "bad": [{"index": i, "name": "…", "error": "…"}, …]}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.storage.files import read_json, write_json
from raypipe.stores.base import Store
from raypipe.stores.scan import sample_names


def read_bad_list(address: str | Path, store: Store, setting: str) -> np.ndarray:
    """Return the indices of a list's samples: int64 (k,), sorted, without duplicates.

    Args:
        address: the list's address; empty = no list.
        store: the store that the list must belong to.
        setting: the setting that the address comes from, for errors.

    Raises:
        ConfigError: the list cannot be read, is malformed, belongs to a different store, or excludes all samples.
    """
    if not str(address):
        return np.empty(0, np.int64)
    try:
        content = read_json(address)
        entries = content["bad"]
        bad = [entry["index"] for entry in entries if "index" in entry]
        named = {entry["name"] for entry in entries if "index" not in entry}
        fingerprint = store.fingerprint
        if bad or not named:
            fingerprint = content["fingerprint"]
        lacking = set(named)
        for index, name in enumerate(sample_names(store) if named else ()):
            if name in named:
                bad.append(index)
                lacking.discard(name)
        if lacking:
            raise ValueError(f"the store has no sample {min(lacking)!r}")
        if fingerprint != store.fingerprint:
            raise ValueError(
                f"it was made for {content.get('store')} with fingerprint {fingerprint}"
            )
        for index in bad:
            if type(index) is not int or not 0 <= index < len(store):
                raise ValueError(
                    f"it names sample {index!r}, outside the samples 0 to {len(store) - 1}"
                )
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{setting}: {address} is not a list of bad samples of {store.address}, which has fingerprint "
            f"{store.fingerprint} ({type(error).__name__}: {error}): make one with `raypipe verify "
            f"{store.address}`"
        ) from error
    excluded = np.unique(np.array(bad, np.int64))
    if len(excluded) == len(store):
        raise ConfigError(
            f"{setting}: {address} excludes all {len(store)} samples of {store.address}: shorten the list, or "
            "check the store"
        )
    return excluded


def write_bad_list(
    address: str | Path, store: Store, bad: list[dict[str, Any]]
) -> None:
    """Write the list of a store's bad samples atomically, replacing an old one; `bad` has the entries."""
    about = {
        "store": store.address,
        "fingerprint": store.fingerprint,
        "num_samples": len(store),
    }
    write_json(address, {**about, "bad": bad})
