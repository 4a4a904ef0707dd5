"""`MemoryStore`, which keeps its samples in memory, and pickles with them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.stores.arrow_values import to_arrow
from raypipe.stores.base import NAME, Columns, check_columns, check_indices
from raypipe.stores.numbers import exactly


class MemoryStore:
    """A store that keeps its samples in memory, and pickles with them.

    Args:
        images: encoded images, or None for a missing one; memory views are copied.
        labels: one for each image: integers, which are classes, or floats, or arrays of one shape; None = a store
            without labels.
        classes: class names, position = label.
        columns: extra columns, name → one value per image. Numbers, and arrays (n, …), become numpy arrays.
        group_size: samples per group, the last group may be smaller; None = a store without groups.
    """

    def __init__(
        self,
        images: Sequence[bytes | memoryview | None],
        labels: Sequence[int] | np.ndarray | None,
        classes: Sequence[str] | None = None,
        columns: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        group_size: int | None = None,
    ) -> None:
        self._images = [
            bytes(image) if isinstance(image, memoryview) else image for image in images
        ]
        values = _values_of(labels, columns or {}, len(self))
        self.has_names = NAME in values
        arrays = {name: _arrow_of(name, column) for name, column in values.items()}
        if not self.has_names:
            arrays[NAME] = pa.array(map(str, range(len(self))), pa.string())
        self._table = pa.table(arrays)
        self.schema = pa.schema([("image", pa.binary()), *self._table.schema])
        self.classes = None if classes is None else tuple(classes)
        self.groups: np.ndarray | None = None
        if group_size is not None:
            if group_size < 1:
                raise ValueError(f"group_size must be at least 1, not {group_size}")
            starts = np.arange(0, len(self), group_size, dtype=np.int64)
            self.groups = np.append(starts, len(self))
        self.fingerprint = _hash_of(
            (self.classes, group_size), {"image": self._images, **values}
        )
        self.address = f"memory:{self.fingerprint[:8]}"

    def __len__(self) -> int:
        return len(self._images)

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Columns:
        """Read samples, see `Store.read`."""
        rows = check_indices(indices, len(self), self.address)
        check_columns(columns, self.schema.names, self.address)
        images = None
        if "image" in columns:
            images = [self._images[row] for row in rows.tolist()]
        names = [name for name in columns if name != "image"]
        return Columns(images, self._table.select(names).take(pa.array(rows)))

    def close(self) -> None:
        """Do nothing: the store has no files."""


def _values_of(
    labels: Sequence[int] | np.ndarray | None,
    columns: Mapping[str, Sequence[Any] | np.ndarray],
    num: int,
) -> dict[str, Any]:
    """Return labels and columns as arrays or lists; raise ValueError unless they have so many values."""
    values: dict[str, Any] = {}
    if labels is not None:
        numbers = exactly(labels)
        are_classes = numbers.ndim == 1 and numbers.dtype.kind in "iub"
        if are_classes or not numbers.size:
            numbers = exactly(numbers, np.int64)
        values["label"] = numbers
    for name, column in columns.items():
        values[name] = exactly(column) if _are_numbers(column) else list(column)
    for name, column in values.items():
        if len(column) != num:
            raise ValueError(
                f"column {name!r} has {len(column)} values for {num} images"
            )
    return values


def _hash_of(facts: object, columns: Mapping[str, Any]) -> str:
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    for name, values in columns.items():
        digest.update(repr((name, len(values))).encode())
        if isinstance(values, np.ndarray) and values.dtype.kind != "O":
            digest.update(str(values.dtype).encode() + values.tobytes())
            continue
        for value in values:
            content = _bytes_of(value)
            digest.update(f"{type(value).__name__}:{len(content)}:".encode())
            digest.update(content)
    return digest.hexdigest()


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        # Its repr shows it in part.
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    return repr(value).encode()


def _arrow_of(name: str, values: np.ndarray | list[Any]) -> pa.Array:
    if isinstance(values, np.ndarray) and values.dtype.kind != "O":
        return to_arrow(values)
    try:
        try:
            return pa.array(list(values))
        except OverflowError:
            return pa.array(list(values), pa.uint64())
    except (pa.ArrowException, ValueError, OverflowError) as error:
        types = sorted({type(value).__name__ for value in values})
        raise ValueError(
            f"column {name!r} has values of several types, or of one that Arrow lacks "
            f"({', '.join(types)}): {error}"
        ) from error


def _are_numbers(values: Sequence[Any] | np.ndarray) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "biuf"
    return len(values) > 0 and all(
        isinstance(value, int | float | np.number) for value in values
    )
