"""Samples as a store has them, on their way to a transform: `Columns`, with labels that are classes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import ConfigError, StoreError
from raypipe.plan.places import PADDING
from raypipe.stores.arrow_values import as_classes, is_integer
from raypipe.stores.base import Columns, Store
from raypipe.transform.fields import LABEL, MicroBatch

NO_LABEL = int(np.iinfo(np.int64).min)
"""Stands for a label that is missing or damaged, or that int64 cannot hold: its sample is a bad one."""
WRONG_LABEL = "the label is missing, damaged, or no integer of 64 bits with a sign"

_ENCODED = (bytes, memoryview, bytearray, type(None))


def of_images(images: Sequence[bytes]) -> Columns:
    """Return images as samples with label 0."""
    return Columns(images, pa.table({}), np.zeros(len(images), np.int64))


def joined(parts: Sequence[Columns]) -> Columns:
    """Join samples, one after the other."""
    return Columns(
        list(itertools.chain.from_iterable(samples.images for samples in parts)),
        pa.concat_tables([samples.table for samples in parts]),
        np.concatenate([samples.labels for samples in parts]),
    )


def read_samples(
    store: Store,
    indices: np.ndarray,
    names: Sequence[str] = ("image", LABEL),
    reads_class: bool = True,
) -> Columns:
    """Read the samples of int64 indices (n,), with labels; padding has no image, and label 0.

    Args:
        names: the columns to read, see `StreamSpec.names`: the image, then the label if it is a class.
        reads_class: whether it is; else labels are 0.

    Raises:
        ConfigError: labels are not classes.
        StoreError: as `Store.read`; or a user's store returns something else than it should.
    """
    is_real = indices != PADDING
    stored = _read(store, indices[is_real], tuple(names))
    images = stored.images
    labels = np.zeros(len(indices), np.int64)
    if reads_class:
        labels[is_real] = _classes(store, stored.table[LABEL])
    table = stored.table.select(names[1 + reads_class :])
    if not is_real.all():
        rows = iter(images)
        images = [next(rows) if real else None for real in is_real.tolist()]
        table = table.take(pa.array(np.cumsum(is_real) - 1, mask=~is_real))
    return Columns(images, table, labels)


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
    if not is_integer(labels.type):
        raise ConfigError(
            f"{store.address} has labels of {labels.type}, which are not classes: name label in store.columns, "
            "and declare its type in the schema of the store's class"
        )
    return as_classes(labels).fill_null(NO_LABEL).to_numpy()


def read_by_reader(batches: Sequence[MicroBatch], given: Columns) -> list[MicroBatch]:
    """Return the micro-batches of a block with equal parts of the seconds that a reader spent on its samples."""
    read_s = given.read_s / len(batches)
    outage_s = given.outage_s / len(batches)
    return [replace(batch, read_s=read_s, outage_s=outage_s) for batch in batches]


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
