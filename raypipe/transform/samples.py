"""Samples as a store has them, before they are transformed: one, and those of a micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import ConfigError, StoreError
from raypipe.plan.places import PADDING
from raypipe.stores.arrow_values import to_values
from raypipe.stores.base import Columns, Store
from raypipe.stores.numbers import MAX_LABEL
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
        table: other columns, by the store's names, with B rows.
    """

    images: Sequence[bytes | memoryview | None]
    labels: np.ndarray
    table: pa.Table = field(default_factory=lambda: pa.table({}))

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def columns(self) -> Mapping[str, Sequence[Any] | np.ndarray]:
        """The values of the table, see `raypipe.stores.arrow_values`."""
        return {name: to_values(self.table[name]) for name in self.table.column_names}

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
        images = list(
            itertools.chain.from_iterable(samples.images for samples in parts)
        )
        labels = np.concatenate([samples.labels for samples in parts])
        return Samples(
            images, labels, pa.concat_tables([samples.table for samples in parts])
        )

    def split(self, num: int) -> list[Samples]:
        """The parts of as many micro-batches; the inverse of `joined`."""
        size = len(self) // num
        return [
            Samples(
                self.images[first : first + size],
                self.labels[first : first + size],
                self.table.slice(first, size),
            )
            for first in range(0, len(self), size)
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

    @property
    def names(self) -> tuple[str, ...]:
        """The store's names of all columns to read."""
        return ("image", *((LABEL,) if self.label else ()), *self.columns)


def read_samples(
    store: Store, indices: np.ndarray, wanted: Wanted = Wanted()
) -> Samples:
    """Read the samples of int64 indices (n,); padding has no image, and label 0.

    Raises:
        ConfigError: labels are not classes.
        StoreError: as `Store.read`; or a user's store returns something else than it should.
    """
    is_real = indices != PADDING
    stored = _read(store, indices[is_real], wanted.names)
    images = stored["image"]
    labels = np.zeros(len(indices), np.int64)
    if wanted.label:
        labels[is_real] = _classes(store, stored.table[LABEL])
    table = stored.table.select(wanted.columns)
    if not is_real.all():
        rows = iter(images)
        images = [next(rows) if real else None for real in is_real.tolist()]
        table = table.take(pa.array(np.cumsum(is_real) - 1, mask=~is_real))
    return Samples(images, labels, table)


def _read(store: Store, indices: np.ndarray, names: tuple[str, ...]) -> Columns:
    columns: Any = store.read(indices, names)
    lengths = dict[str, int]()
    if isinstance(columns, Columns):
        lengths = dict.fromkeys(columns, len(columns.table))
        if columns.images is not None:
            lengths["image"] = len(columns.images)
    if lengths != dict.fromkeys(names, len(indices)):
        returned = lengths or type(columns).__name__
        raise StoreError(
            f"{store.address}: `read` must return raypipe.stores.Columns of {', '.join(names)}, with "
            f"{len(indices)} values of each, and returned {returned}"
        )
    for image in columns["image"]:
        if not isinstance(image, _ENCODED):
            raise StoreError(
                f"{store.address}: an image must be encoded, as bytes, and is a {type(image).__name__}"
            )
    return columns


def _classes(store: Store, labels: pa.ChunkedArray) -> np.ndarray:
    """Labels as classes, int64 (n,); NO_LABEL where one is none."""
    if not pa.types.is_integer(labels.type):
        raise ConfigError(
            f"{store.address} has labels of {labels.type}, which are not classes: name label in store.columns, "
            "and declare its type in the schema of the store's class"
        )
    if labels.type == pa.uint64():
        fits = pc.less_equal(labels, pa.scalar(MAX_LABEL, pa.uint64()))
        labels = pc.if_else(fits, labels, pa.scalar(None, pa.uint64()))
    labels = labels.cast(pa.int64())
    if labels.null_count:
        labels = labels.fill_null(NO_LABEL)
    return labels.to_numpy()


def check_labels(
    labels: np.ndarray, num_classes: int, title: Callable[[int], str]
) -> None:
    """Raise ConfigError where one of int64 (B,) is outside [0, num_classes); `title` names the sample of a row."""
    is_wrong = ((labels < 0) | (labels >= num_classes)) & (labels != NO_LABEL)
    for row in np.flatnonzero(is_wrong).tolist():
        raise ConfigError(
            f"{title(row)} has label {labels[row]}, outside [0, {num_classes}): set num_classes in train.model, "
            "or fix the store"
        )
