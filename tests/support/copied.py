"""Copies of stores as a task of `convert` writes them, in this process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from raypipe.commands.copies import CopySettings, Report, samples_in, write_shard
from raypipe.stores.base import Store


def written(store: Store, folder: Path, settings: CopySettings) -> list[Report]:
    """The reports of a task that writes a store as 00000.lmdb, or the suffix of the settings."""
    suffix = settings.suffix or ".lmdb"
    settings = replace(settings, dst=str(folder), suffix=suffix, source="x")
    names = settings.columns.keys() - settings.sized
    rows = partial(samples_in, store, names, 0, len(store))
    return list(write_shard(rows, 0, 0, settings))
