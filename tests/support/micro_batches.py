"""Micro-batches of samples that a test has at hand, as an actor makes them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.config import TransformConfig
from raypipe.plan.places import PADDING, MicroBatchId
from raypipe.transform.batch import MicroBatchTransform, Sample, Substitutes
from raypipe.transform.contents import Content
from raypipe.transform.fields import MicroBatch, Ragged
from raypipe.transform.samples import EncodedSample, Samples

AT = MicroBatchId("train", 0, 0, 0)
FIRST = 20
"""The index of the first sample, unless indices are given."""


def transform_of(
    transform: Any, config: TransformConfig | None = None, **of_a_split: Any
) -> MicroBatchTransform:
    """By a user's transform, settings of a run, and options of a split."""
    config = config or TransformConfig()
    return MicroBatchTransform(
        Content(transform, config), tolerant=config.max_bad_fraction > 0, **of_a_split
    )


def samples_of(images: Iterable[bytes | None]) -> list[EncodedSample]:
    """Samples with the labels 0, 3, 6, …"""
    return [EncodedSample(image, 3 * row) for row, image in enumerate(images)]


def as_samples(samples: Sequence[EncodedSample]) -> Samples:
    """Join samples; a column that a sample lacks is None."""
    images, columns = (
        [sample.image for sample in samples],
        [sample.columns for sample in samples],
    )
    names = dict.fromkeys(itertools.chain.from_iterable(columns))
    labels = np.array([sample.label for sample in samples], np.int64)
    table = {name: pa.array([row.get(name) for row in columns]) for name in names}
    return Samples(images, labels, pa.table(table))


def as_read(samples: Sequence[Sample]) -> Samples | list[Callable[[], Any]]:
    """As a store was read for a micro-batch, or each when it is its turn, where one of them is to be read then."""
    if not any(map(callable, samples)):
        return as_samples([*samples])
    return [
        sample if callable(sample) else functools.partial([sample].__getitem__, 0)
        for sample in samples
    ]


def run(
    transform: MicroBatchTransform,
    samples: Sequence[Sample],
    keys: np.ndarray,
    substitutes: Substitutes | None = None,
    *,
    indices: Sequence[int] | None = None,
    padding: int = 0,
    **more: Any,
) -> tuple[MicroBatch, list[dict[str, Any]]]:
    """A micro-batch, and the records of its bad samples.

    Args:
        keys: uint64, of as many samples at least.
        indices: None = from FIRST on.
        padding: this many rows of padding follow the samples.
        more: see `MicroBatchTransform.run`.
    """
    given = [
        *(range(FIRST, FIRST + len(samples)) if indices is None else indices),
        *[PADDING] * padding,
    ]
    read = as_read([*samples, *[EncodedSample(None)] * padding])
    rows, bad = transform.run(
        read, np.array(given), keys[: len(given)], substitutes, **more
    )
    return MicroBatch(AT, rows.index, rows.weight, rows.finish(), len(bad)), [
        *bad.values()
    ]


def with_fields(
    batch: MicroBatch, fields: Mapping[str, np.ndarray | Ragged]
) -> MicroBatch:
    """A copy with other or more fields."""
    return replace(batch, fields={**batch.fields, **fields})


def plain(batch: MicroBatch) -> dict[str, Any]:
    """All that a micro-batch holds, as values that compare."""

    def values(value: Any) -> Any:
        if isinstance(value, Ragged):
            return value.kind, values(value.values), values(value.offsets)
        return (
            (str(value.dtype), value.tolist())
            if isinstance(value, np.ndarray)
            else value
        )

    found = {**vars(batch), **batch.fields}
    del found["fields"]
    return {name: values(value) for name, value in found.items()}
