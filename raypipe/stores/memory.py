"""A store of Python objects: the fake that ships, for tests and for data that is small."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raypipe.stores.base import Columns
from raypipe.stores.checks import check_columns, check_indices


class MemoryStore:
    """A store that holds its samples, and pickles with them.

    Args:
        images: encoded images, or None for a missing one.
        labels: one per image; None for a store without labels.
        classes: class names, position = label.
        columns: extra columns, name → one value per image. Numbers become numpy arrays.
        group_size: samples per group, the last one may be smaller; None for a store without groups.
    """

    def __init__(
        self,
        images: Sequence[bytes | None],
        labels: Sequence[int] | np.ndarray | None,
        classes: Sequence[str] | None = None,
        columns: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        group_size: int | None = None,
    ) -> None:
        self._images = list(images)
        self._columns: dict[str, Any] = {"image": self._images}
        if labels is not None:
            self._columns["label"] = np.asarray(labels, dtype=np.int64)
        for name, values in (columns or {}).items():
            array = np.asarray(values) if _are_numbers(values) else None
            self._columns[name] = list(values) if array is None else array
        for name, held in self._columns.items():
            if len(held) != len(self._images):
                raise ValueError(f"column {name!r} has {len(held)} values for {len(self._images)} images")
        self._classes = None if classes is None else tuple(classes)
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size must be at least 1, not {group_size}")
        self._group_size = group_size
        self._fingerprint = self._hash()
        self.address = f"memory:{self._fingerprint[:8]}"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def classes(self) -> tuple[str, ...] | None:
        return self._classes

    @property
    def groups(self) -> np.ndarray | None:
        if self._group_size is None:
            return None
        starts = np.arange(0, len(self), self._group_size, dtype=np.int64)
        return np.append(starts, len(self))

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._images)

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples, see `Store.read`."""
        wanted = check_indices(indices, len(self), self.address)
        check_columns(columns, self._columns, self.address)
        return {name: _take(self._columns[name], wanted) for name in columns}

    def close(self) -> None:
        """Do nothing: there are no files."""

    def _hash(self) -> str:
        digest = hashlib.blake2b(repr((self._classes, self._group_size)).encode(), digest_size=16)
        for name, held in self._columns.items():
            digest.update(repr((name, len(held))).encode())
            if isinstance(held, np.ndarray):
                digest.update(str(held.dtype).encode() + held.tobytes())
                continue
            for value in held:
                content = value if isinstance(value, bytes) else repr(value).encode()
                digest.update(f"{type(value).__name__}:{len(content)}:".encode())
                digest.update(content)
        return digest.hexdigest()


def _are_numbers(values: Sequence[Any] | np.ndarray) -> bool:
    array = np.asarray(values) if isinstance(values, np.ndarray) else None
    if array is not None:
        return array.dtype.kind in "iuf" and array.ndim == 1
    return len(values) > 0 and all(isinstance(value, int | float | np.number) for value in values)


def _take(held: Any, wanted: np.ndarray) -> Any:
    return held[wanted] if isinstance(held, np.ndarray) else [held[index] for index in wanted.tolist()]
