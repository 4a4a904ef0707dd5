"""Samples as a store has them, before they are transformed: one, and those of a micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from raypipe.errors import ConfigError, StoreError
from raypipe.plan.places import PADDING
from raypipe.stores.base import Columns, Store
from raypipe.stores.numbers import labels_of
from raypipe.transform.fields import LABEL

NO_LABEL = int(np.iinfo(np.int64).min)
"""Stands for a label that is missing or damaged, or that int64 cannot hold: its sample is a bad one."""
WRONG_LABEL = "the label is missing, damaged, or no integer of 64 bits with a sign"

_ENCODED = (bytes, memoryview, bytearray, type(None))
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class EncodedSample(NamedTuple):
    """Stored sample; `columns` has the values besides image and label, by the store's names.

    An image may be a view of the store's memory: do not keep samples beyond their micro-batch.
    """

    image: bytes | memoryview | None
    label: int = 0
    columns: Mapping[str, Any] = _NOTHING


@dataclass(frozen=True)
class Samples:
    """Samples of a micro-batch, by column; a row becomes a separate sample when it is requested.

    Attributes:
        images: B, each encoded; None = no image.
        labels: int64 (B,), NO_LABEL among them.
        columns: other values, by the store's names, B of each.
    """

    images: list[bytes | memoryview | None]
    labels: np.ndarray
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> EncodedSample:
        image = self.images[row]
        label = int(self.labels[row])
        return EncodedSample(
            image, label, {name: values[row] for name, values in self.columns.items()}
        )

    def __iter__(self) -> Iterator[EncodedSample]:
        return map(self.__getitem__, range(len(self)))

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """Join the samples of several micro-batches, one after the other."""
        images = list(itertools.chain.from_iterable(part.images for part in parts))
        columns = {
            name: list(
                itertools.chain.from_iterable(part.columns[name] for part in parts)
            )
            for name in parts[0].columns
        }
        return Samples(images, np.concatenate([part.labels for part in parts]), columns)

    def split(self, num: int) -> list[Samples]:
        """The parts of as many micro-batches; the inverse of `joined`."""
        size = len(self) // num
        parts = [slice(first, first + size) for first in range(0, len(self), size)]
        return [
            Samples(
                self.images[part],
                self.labels[part],
                {name: values[part] for name, values in self.columns.items()},
            )
            for part in parts
        ]


@dataclass(frozen=True)
class Wanted:
    """Columns of samples to read besides the image.

    Attributes:
        label: whether to read the label, a class; else labels are 0.
        columns: the store's names of other columns.
    """

    label: bool = True
    columns: tuple[str, ...] = ()


def read_samples(
    store: Store, indices: np.ndarray, wanted: Wanted = Wanted()
) -> Samples:
    """Read the samples of int64 indices (n,); padding has no image, and label 0.

    Raises:
        ConfigError: labels are not classes.
        StoreError: as `Store.read`; or a user's store returns something else than it should.
    """
    is_real = indices != PADDING
    stored = _read(
        store,
        indices[is_real],
        ("image", *((LABEL,) if wanted.label else ()), *wanted.columns),
    )
    columns = {name: stored[name] for name in ("image", *wanted.columns)}
    labels = np.zeros(len(indices), np.int64)
    if wanted.label:
        labels[is_real] = _classes(store, stored[LABEL])
    if not is_real.all():
        rows = np.flatnonzero(is_real).tolist()
        columns = {
            name: _spread(values, rows, len(indices))
            for name, values in columns.items()
        }
    return Samples(list(columns.pop("image")), labels, columns)


def _read(store: Store, indices: np.ndarray, names: tuple[str, ...]) -> Columns:
    columns: Any = store.read(indices, names)
    for name in names:
        if (
            not isinstance(columns, Mapping)
            or name not in columns
            or len(columns[name]) != len(indices)
        ):
            raise StoreError(
                f"{store.address}: `read` must return a dict with {len(indices)} values of {name!r} for "
                f"{len(indices)} indices"
            )
    for image in columns["image"]:
        if not isinstance(image, _ENCODED):
            raise StoreError(
                f"{store.address}: an image must be encoded, as bytes, and is a {type(image).__name__}"
            )
    return columns


def _spread(values: Sequence[Any], rows: Sequence[int], num: int) -> list[Any]:
    """A column with its values in these of so many rows, None in others."""
    column: list[Any] = [None] * num
    for row, value in zip(rows, values, strict=True):
        column[row] = value
    return column


def _classes(store: Store, labels: Any) -> np.ndarray:
    """Labels as classes, int64 (n,); NO_LABEL where one is none."""
    if isinstance(labels, np.ndarray) and (
        labels.ndim != 1 or labels.dtype.kind == "f"
    ):
        raise ConfigError(
            f"{store.address} has labels of {labels.dtype} {labels.shape[1:]}, which are not classes: name label "
            "in store.columns, or set label_is_class = False in the store's class"
        )
    try:
        labels = labels_of(labels)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{store.address} has labels that are not integers: {error}"
        ) from error
    if isinstance(labels, np.ndarray):
        return labels
    return np.array(
        [NO_LABEL if label is None else label for label in labels], np.int64
    )
