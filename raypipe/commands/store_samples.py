"""The samples of a store, which tasks read: ranges of it are the rows of shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.commands.copies import (
    CHUNK,
    CopySettings,
    Made,
    make,
    num_shards,
    samples_in,
)
from raypipe.errors import StoreError
from raypipe.stores.base import NAME, Columns, Store
from raypipe.stores.plain_columns import column_types
from raypipe.stores.scan import mean_image_bytes, scan


class StoreSamples:
    """Samples of a store, with the attributes and methods of `OrderedSamples`."""

    are_here = True  # a local store, and one at a URI is in the cache of this node

    def __init__(self, store: Store) -> None:
        self._store = store
        self.name = store.address
        self.classes = store.classes
        self.num_samples = len(store)
        if not len(store):
            raise StoreError(f"{store.address} has no samples")

    def column_types(self, short_side: int) -> dict[str, str]:
        store = self._store
        # the numbers of rows are not kept
        has_names = getattr(store, "has_names", True)
        names = [name for name in store.schema.names if name != NAME or has_names]
        first = store.read(np.arange(min(len(store), CHUNK)), tuple(names))
        return column_types(_with_later(store, first), store.address, short_side)

    def rows(
        self, settings: CopySettings, shards: int, num_cpus: int
    ) -> Iterator[tuple[int, StoreRows]]:
        store = self._store
        if not shards:
            num_bytes = len(store) * mean_image_bytes(store)
            shards = num_shards(len(store), num_bytes, num_cpus)
        bounds = np.linspace(0, len(store), min(len(store), shards) + 1).astype(int)
        for first, stop in itertools.pairwise(bounds.tolist()):
            yield first, StoreRows(store, first, stop, settings)


@dataclass(frozen=True)
class StoreRows:
    """Samples first … stop - 1 of a store, which are read and made as they are iterated."""

    store: Store
    first: int
    stop: int
    settings: CopySettings

    def __iter__(self) -> Iterator[Made]:
        settings = self.settings
        names = [name for name in settings.columns if name not in settings.sized]
        for sample in samples_in(self.store, names, self.first, self.stop):
            yield make(sample, settings)


def _with_later(store: Store, first: Columns) -> dict[str, Any]:
    """Return the first values of columns, and what decides a type later: a value, or None among integers."""
    columns = dict(first)
    for field in store.schema:
        name = field.name
        if name in ("image", "label", NAME):
            continue
        kinds = set(map(type, first[name]))
        has_no_value = kinds == {NoneType} and not pa.types.is_string(field.type)
        may_lack_one = pa.types.is_integer(field.type) or pa.types.is_boolean(
            field.type
        )
        if has_no_value or (may_lack_one and field.nullable and NoneType not in kinds):
            later = (
                value for chunk in scan(store, (name,), "") for value in chunk[name]
            )
            decisive = (value for value in later if (value is None) != has_no_value)
            columns[name] = [*first[name], *itertools.islice(decisive, 1)]
    return columns
