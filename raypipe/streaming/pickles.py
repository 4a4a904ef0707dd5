"""Check of what is sent to actors, before they start."""

from __future__ import annotations

import os
from pathlib import Path

import ray

from raypipe.errors import ConfigError
from raypipe.streaming.spec import StreamSpec


def check_pickles(spec: StreamSpec) -> None:
    """Raise ConfigError for a part of the user's that does not pickle; Ray would print a page."""
    parts = {
        f"{split}_transform": transform for split, transform in spec.transforms.items()
    }
    stores = {f"the {split} store": store for split, store in spec.stores.items()}
    with Path(os.devnull).open("wb") as nowhere:
        for name, component in {
            **parts,
            **stores,
            "make_columns": spec.columns.function,
        }.items():
            try:
                ray.cloudpickle.dump(component, nowhere)
            except Exception as error:
                raise ConfigError(
                    f"{name} cannot be sent to the actors ({error}): let it make what does not pickle, such as an "
                    "open file or a lock, at its first use"
                ) from error
