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
    PartedStore,
    Store,
    check_columns,
    check_indices,
    is_at_hand,
    join_fingerprints,
    keeps_groups,
    name_of,
)
from raypipe.stores.numbers import exactly

# Group size of an ungrouped store that is joined to a grouped one; any size works.
_GROUP = 1024


class JoinedStore(PartedStore):
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
        self._stores = list(parts.values())
        sizes = [len(store) for store in self._stores]
        self.offsets = np.cumsum([0, *sizes], dtype=np.int64)
        self.address = " + ".join(store.address for store in self._stores)
        # the columns that all stores have, with a type for the numbers of all
        schemas = [store.schema for store in self._stores]
        fields = []
        for name in schemas[0].names:
            if all(name in schema.names for schema in schemas):
                kinds = [schema.field(name).type for schema in schemas]
                fields.append(pa.field(name, _common_type(kinds)))
        self.schema = pa.schema(fields)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Class names; None if stores differ in them or have none."""
        (classes, *others) = {store.classes for store in self._stores}
        return None if others else classes

    @property
    def groups(self) -> np.ndarray | None:
        if all(store.groups is None for store in self._stores):
            return None
        groups: list[Any] = []
        for first, store in zip(self.offsets[:-1], self._stores, strict=True):
            of_store = store.groups
            if of_store is None:
                of_store = np.arange(0, len(store) + _GROUP, _GROUP)
            groups.append(first + of_store[:-1])
        return np.append(np.concatenate(groups), self.offsets[-1]).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        return join_fingerprints([store.fingerprint for store in self._stores])

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        """Read samples, see `Store.read`, with one read of each store."""
        rows = check_indices(indices, len(self), self.address)
        for store in self._stores:
            check_columns(columns, store.schema.names, store.address)
        if len(self._stores) == 1:
            return self._stores[0].read(rows, columns)
        return super().read(rows, columns)

    def _read(
        self, number: int, rows: np.ndarray, columns: tuple[str, ...]
    ) -> dict[str, Any]:
        found = self._stores[number].read(rows, columns)
        read: dict[str, Any] = {}
        for name in columns:
            if name == "image":
                read[name] = found.images
            else:
                kind = self.schema.field(name).type
                read[name] = _cast_column(name, found.table[name], kind)
        return read

    def sample_name(self, index: int) -> str:
        """Return the name of a sample's source, its index there, and the store's name for it."""
        number, row = self.part_of(index)
        names = [*self.parts][number], str(row), name_of(self._stores[number], row)
        return " ".join(filter(None, names))

    def is_at_hand(self, indices: np.ndarray, columns: tuple[str, ...]) -> bool:
        """See `raypipe.stores.base.is_at_hand`."""
        return all(
            is_at_hand(
                self._stores[number],
                indices[positions] - self.offsets[number],
                columns,
            )
            for number, positions in self.by_part(indices)
        )

    @property
    def keeps_groups(self) -> bool:
        """See `raypipe.stores.base.keeps_groups`."""
        return all(
            store.groups is None or keeps_groups(store) for store in self._stores
        )

    def close(self) -> None:
        for store in self._stores:
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
