"""Micro-batches of samples that a test has at hand, as an actor makes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.plan.samplers import Draws
from raypipe.stores.base import Columns
from raypipe.streaming.items import ItemMaker
from raypipe.streaming.maker import NONE_EXCLUDED, MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch, Ragged
from raypipe.transform.sample_maker import SampleMaker
from raypipe.transform.samples import NO_LABEL

AT = MicroBatchId("train", 0, 0, 0)
FIRST_PROBED = 10_000
FIRST = 20
"""The index of the first sample, unless indices are given."""


class EncodedSample(NamedTuple):
    """A stored sample; `columns` has the values besides image and label, by the store's names."""

    image: bytes | memoryview | None
    label: int = 0
    columns: Mapping[str, Any] = MappingProxyType({})


Candidate = tuple[EncodedSample, int, tuple[int, int]]
"""A substitute: sample, index, key."""


def column_of(samples: Iterable[EncodedSample], name: str) -> pa.Array:
    """A column of samples; one that lacks it has no value."""
    values = [sample.columns.get(name) for sample in samples]
    return pa.array(
        [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
    )


class GivenStore:
    """A store of the samples that a test gives."""

    groups = None
    classes = ()

    def __init__(self, address: str, sample_name: Callable[[int], str]) -> None:
        self.address = address
        self.sample_name = sample_name
        self.content: dict[int, EncodedSample] = {}

    def read(self, indices: np.ndarray, columns: Sequence[str]) -> Columns:
        samples = [self.content[index] for index in indices.tolist()]
        table = {
            name: column_of(samples, name)
            for name in columns
            if name not in ("image", "label")
        }
        if "label" in columns:
            labels = [sample.label for sample in samples]
            labels = [None if label == NO_LABEL else label for label in labels]
            table["label"] = pa.array(labels, pa.int64())
        return Columns([sample.image for sample in samples], pa.table(table))


class GivenPlan:
    """A plan of one micro-batch, whose samples, keys and substitutes a test gives."""

    config = PlanConfig()

    def __init__(self) -> None:
        self.indices = np.zeros(1, np.int64)
        self.keys = np.zeros((1, 2), np.uint64)
        self.candidates: Callable[[int], Iterable[Candidate]] | None = None
        self.store: GivenStore | None = None
        self._substitutes: dict[int, Candidate] = {}
        self.kept: dict[Split, Kept] = {}

    def draw(self, at: MicroBatchId) -> Draws:
        return self.draw_block([at]).at(0)

    def draw_block(self, block: Sequence[MicroBatchId]) -> Draws:
        zeros = np.zeros_like(self.indices)
        rows = np.arange(len(self.indices))  # a lap for each, by which it has its key
        return Draws(*(column[None] for column in (self.indices, rows, zeros, zeros)))

    def sample_keys(self, split: Split, draws: Draws) -> np.ndarray:
        return self.keys[draws.passes]

    def substitute(self, at: MicroBatchId, index: int, number: int) -> int:
        assert self.store
        if number == 0:
            row = self.indices.tolist().index(index)
            assert self.candidates, "the test gives no substitutes"
            self._candidates = itertools.cycle(self.candidates(row))
        sample, substitute, key = next(self._candidates)
        self.store.content[substitute] = sample
        self._substitutes[substitute] = sample, substitute, key
        return substitute

    def substitute_keys(self, split: Split, draw: Draws, index: int) -> np.ndarray:
        return np.array([self._substitutes[index][2]], np.uint64)

    def progress(self, done: int) -> float:
        return 0.0

    def global_step(self, at: MicroBatchId) -> int:
        return 0

    step_of_split = global_step


class Kept:
    """The samples that tell the size of padding."""

    def __init__(self, num: int) -> None:
        self.size = num

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        return FIRST_PROBED + numbers


class MicroBatchTransform:
    """A real maker of micro-batches, of samples that a test gives.

    Args:
        exact: it makes a validation.
        probe: samples that tell the size of padding.
    """

    def __init__(
        self,
        transform: Any,
        config: TransformConfig,
        exact: bool = False,
        threads: int = 1,
        store_address: str = "",
        sample_name: Callable[[int], str] = lambda _: "",
        probe: Callable[[], Iterable[EncodedSample]] = tuple,
    ) -> None:
        self.split: Split = "val" if exact else "train"
        self.store = GivenStore(store_address, sample_name)
        self.plan = GivenPlan()
        self.plan.store = self.store
        samples = [*probe()]
        self.plan.kept = {self.split: Kept(len(samples))}
        self.store.content |= dict(enumerate(samples, FIRST_PROBED))
        spec: Any = StreamSpec(
            self.plan,  # type: ignore[arg-type]
            {self.split: self.store},  # type: ignore[dict-item]
            {self.split: transform},
            config,
            PoolConfig(cpus_per_actor=threads),
        )
        self.maker = MicroBatchMaker(spec)
        # A test's transform may keep state, which the first micro-batch of a stream would find.
        self.maker.sample_makers._unchecked.clear()

    @property
    def sample_maker(self) -> SampleMaker:
        """What makes its samples."""
        return next(iter(self.maker.sample_makers._makers.values()))

    def run(
        self,
        samples: Sequence[EncodedSample],
        indices: np.ndarray,
        keys: np.ndarray,
        substitutes: Callable[[int], Iterable[Candidate]] | None = None,
        excluded: Mapping[int, str] = NONE_EXCLUDED,
    ) -> tuple[MicroBatch, list[dict[str, Any]]]:
        """The micro-batch of these samples, and the records of the bad ones."""
        self.plan.indices = indices
        self.plan.keys = keys
        self.plan.candidates = substitutes
        for index, sample in zip(indices.tolist(), samples, strict=True):
            self.store.content[index] = sample
        at = MicroBatchId(self.split, 0, 0, 0)
        batch, bad = self.maker.make(at, excluded=excluded)
        places = vars(at)
        records = [sample.record() for sample in bad]
        return batch, [
            {name: value for name, value in record.items() if name not in places}
            for record in records
        ]


def transform_of(
    transform: Any, config: TransformConfig | None = None, **of_a_split: Any
) -> MicroBatchTransform:
    """By a user's transform, settings of a run, and options of a split."""
    return MicroBatchTransform(transform, config or TransformConfig(), **of_a_split)


def samples_of(images: Iterable[bytes | None]) -> list[EncodedSample]:
    """Samples with the labels 0, 3, 6, …"""
    return [EncodedSample(image, 3 * row) for row, image in enumerate(images)]


def as_samples(samples: Sequence[EncodedSample]) -> Columns:
    """Join samples; a column that a sample lacks is None."""
    images, columns = (
        [sample.image for sample in samples],
        [sample.columns for sample in samples],
    )
    names = dict.fromkeys(itertools.chain.from_iterable(columns))
    labels = np.array([sample.label for sample in samples], np.int64)
    table = {name: column_of(samples, name) for name in names}
    return Columns(images, pa.table(table), labels)


def slow_one(
    maker: SampleMaker | ItemMaker, sample: EncodedSample, key: Any
) -> dict[str, Any]:
    """The fields of one sample, by the road for any."""
    return maker.slow(as_samples([sample]), 0, tuple(key))


def each(samples: Columns) -> list[EncodedSample]:
    """The samples, each by itself."""
    rows = zip(samples.images, samples.labels.tolist(), strict=True)
    return [EncodedSample(*sample, samples.row(row)) for row, sample in enumerate(rows)]


def run(
    transform: MicroBatchTransform,
    samples: Sequence[EncodedSample],
    keys: np.ndarray,
    substitutes: Callable[[int], Iterable[Candidate]] | None = None,
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
    rows = [*samples, *[EncodedSample(None)] * padding]
    return transform.run(rows, np.array(given), keys[: len(given)], substitutes, **more)


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
