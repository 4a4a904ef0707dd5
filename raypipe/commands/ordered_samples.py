"""Samples that are read once, in order, as blocks in Ray's memory, cut into the rows of shards.

samples, a format   → this process reads a chunk at a time, and its threads make it
a Dataset           → its own execution makes them, on any node
→ blocks of rows, each a `Made` → the blocks of a shard, for a task
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import Progress

from raypipe.commands.copies import (
    CHUNK,
    SHARD_BYTES,
    CopySettings,
    Made,
    make,
    num_shards,
    with_encoded_image,
)
from raypipe.errors import StoreError
from raypipe.rayext.failures import cause_of
from raypipe.storage.retries import in_threads
from raypipe.stores.base import ColumnValues
from raypipe.stores.plain_columns import column_types
from raypipe.stores.sources import Source
from raypipe.stores.sources.format_source import MAX_CHUNK_BYTES

if TYPE_CHECKING:
    import ray.data


# Many tasks write those of a Dataset at a time, and all are in memory.
DATASET_SHARD_BYTES = 256 << 20


class Block(NamedTuple):
    """Rows of a table in Ray's memory.

    Attributes:
        table: a reference to it; its columns are the fields of `Made`.
        num_bytes: size of the whole table.
        num: how many rows.
        start: the first one.
    """

    table: Any
    num_bytes: int
    num: int
    start: int = 0


@dataclass(frozen=True)
class BlockRows:
    """The rows of blocks, as a task iterates them."""

    blocks: tuple[Block, ...]

    def __iter__(self) -> Iterator[Made]:
        import ray

        for block in self.blocks:
            table = ray.get(block.table).slice(block.start, block.num)
            columns = table.to_pydict()
            yield from map(Made, *(columns[name] for name in Made._fields))


class OrderedSamples(NamedTuple):
    """Samples that are read once, in order.

    Attributes:
        name: for errors.
        first: the first samples.
        blocks: settings → all of them.
        shard_bytes: so large is a shard.
        is_dataset: whether Ray Data makes them; else there are enough shards to use all CPUs of this node.
        classes, arrays, num_samples: see `Source`.
        are_here: whether only tasks of this node have them.
    """

    name: str
    first: Sequence[ColumnValues]
    blocks: Callable[[CopySettings], Iterator[Block]]
    shard_bytes: int
    is_dataset: bool
    classes: tuple[str, ...] | None = None
    arrays: Collection[str] = ()
    num_samples: int | None = None
    are_here: bool = False

    def column_types(self, short_side: int) -> dict[str, str]:
        """Return the columns with their types, by the first samples; see `column_types`.

        `image` and `label` are first, but a Dataset's columns keep their order.
        """
        values: dict[str, Any] = {}
        for sample in map(with_encoded_image, self.first):
            for name, value in sample.items():
                values.setdefault(name, []).append(value)
        for name in self.arrays:
            values[name] = np.stack(values[name])
        types = column_types(values, self.name, short_side)
        if self.is_dataset:
            return types
        names = sorted(types, key=lambda name: (name != "image", name != "label"))
        return {name: types[name] for name in names}

    def rows(
        self, settings: CopySettings, shards: int, num_cpus: int
    ) -> Iterator[tuple[int, BlockRows]]:
        """Return an iterator of the index of each shard's first sample, and its rows.

        All blocks are in Ray's memory first, unless they are more than a shard and the number of shards is free.
        """
        blocks = self.blocks(settings)
        gathered: list[Block] = []
        num = num_bytes = 0
        with Progress(console=Console(stderr=True), transient=True) as bar:
            shown = bar.add_task("the samples", total=self.num_samples)
            for block in blocks:
                gathered.append(block)
                num += block.num
                num_bytes += block.num_bytes
                bar.update(shown, completed=num)
                if not shards and num_bytes > self.shard_bytes:
                    size = max(1, num * self.shard_bytes // num_bytes)
                    return _cut(itertools.chain(gathered, blocks), repeat(size))
        shards = shards or num_shards(num, 0, 1 if self.is_dataset else num_cpus)
        bounds = np.linspace(0, num, min(num, shards) + 1).astype(int)
        return _cut(iter(gathered), np.diff(bounds).tolist())


def _cut(
    blocks: Iterator[Block], sizes: Iterable[int]
) -> Iterator[tuple[int, BlockRows]]:
    """Yield the rows of shards of so many samples, as far as there are some."""
    first = 0
    block = None
    for size in sizes:
        rows: list[Block] = []
        missing = size
        while missing and (block := block or next(blocks, None)):
            num = min(missing, block.num)
            missing -= num
            rows.append(block._replace(num=num))
            if num < block.num:
                block = block._replace(start=block.start + num, num=block.num - num)
            else:
                block = None
        if not rows:
            return
        yield first, BlockRows(tuple(rows))
        first += size


# Samples


def ordered_samples(source: Source, name: str) -> OrderedSamples:
    """Return the samples of a source; raise StoreError if it has none."""
    chunks = _chunks(source.samples)
    first = next(chunks, [])
    if not first:
        raise StoreError(f"{name} has no samples")
    blocks = partial(_blocks_of_samples, itertools.chain([first], chunks))
    return OrderedSamples(
        name,
        first,
        blocks,
        SHARD_BYTES,
        False,
        source.classes,
        source.arrays,
        source.num_samples,
    )


def _blocks_of_samples(
    chunks: Iterable[list[ColumnValues]], settings: CopySettings
) -> Iterator[Block]:
    """Yield samples as blocks, which threads make."""
    import ray

    for chunk in chunks:
        made = in_threads(partial(make, settings=settings), chunk)
        columns = zip(*made, strict=True)
        table = pa.table(dict(zip(Made._fields, columns, strict=True)))
        yield Block(ray.put(table), table.nbytes, len(table))


def _chunks(samples: Iterable[ColumnValues]) -> Iterator[list[ColumnValues]]:
    """Yield samples, a few at a time, and fewer where they are large."""
    chunk: list[ColumnValues] = []
    num_bytes = 0
    for sample in samples:
        chunk.append(sample)
        num_bytes += _num_bytes(sample)
        if len(chunk) == CHUNK or num_bytes >= MAX_CHUNK_BYTES:
            yield chunk
            chunk = []
            num_bytes = 0
    if chunk:
        yield chunk


def _num_bytes(sample: ColumnValues) -> int:
    """Return the bytes of a sample's image; 0 for what is not known to have any."""
    image = sample.get("image") if isinstance(sample, Mapping) else None
    if isinstance(image, bytes | bytearray):
        return len(image)
    return int(getattr(image, "nbytes", 0))


# A Dataset


def ordered_rows(dataset: ray.data.Dataset) -> OrderedSamples:
    """Return the rows of a Dataset; raise StoreError if it has none."""
    with _in_order(dataset.limit(CHUNK)) as head:
        first = list(head.iter_rows())
    if not first:
        raise StoreError("the Dataset has no samples")
    blocks = partial(_blocks_of_dataset, dataset)
    return OrderedSamples("the Dataset", first, blocks, DATASET_SHARD_BYTES, True)


def _blocks_of_dataset(
    dataset: ray.data.Dataset, settings: CopySettings
) -> Iterator[Block]:
    """Yield the rows of a Dataset in its order, as blocks that its execution makes."""
    import ray

    with _in_order(dataset.map(partial(_made_row, settings=settings))) as copied:
        try:
            for bundle in copied.iter_internal_ref_bundles():
                for table, facts in zip(
                    bundle.block_refs, bundle.metadata, strict=True
                ):
                    if facts.num_rows:
                        yield Block(table, facts.size_bytes, facts.num_rows)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None


def _made_row(sample: ColumnValues, settings: CopySettings) -> dict[str, Any]:
    return make(sample, settings)._asdict()


@contextlib.contextmanager
def _in_order(dataset: ray.data.Dataset) -> Iterator[ray.data.Dataset]:
    """Context manager: the Dataset, whose rows come in its order until the end."""
    options = dataset.context.execution_options
    before = options.preserve_order
    options.preserve_order = True
    try:
        yield dataset
    finally:
        options.preserve_order = before
