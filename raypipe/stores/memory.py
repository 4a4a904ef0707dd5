"""Samples as Python objects: a store of them, the fake that ships, and what types the columns of others have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raypipe.errors import ConfigError, StoreError
from raypipe.stores.base import Columns, check_columns, check_indices

Sample = Mapping[str, Any]


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


def column_types(first: Mapping[str, Iterable[Any]], where: str, short_side: int = 0) -> dict[str, str]:
    """The columns of a source with the types that writers know, found by its first samples.

    Args:
        first: column → some of its values.
        where: they are from, for errors.
        short_side: see `ingest`.

    Raises:
        StoreError: there are no images, or a column holds something that writers do not know.
        ConfigError: images are to change their size, and lists, which may be boxes in their pixels, are not.
    """
    if "image" not in first:
        raise StoreError(f"{where} has no column 'image'; its columns are: {', '.join(first)}")
    types: dict[str, str] = {}
    for name, values in first.items():
        value = next((value for value in values if value is not None), None)
        if name == "image" or isinstance(value, bytes):
            types[name] = "binary"
        elif isinstance(value, bool | int | np.integer | np.bool_):
            types[name] = "float64" if any(isinstance(each, float | np.floating) for each in values) else "int64"
        elif isinstance(value, float | np.floating):
            types[name] = "float64"
        elif _is_json(value) and short_side:
            raise ConfigError(
                f"{where}: column {name!r} holds lists. If they are boxes, in pixels, they would no longer fit "
                "the images that --short-side makes smaller: leave it out"
            )
        elif isinstance(value, str) or _is_json(value):
            types[name] = "string"  # lists as JSON, which loses nothing: writers have no type for them
        else:
            raise StoreError(
                f"{where}: column {name!r} holds {type(value).__name__}; "
                "int, float, bytes and str columns, and lists of them but of bytes, can be copied"
            )
    return types


def plain(sample: Sample) -> dict[str, Any]:
    """A sample with values of their columns' types."""
    plain = dict(sample)
    for name, value in sample.items():
        if isinstance(value, bool | np.bool_):
            plain[name] = int(value)
        elif isinstance(value, list | np.ndarray):
            plain[name] = _as_json(value)
    return plain


def _as_json(values: Any) -> str:
    return json.dumps(values, default=np.ndarray.tolist)


def _is_json(value: Any) -> bool:
    if not isinstance(value, list | np.ndarray):
        return False
    try:
        return bool(_as_json(value))
    except TypeError:  # bytes, dates and the like
        return False
