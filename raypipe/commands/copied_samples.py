"""The samples that `convert` copies, cut into the rows of shards.

a store             → ranges, which tasks read
samples, a format   → this process reads a chunk at a time    → blocks in Ray's memory, which tasks read
a Dataset           → its own execution, on any node
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.progress import Progress

from raypipe.commands.copies import (
    CHUNK,
    SHARD_BYTES,
    image_of,
    num_shards,
    samples_in,
)
from raypipe.errors import ConfigError, StoreError
from raypipe.importing import loaded_module
from raypipe.rayext.cluster import connect
from raypipe.rayext.failures import cause_of
from raypipe.stores import open_store, store_options
from raypipe.stores.arrow_values import array_of
from raypipe.stores.base import NAME, Columns, ColumnValues, Store
from raypipe.stores.scan import mean_image_bytes, scan
from raypipe.stores.sources import Asked, Source, open_source
from raypipe.stores.sources.format_source import MAX_CHUNK_BYTES

if TYPE_CHECKING:
    import ray.data

# Many tasks write those of a Dataset at a time, and all are in memory.
DATASET_SHARD_BYTES = 256 << 20

Shards = Iterable[tuple[int, Callable[[], Iterator[ColumnValues]]]]
"""The index of each shard's first sample, and a function that a task calls for its samples. A list, unless their
number shows at the end."""


class Samples(NamedTuple):
    """The samples that are copied.

    Attributes:
        name: for errors.
        first: column → its first values, which decide its type.
        shards: the number of shards, 0 = by their size, and the number of CPUs → the shards.
        is_anywhere: whether any node may read them, and write to a URI.
        classes, num_samples: see `Source`.
    """

    name: str
    first: Mapping[str, Any]
    shards: Callable[[int, int], Shards]
    is_anywhere: bool = False
    classes: tuple[str, ...] | None = None
    num_samples: int | None = None


def samples_of(
    src: Any, image_column: str, target_column: str, trust_pickles: bool
) -> Samples:
    """Return what `convert` copies, by its arguments.

    Raises:
        StoreError: there are no samples.
        ConfigError: columns are named for something other than an address.
    """
    options = store_options(image_column, target_column, trust_pickles)
    if isinstance(src, str | Path):
        source = open_source(src, Asked(image_column, target_column))
        if source is None:
            return store_samples(open_store(src, **options), bool(target_column))
        if trust_pickles:
            raise ConfigError(
                f"trust_pickles has no effect on {src}: it is for an LMDB; leave it out"
            )
        return source_samples(source, str(src))
    if options:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(
            f"{given} are for an address, not for a {type(src).__name__}: give them to raypipe.open_store, or "
            "rename the columns of the samples"
        )
    if isinstance(src, Store):
        return store_samples(src, has_label=True)
    library = loaded_module("ray.data")
    if library is not None and isinstance(src, library.Dataset):
        return dataset_samples(src)
    return source_samples(Source(iter(src)), "the source")


# A store


def store_samples(store: Store, has_label: bool) -> Samples:
    """Return the samples of a store; one at a URI is in the cache of this node."""
    if not len(store):
        raise StoreError(f"{store.address} has no samples")
    # the numbers of rows are not kept
    are_kept = {NAME: getattr(store, "has_names", True), "label": has_label}
    names = tuple(name for name in store.schema.names if are_kept.get(name, True))
    first = store.read(np.arange(min(len(store), CHUNK)), names)

    def shards(num: int, num_cpus: int) -> Shards:
        if not num:
            num_bytes = len(store) * mean_image_bytes(store)
            num = num_shards(len(store), num_bytes, num_cpus)
        return [
            (start, partial(samples_in, store, names, start, stop))
            for start, stop in itertools.pairwise(_bounds(len(store), num))
        ]

    return Samples(
        store.address,
        with_later(store, first),
        shards,
        classes=store.classes if has_label else None,
        num_samples=len(store),
    )


def _bounds(num_samples: int, num: int) -> list[int]:
    """Return where each of `num` shards begins, and where the last ends."""
    return np.linspace(0, num_samples, min(num_samples, num) + 1).astype(int).tolist()


def with_later(store: Store, first: Columns) -> dict[str, Any]:
    """Return the first values of columns, and what decides a type later: a value, or None among integers.

    Values that have one shape by the schema are an array.
    """
    columns = dict(first)
    for field in store.schema:
        name = field.name
        if name in ("image", "label", NAME):
            continue
        kinds = set(map(type, first[name]))
        has_no_value = kinds == {NoneType} and not pa.types.is_string(field.type)
        may_lack_one = pa.types.is_integer(field.type) or pa.types.is_boolean(
            field.type
        )
        if has_no_value or (may_lack_one and field.nullable and NoneType not in kinds):
            later = (
                value for chunk in scan(store, (name,), "") for value in chunk[name]
            )
            decisive = (value for value in later if (value is None) != has_no_value)
            columns[name] = [*first[name], *itertools.islice(decisive, 1)]
        _, shape = array_of(field.type) or (None, ())
        arrays = [value for value in columns[name] if value is not None]
        if shape and arrays:
            columns[name] = np.stack(arrays)
    return columns


# Blocks of samples that are read once, in order


class Block(NamedTuple):
    """Samples in Ray's memory.

    Attributes:
        samples: a reference to a list of them, or to a block of a Dataset.
        num_bytes: size of all that it refers to.
        num: how many of them.
        start: the first one.
    """

    samples: Any
    num_bytes: int
    num: int
    start: int = 0


def samples_in_blocks(blocks: Iterable[Block]) -> Iterator[ColumnValues]:
    """Yield the samples of blocks."""
    import ray

    for block in blocks:
        samples = ray.get(block.samples)
        stop = block.start + block.num
        if isinstance(samples, list):
            yield from samples[block.start : stop]
        else:
            yield from _rows_of_dataset(samples, block.start, stop)


def _rows_of_dataset(block: Any, start: int, stop: int) -> Iterator[ColumnValues]:
    from ray.data.block import BlockAccessor

    part = BlockAccessor.for_block(block).slice(start, stop)
    return BlockAccessor.for_block(part).iter_rows(public_row_format=True)


def block_shards(
    blocks: Iterator[Block],
    num_samples: int | None,
    shard_bytes: int,
    num: int,
    num_cpus: int,
) -> Shards:
    """Return the shards of blocks.

    All blocks are in Ray's memory first, unless they are more than a shard and the number of shards is free.
    """
    gathered: list[Block] = []
    num_rows = num_bytes = 0
    with Progress(console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task("the samples", total=num_samples)
        for block in blocks:
            gathered.append(block)
            num_rows += block.num
            num_bytes += block.num_bytes
            bar.update(shown, completed=num_rows)
            if not num and num_bytes > shard_bytes:
                size = max(1, num_rows * shard_bytes // num_bytes)
                return _cut(itertools.chain(gathered, blocks), repeat(size))
    bounds = _bounds(num_rows, num or num_shards(num_rows, 0, num_cpus))
    return list(_cut(iter(gathered), np.diff(bounds).tolist()))


def _cut(blocks: Iterator[Block], sizes: Iterable[int]) -> Shards:
    """Yield shards of so many samples, as far as there are some."""
    first = 0
    block = None
    for size in sizes:
        rows: list[Block] = []
        missing = size
        while missing and (block := block or next(blocks, None)):
            num = min(missing, block.num)
            missing -= num
            rows.append(block._replace(num=num))
            rest = block._replace(start=block.start + num, num=block.num - num)
            block = rest if rest.num else None
        if not rows:
            return
        yield first, partial(samples_in_blocks, rows)
        first += size


def _first_values(first: Iterable[ColumnValues], name: str) -> dict[str, list[Any]]:
    """Return the values of the first samples, by column; raise StoreError if there are none."""
    values: dict[str, list[Any]] = {}
    for sample in first:
        image = image_of(sample)
        for column, value in sample.items():
            values.setdefault(column, []).append(image if column == "image" else value)
    if not values:
        raise StoreError(f"{name} has no samples")
    return values


def source_samples(source: Source, name: str) -> Samples:
    """Return the samples of a source; `image` and `label` are their first columns."""
    chunks = _chunks(source.samples)
    first = next(chunks, [])
    values: dict[str, Any] = {"image": [], "label": []} | _first_values(first, name)
    values = {column: of_column for column, of_column in values.items() if of_column}
    for column in source.arrays:
        values[column] = np.stack(values[column])

    def shards(num: int, num_cpus: int) -> Shards:
        blocks = map(_block_of, itertools.chain([first], chunks))
        return block_shards(blocks, source.num_samples, SHARD_BYTES, num, num_cpus)

    return Samples(
        name,
        values,
        shards,
        classes=source.classes,
        num_samples=source.num_samples,
    )


def _block_of(chunk: list[ColumnValues]) -> Block:
    import ray

    return Block(ray.put(chunk), sum(map(_num_bytes, chunk)), len(chunk))


def _chunks(samples: Iterable[ColumnValues]) -> Iterator[list[ColumnValues]]:
    """Yield samples, a few at a time, and fewer where they are large."""
    chunk: list[ColumnValues] = []
    num_bytes = 0
    for sample in samples:
        # a memory view cannot be sent, and Pillow's images have no size in bytes
        with contextlib.suppress(StoreError):
            # the task says what is wrong
            image = image_of(sample)
            sample = {**sample, "image": image}
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
    if isinstance(image, np.ndarray):
        return image.nbytes
    return len(image) if isinstance(image, bytes) else 0


def dataset_samples(dataset: ray.data.Dataset) -> Samples:
    """Return the rows of a Dataset, which keep the order of its columns."""
    connect()
    with _in_order(dataset.limit(CHUNK)) as head:
        values = _first_values(head.iter_rows(), "the Dataset")

    def shards(num: int, num_cpus: int) -> Shards:
        blocks = _blocks_of(dataset)
        return block_shards(blocks, None, DATASET_SHARD_BYTES, num, 1)

    return Samples("the Dataset", values, shards, is_anywhere=True)


def _blocks_of(dataset: ray.data.Dataset) -> Iterator[Block]:
    """Yield the rows of a Dataset in its order."""
    import ray

    with _in_order(dataset):
        try:
            for bundle in dataset.iter_internal_ref_bundles():
                for block, facts in zip(
                    bundle.block_refs, bundle.metadata, strict=True
                ):
                    if facts.num_rows:
                        yield Block(block, facts.size_bytes, facts.num_rows)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None


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
