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
import ray
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
from raypipe.stores.arrow_values import array_of, is_number, is_text
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


class Block(NamedTuple):
    """Samples that tasks read.

    Attributes:
        read: the first one, and the one after the last → the samples.
        num_bytes: size of all that it can read.
        num: how many of them.
        start: the first one.
    """

    read: Callable[[int, int], Iterator[ColumnValues]]
    num_bytes: int
    num: int
    start: int = 0


class Samples(NamedTuple):
    """The samples that are copied.

    Attributes:
        name: for errors.
        first: column → its first values, which decide its type.
        blocks: all of them, in order.
        shard_bytes: more than so many are written while others are read; 0 = all can be read at once.
        is_anywhere: whether any node may read them, and write to a URI.
        classes, num_samples: see `Source`.
    """

    name: str
    first: Mapping[str, Any]
    blocks: Iterator[Block]
    shard_bytes: int = 0
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
    num_bytes = len(store) * mean_image_bytes(store)
    every = Block(partial(samples_in, store, names), num_bytes, len(store))
    return Samples(
        store.address,
        with_later(store, first),
        iter([every]),
        classes=store.classes if has_label else None,
        num_samples=len(store),
    )


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
        has_no_value = kinds == {NoneType} and not is_text(field.type)
        may_lack_one = is_number(field.type) and field.nullable
        if has_no_value or (may_lack_one and NoneType not in kinds):
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


# Samples that are read once, in order


def _in_memory(block: Any, start: int, stop: int) -> Iterator[ColumnValues]:
    """Return samples of a list, or of a block of a Dataset, in Ray's memory."""
    from ray.data.block import BlockAccessor

    samples = ray.get(block)
    if isinstance(samples, list):
        return iter(samples[start:stop])
    part = BlockAccessor.for_block(samples).slice(start, stop)
    return BlockAccessor.for_block(part).iter_rows(public_row_format=True)


def _first_values(first: Iterable[ColumnValues], name: str) -> dict[str, list[Any]]:
    """Return the values of the first samples, by column; raise StoreError if there are none."""
    values: dict[str, list[Any]] = {}
    for sample in first:
        image = image_of(sample)
        for column, value in {**sample, "image": image}.items():
            values.setdefault(column, []).append(value)
    if not values:
        raise StoreError(f"{name} has no samples")
    return values


def source_samples(source: Source, name: str) -> Samples:
    """Return the samples of a source; `image` and `label` are their first columns."""
    chunks = _chunks(source.samples)
    first, num_bytes = next(chunks, ([], 0))
    values: dict[str, Any] = _first_values(first, name)
    leading = {
        column: values[column] for column in ("image", "label") if column in values
    }
    values = leading | values
    for column in source.arrays:
        values[column] = np.stack(values[column])
    return Samples(
        name,
        values,
        (
            Block(partial(_in_memory, ray.put(chunk)), num_bytes, len(chunk))
            for chunk, num_bytes in itertools.chain([(first, num_bytes)], chunks)
        ),
        SHARD_BYTES,
        classes=source.classes,
        num_samples=source.num_samples,
    )


def _chunks(
    samples: Iterable[ColumnValues],
) -> Iterator[tuple[list[ColumnValues], int]]:
    """Yield samples, a few at a time, and fewer where they are large, with the bytes of their images."""
    chunk: list[ColumnValues] = []
    num_bytes = 0
    for sample in samples:
        # a memory view cannot be sent, and Pillow's images have no size in bytes
        with contextlib.suppress(StoreError):
            # the task says what is wrong
            image = image_of(sample)
            sample = {**sample, "image": image}
            num_bytes += (
                image.nbytes if isinstance(image, np.ndarray) else len(image or b"")
            )
        chunk.append(sample)
        if len(chunk) == CHUNK or num_bytes >= MAX_CHUNK_BYTES:
            yield chunk, num_bytes
            chunk = []
            num_bytes = 0
    if chunk:
        yield chunk, num_bytes


def dataset_samples(dataset: ray.data.Dataset) -> Samples:
    """Return the rows of a Dataset, which keep the order of its columns."""
    connect()
    with _in_order(dataset.limit(CHUNK)) as head:
        values = _first_values(head.iter_rows(), "the Dataset")
    return Samples(
        "the Dataset",
        values,
        _blocks_of(dataset),
        DATASET_SHARD_BYTES,
        is_anywhere=True,
    )


def _blocks_of(dataset: ray.data.Dataset) -> Iterator[Block]:
    """Yield the rows of a Dataset in its order."""
    with _in_order(dataset):
        try:
            for bundle in dataset.iter_internal_ref_bundles():
                for block, facts in zip(
                    bundle.block_refs, bundle.metadata, strict=True
                ):
                    if facts.num_rows:
                        read = partial(_in_memory, block)
                        yield Block(read, facts.size_bytes, facts.num_rows)
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


# Shards


def shards_of(samples: Samples, num: int, num_cpus: int) -> Shards:
    """Return the shards of samples, `num` of them, 0 = by their size and the number of CPUs.

    All blocks are in Ray's memory first, unless they are more than a shard and the number of shards is free.
    """
    gathered: list[Block] = []
    num_rows = num_bytes = 0
    blocks = samples.blocks
    with Progress(console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task("the samples", total=samples.num_samples)
        for block in blocks:
            gathered.append(block)
            num_rows += block.num
            num_bytes += block.num_bytes
            bar.update(shown, completed=num_rows)
            if not num and num_bytes > samples.shard_bytes > 0:
                size = max(1, num_rows * samples.shard_bytes // num_bytes)
                return _cut(itertools.chain(gathered, blocks), repeat(size))
    num = num or num_shards(num_rows, num_bytes, 1 if samples.is_anywhere else num_cpus)
    bounds = np.linspace(0, num_rows, min(num_rows, num) + 1).astype(int)
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
        yield first, partial(_samples_in_blocks, rows)
        first += size


def _samples_in_blocks(blocks: Iterable[Block]) -> Iterator[ColumnValues]:
    for block in blocks:
        yield from block.read(block.start, block.start + block.num)
