"""Several stores as one, for mixtures: the samples of the first store, then those of the second, and so on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores.base import (
    Columns,
    Store,
    by_part,
    check_columns,
    check_indices,
    is_class,
    join_fingerprints,
    name_of,
    part_of,
)
from raypipe.stores.numbers import InexactError, exactly

# Group size of an ungrouped store that is joined to a grouped one; any size works.
_GROUP = 1024


class JoinedStore:
    """Stores in a row, with the columns that all have, and with class names if all have the same.

    Args:
        parts: name of the source → store; at least one.

    Attributes:
        parts: as passed.
        offsets: int64 (parts + 1,), the first sample of each store, and the number of samples.
    """

    def __init__(self, parts: Mapping[str, Store]) -> None:
        assert parts, "a joined store has parts"
        self.parts = dict(parts)
        self.offsets = np.append(
            0, np.cumsum([len(store) for store in parts.values()])
        ).astype(np.int64)
        self.address = " + ".join(store.address for store in parts.values())

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that all stores have."""
        first, *others = self.parts.values()
        return tuple(
            name
            for name in first.columns
            if all(name in store.columns for store in others)
        )

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names; None if stores differ in them or have none."""
        first, *others = self.parts.values()
        if all(store.classes == first.classes for store in others):
            return first.classes
        return None

    @property
    def label_is_class(self) -> bool:
        return all(is_class(store) for store in self.parts.values())

    @property
    def groups(self) -> np.ndarray | None:
        stores = self.parts.values()
        if all(store.groups is None for store in stores):
            return None
        starts = [
            offset
            + (
                np.arange(0, len(store), _GROUP)
                if store.groups is None
                else store.groups[:-1]
            )
            for offset, store in zip(self.offsets[:-1], stores, strict=True)
        ]
        return np.append(np.concatenate(starts), self.offsets[-1]).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        return join_fingerprints([store.fingerprint for store in self.parts.values()])

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        """Read samples, see `Store.read`, with one read of each store."""
        wanted = check_indices(indices, len(self), self.address)
        for store in self.parts.values():
            check_columns(columns, store.columns, store.address)
        stores = list(self.parts.values())
        places: list[np.ndarray] = [np.empty(0, np.int64)]
        values_of: dict[str, list[Any]] = {name: [] for name in columns}
        for number, positions in by_part(wanted, self.offsets):
            places.append(positions)
            store_values = stores[number].read(
                wanted[positions] - self.offsets[number], columns
            )
            for name in columns:
                values_of[name].append(store_values[name])
        if not values_of or len(places) == 1:
            return stores[0].read(wanted, columns)
        back = np.argsort(np.concatenate(places))
        return {
            name: _put_back(name, values, back) for name, values in values_of.items()
        }

    def sample_name(self, index: int) -> str:
        """Return the name of a sample's source, its index there, and the store's name for it."""
        number, store_index = part_of(self.offsets, index)
        name, store = list(self.parts.items())[number]
        return " ".join(
            filter(None, (name, str(store_index), name_of(store, store_index)))
        )

    def close(self) -> None:
        for store in self.parts.values():
            store.close()


def _put_back(name: str, values: list[Any], back: np.ndarray) -> Any:
    """Join a column that was read in parts, in the requested order."""
    arrays = [isinstance(part, np.ndarray) for part in values]
    if all(arrays) and len({part.shape[1:] for part in values}) == 1:
        try:
            common = np.result_type(*values)
            return np.concatenate([exactly(part, common) for part in values])[back]
        except InexactError as error:
            raise StoreError(
                f"column {name!r} as {common} has {error}: give it one type in all stores"
            ) from None
    if all(arrays):
        shapes = sorted({part.shape[1:] for part in values})
        raise StoreError(
            f"column {name!r} must have arrays of one shape in all stores, got {shapes}"
        )
    if any(arrays) and any(
        not array and None not in part
        for part, array in zip(values, arrays, strict=True)
    ):
        raise StoreError(
            f"column {name!r} has numbers in one store and other values in another"
        )
    joined = [value for part in values for value in part]
    return [joined[place] for place in back.tolist()]
