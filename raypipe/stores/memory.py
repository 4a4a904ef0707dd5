"""A store of samples as Python objects, for tests and a first look."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raypipe.stores.base import Columns, check_columns, check_indices


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
        self._columns: dict[str, Any] = {"image": list(images)}
        if labels is not None:
            self._columns["label"] = np.asarray(labels, dtype=np.int64)
        for name, values in (columns or {}).items():
            self._columns[name] = np.asarray(values) if _are_numbers(values) else list(values)
        for name, held in self._columns.items():
            if len(held) != len(self):
                raise ValueError(f"column {name!r} has {len(held)} values for {len(self)} images")
        self.columns = tuple(self._columns)
        self.classes = None if classes is None else tuple(classes)
        self.groups: np.ndarray | None = None
        if group_size is not None:
            if group_size < 1:
                raise ValueError(f"group_size must be at least 1, not {group_size}")
            self.groups = np.append(np.arange(0, len(self), group_size, dtype=np.int64), len(self))
        self.fingerprint = self._hash(group_size)
        self.address = f"memory:{self.fingerprint[:8]}"

    def __len__(self) -> int:
        return len(self._columns["image"])

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples, see `Store.read`."""
        wanted = check_indices(indices, len(self), self.address)
        check_columns(columns, self._columns, self.address)
        return {
            name: held[wanted] if isinstance(held, np.ndarray) else [held[index] for index in wanted.tolist()]
            for name, held in ((name, self._columns[name]) for name in columns)
        }

    def close(self) -> None:
        """Do nothing: there are no files."""

    def _hash(self, group_size: int | None) -> str:
        digest = hashlib.blake2b(repr((self.classes, group_size)).encode(), digest_size=16)
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
    if isinstance(values, np.ndarray):
        return values.dtype.kind in "iuf" and values.ndim == 1
    return len(values) > 0 and all(isinstance(value, int | float | np.number) for value in values)
