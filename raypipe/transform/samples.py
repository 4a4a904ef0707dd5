"""Samples as a store has them, or a cache: what they are before they are transformed, and reading them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import starmap
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from raypipe.errors import ConfigError
from raypipe.plan.places import PADDING
from raypipe.stores.base import Store
from raypipe.stores.numbers import labels_of
from raypipe.transform.fields import LABEL

NO_LABEL = int(np.iinfo(np.int64).min)
"""Stands for a label that is missing or damaged, or that int64 cannot hold: its sample is a bad one."""
WRONG_LABEL = "the label is missing, damaged, or no integer of 64 bits with a sign"

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class EncodedSample(NamedTuple):
    """What a store holds of one sample; `columns` has what is read beside image and label, by its names there.

    An image may be a view of memory that the store keeps for it: samples are not held beyond their micro-batch.
    """

    image: bytes | memoryview | None
    label: int = 0
    columns: Mapping[str, Any] = _NOTHING


class Decoded(NamedTuple):
    """A sample that needs no decoding: uint8 RGB (H, W, 3), maybe read-only, and its label."""

    pixels: np.ndarray
    label: int


@dataclass(frozen=True)
class Wanted:
    """What is read of samples beside the image.

    Attributes:
        label: the label, a class; else labels are 0.
        columns: the store's names of all else.
    """

    label: bool = True
    columns: tuple[str, ...] = ()


def read_samples(store: Store, indices: np.ndarray, wanted: Wanted = Wanted()) -> list[EncodedSample]:
    """Samples of int64 indices (n,); those of padding have no image, and label 0.

    Raises:
        ConfigError: labels are no classes.
        StoreError: as `Store.read`.
    """
    real = indices != PADDING
    stored = store.read(indices[real], ("image", *((LABEL,) if wanted.label else ()), *wanted.columns))
    labels = _classes(store, stored[LABEL]) if wanted.label else [0] * len(stored["image"])
    rows = zip(*(stored[name] for name in wanted.columns), strict=True) if wanted.columns else ()
    columns: list[Any] = [dict(zip(wanted.columns, row, strict=True)) for row in rows] or [_NOTHING] * len(labels)
    samples = list(starmap(EncodedSample, zip(stored["image"], labels, columns, strict=True)))
    if real.all():
        return samples
    padded = [EncodedSample(None)] * len(indices)
    for position, sample in zip(np.flatnonzero(real).tolist(), samples, strict=True):
        padded[position] = sample
    return padded


def _classes(store: Store, labels: Any) -> list[int]:
    """Labels as classes; NO_LABEL where one is none."""
    if isinstance(labels, np.ndarray) and (labels.ndim != 1 or labels.dtype.kind == "f"):
        raise ConfigError(
            f"{store.address} has labels of {labels.dtype} {labels.shape[1:]}, which are no classes: name label "
            "in store.columns, or set label_is_class = False in the store's class"
        )
    labels = labels_of(labels)
    if isinstance(labels, np.ndarray):
        return labels.tolist()
    return [NO_LABEL if label is None else label for label in labels]
