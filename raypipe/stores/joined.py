"""Several stores as one, for mixtures: the samples of the first store, then those of the second, and so on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import StoreError
from raypipe.stores.arrow_values import (
    array_of,
    array_type,
    to_arrow,
    to_values,
)
from raypipe.stores.base import (
    Columns,
    Store,
    by_part,
    check_columns,
    check_indices,
    gathered,
    is_at_hand,
    join_fingerprints,
    keeps_groups,
    name_of,
    part_of,
)
from raypipe.stores.numbers import exactly

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
    def schema(self) -> pa.Schema:
        """The columns that all stores have, with a type for the numbers of all."""
        first, *following = [store.schema for store in self.parts.values()]
        fields = []
        for name in first.names:
            if all(name in schema.names for schema in following):
                kinds = [schema.field(name).type for schema in (first, *following)]
                fields.append(pa.field(name, _common_type(kinds)))
        return pa.schema(fields)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names; None if stores differ in them or have none."""
        first, *following = self.parts.values()
        if all(store.classes == first.classes for store in following):
            return first.classes
        return None

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
        rows = check_indices(indices, len(self), self.address)
        stores = list(self.parts.values())
        for store in stores:
            check_columns(columns, store.schema.names, store.address)
        if len(stores) == 1:
            return stores[0].read(rows, columns)
        schema = self.schema

        def read(
            number: int, rows: np.ndarray, columns: tuple[str, ...]
        ) -> dict[str, Any]:
            found = stores[number].read(rows, columns)
            return {
                name: found.images
                if name == "image"
                else _cast_column(name, found.table[name], schema.field(name).type)
                for name in columns
            }

        return gathered(rows, self.offsets, schema, columns, read)

    def sample_name(self, index: int) -> str:
        """Return the name of a sample's source, its index there, and the store's name for it."""
        number, store_index = part_of(self.offsets, index)
        name, store = list(self.parts.items())[number]
        return " ".join(
            filter(None, (name, str(store_index), name_of(store, store_index)))
        )

    def is_at_hand(self, indices: np.ndarray, columns: tuple[str, ...]) -> bool:
        """See `raypipe.stores.base.is_at_hand`."""
        stores = list(self.parts.values())
        return all(
            is_at_hand(
                stores[number], indices[positions] - self.offsets[number], columns
            )
            for number, positions in by_part(indices, self.offsets)
        )

    @property
    def keeps_groups(self) -> bool:
        """See `raypipe.stores.base.keeps_groups`."""
        return all(
            store.groups is None or keeps_groups(store) for store in self.parts.values()
        )

    def close(self) -> None:
        for store in self.parts.values():
            store.close()


def _common_type(kinds: list[pa.DataType]) -> pa.DataType:
    """Return the type for a column of several stores: a number's by NumPy's rules, else the first's."""
    numbers = [array_of(kind) for kind in kinds]
    shapes = {shape for _, shape in filter(None, numbers)}
    if len(set(kinds)) == 1 or None in numbers or len(shapes) > 1:
        return kinds[0]
    dtypes = [kind.to_pandas_dtype() for kind, _ in filter(None, numbers)]
    return array_type(np.result_type(*dtypes), shapes.pop())


def _cast_column(name: str, column: pa.ChunkedArray, kind: pa.DataType) -> Any:
    """Return a store's column with the type of all; raise StoreError if a value would change."""
    if column.type == kind:
        return column
    ours = array_of(column.type)
    common = array_of(kind)
    try:
        if (ours and ours[1]) != (common and common[1]):
            raise ValueError("numbers and other values, or arrays of several shapes")
        values = to_values(column) if common else None
        if common and isinstance(values, np.ndarray):
            return to_arrow(exactly(values, common[0].to_pandas_dtype()))
        return column.cast(kind)
    except (pa.ArrowException, ValueError) as error:
        raise StoreError(
            f"column {name!r} has {column.type} in one store and {kind} in another ({error!s:.200}): give it one "
            "type, and one shape, in all stores"
        ) from None
