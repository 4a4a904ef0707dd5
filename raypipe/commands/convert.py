"""The command `convert`: copies a store, another format, an iterable or a `ray.data.Dataset` into a new store.

    a store → ranges → one task per shard writes, reads back and compares
    → one rename, or, at a URI, one manifest: the new store exists whole or not at all

A local destination of one shard is a file, of several a folder of shards; a remote one is a folder. Order and
indices are the source's, unless samples are skipped. Samples and other formats, which can only be read in order,
go through this process once, into a store in the cache folder, which is then copied like any other. Tasks of a
Dataset's own execution write its shards, see `raypipe.commands.convert_dataset`.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from raypipe.config import RunConfig
from raypipe.errors import ConfigError, StoreError
from raypipe.storage.filesystem import (
    check_lasting,
    is_remote,
    open_filesystem,
    split_address,
)
from raypipe.stores import open_store, store_options
from raypipe.stores.addresses import expand
from raypipe.stores.base import NAME, Columns, ColumnValues, Store
from raypipe.stores.plain_columns import column_types
from raypipe.stores.scan import scan
from raypipe.stores.sources import Asked, Source, open_source

if TYPE_CHECKING:
    import ray.data

    from raypipe.commands.copies import CopySettings

# A shard is small enough to be copied and cached as one object, and large enough to be few.
_SHARD_BYTES = 1 << 30
_QUALITY = 90


def convert_store(
    run: RunConfig,
    src: str,
    dst: str,
    *,
    short_side: int = 0,
    quality: int = _QUALITY,
    shards: int = 0,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    sizes: bool = True,
    seekable: bool = False,
    overwrite: bool = False,
    classes: str = "",
) -> dict[str, Any]:
    """Copy any store or format into an LMDB or Parquet store, and verify it.

    Other formats are TFRecord, HDF5, MXNet .rec, zip, .npz, .pt, MDS, LitData, and Arrow (save_to_disk).

    Examples:
        raypipe convert imagenet.tar imagenet.lmdb --short-side 256 --quality 92
        raypipe convert 'imagenet/train-*-of-01024' train.lmdb
        raypipe convert train.h5 train.lmdb --store.image-column frames --store.target-column y
        raypipe convert 'train-*.parquet' s3://bucket/train.lmdb --on-bad-sample skip

    Args:
        run: Here the options of store.* that say how to read, and, for sizes, transform.apply_exif matter.
        src: a store or another format; several files as 'train-*.parquet'; or MODULE:NAME, your own function that
            yields samples, such as {'image': bytes, 'label': 3}.
        dst: a path or a URI, such as s3://bucket/train.lmdb, that ends in .lmdb or .parquet.
        short_side: decode, and store JPEGs with this shorter side, in pixels; 0 = the bytes as they are.
        quality: JPEG quality for --short-side, 1 to 100.
        shards: files of the new store; 0 = 1 GiB each.
        on_bad_sample: stop with an error, or skip samples that have no bytes or cannot be decoded.
        sizes: add columns width and height, in pixels; -1 = not in the image's header.
        seekable: store JPEGs so that crops decode faster, with the same pixels.
        overwrite: replace a store at DST.
        classes: class names in the order of their labels, with commas between.
    """
    return convert(
        src,
        dst,
        image_column=run.store.image_column,
        target_column=run.store.target_column,
        trust_pickles=run.store.trust_pickles,
        short_side=short_side,
        quality=quality,
        shards=shards,
        on_bad_sample=on_bad_sample,
        sizes=sizes,
        exif=run.transform.apply_exif and (sizes or bool(short_side)),
        seekable=seekable,
        overwrite=overwrite,
        classes=classes.split(",") if classes else None,
    )


def convert(
    src: str | Path | Store | ray.data.Dataset | Iterable[ColumnValues],
    dst: str | Path,
    *,
    image_column: str = "image",
    target_column: str = "label",
    trust_pickles: bool = False,
    classes: Sequence[str] | None = None,
    short_side: int = 0,
    quality: int = _QUALITY,
    shards: int = 0,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    sizes: bool = True,
    exif: bool = False,
    seekable: bool = False,
    overwrite: bool = False,
) -> dict[str, int]:
    """Copy samples into a new store, on the connected Ray cluster or a local one that is started for it.

    Args:
        src: a store; or an address, of a store or of TFRecord, HDF5, MXNet RecordIO, zip, Arrow, MDS, LitData,
            .pt or .npz, or `module:name` of a function that yields samples; or samples, each a mapping from
            columns to values, with an `image`: encoded bytes, or pixels, uint8 of shape (H, W, 3), (H, W, 1) or
            (H, W), which become PNG; or a Dataset of such rows. All samples have the columns of the first: int,
            float, bytes, str, or lists and dicts of them.
        dst: a local path or a URI that ends in `.lmdb` or `.parquet`.
        image_column, target_column: the columns at an address that become `image` and `label`; the usual ones are
            found. A target_column of "" = no labels.
        trust_pickles: open pickled values of an LMDB at an address, see `StoreConfig`.
        classes: class names by label. A source that names its classes gets the labels of these names, so that
            several copies number their classes alike.
        short_side: decode, and store JPEGs with this shorter side, in pixels; smaller images keep their size; 0 =
            the bytes as they are.
        quality: JPEG quality for short_side, 1 to 100.
        shards: files of the new store, each with samples; 0 = 1 GiB each, and enough to use all CPUs on a large
            store.
        on_bad_sample: "raise", or "skip" samples that have no bytes, that no decoder reads by their header or,
            when re-encoded or made seekable, that cannot be decoded.
        sizes: add int columns `width` and `height`, in pixels, from the images' headers. Columns of these names
            that the source has are kept as they are, unless `short_side` makes new images.
        exif: measure images after `transform.apply_exif` has turned them upright.
        seekable: store JPEGs so that a crop is decoded without what is above and below it, with the same pixels,
            EXIF and ICC profile; see docs/transforms.md. Other images stay as they are.
        overwrite: replace a store at `dst`.

    Returns:
        `samples` written, `classes` named, `bytes` of images written, `skipped` samples, and `without_size`,
        how many of those written have no size.

    Raises:
        StoreError: the source is damaged, the destination exists, or the copy does not compare equal.
        SampleError: a sample is bad, and on_bad_sample is "raise".
        ConfigError: an argument is wrong, or `seekable` is wanted without the compiled extension.
        ResourceError: this node has no CPU to spare, or a task died.
    """
    from raypipe.commands.convert_dataset import make_copy
    from raypipe.commands.copies import CopySettings, class_numbers
    from raypipe.rayext.cluster import connect

    dst = str(dst)
    _check_arguments(dst, short_side, quality, shards, seekable)
    if quality != _QUALITY and not short_side:
        raise ConfigError(
            f"quality={quality} has no effect without short_side, which makes new JPEGs"
        )
    if exif and not sizes and not short_side:
        raise ConfigError("exif has no effect without sizes, which it measures")
    names = None if classes is None else tuple(classes)
    opened = _opened(src, image_column, target_column, trust_pickles)
    settings = CopySettings(
        sizes=sizes,
        short_side=short_side,
        quality=quality,
        exif=exif,
        seekable=seekable,
        on_bad_sample=on_bad_sample,
        classes=names,
    )
    if _is_dataset(opened):
        connect()
        return make_copy(opened, dst, shards, overwrite, names, settings)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_as_store(opened, short_side))
        if not len(store):
            raise StoreError(f"{store.address} has no samples")
        if names is not None:
            class_numbers(store, names)
        settings = settings.of_columns(_column_types(store, short_side))
        connect()
        num_shards = _num_shards(store, shards)
        partial = stack.enter_context(_destination(dst, overwrite))
        return _copy(store, _shard_files(partial, dst, num_shards), settings)


@contextlib.contextmanager
def _as_store(opened: Any, short_side: int) -> Iterator[Store]:
    """Context manager: what `_opened` returns, as a store; samples are kept in the cache folder meanwhile."""
    from raypipe.commands.ordered_samples import kept_samples

    if isinstance(opened, Store):
        yield opened
        return
    source = opened if isinstance(opened, Source) else Source(iter(opened))
    with kept_samples(source, short_side) as path:
        yield open_store(path)


def _check_arguments(
    dst: str, short_side: int, quality: int, shards: int, seekable: bool
) -> None:
    """Raise an error for arguments of `convert` that are wrong for any source."""
    from raypipe import kernel
    from raypipe.stores.writers import WRITTEN_SUFFIXES

    if shards < 0 or short_side < 0 or not 1 <= quality <= 100:
        raise ConfigError(
            "shards and short_side must be at least 0 and quality in [1, 100], "
            f"got {shards}, {short_side} and {quality}"
        )
    if seekable and (why := kernel.why_no_kernel()):
        raise ConfigError(
            f"seekable JPEGs need the compiled extension, which is not used here: {why}"
        )
    suffix = Path(split_address(dst)[1]).suffix
    if suffix not in WRITTEN_SUFFIXES:
        raise StoreError(
            f"{dst}: the destination must end in one of {', '.join(WRITTEN_SUFFIXES)}"
        )
    if expand(dst) != [dst] or "*" in dst:
        raise StoreError(
            f"{dst}: several files cannot appear at once in a folder with others: name one destination, such as "
            "train.lmdb; several --shards make it a folder of shards"
        )
    check_lasting(dst, "the destination")


def _column_types(store: Store, short_side: int) -> dict[str, str]:
    """Return the columns of a store with the types of the writers."""
    from raypipe.commands.ordered_samples import CHUNK

    # the numbers of rows are not kept
    has_names = getattr(store, "has_names", True)
    names = [name for name in store.schema.names if name != NAME or has_names]
    first = store.read(np.arange(min(len(store), CHUNK)), tuple(names))
    return column_types(_with_later(store, first), store.address, short_side)


def _destination(dst: str, overwrite: bool) -> contextlib.AbstractContextManager[Path]:
    """Context manager: the path to write to; at its end this becomes the new store, whole or not at all."""
    from raypipe.stores.destination import new_path, new_remote

    if is_remote(dst):
        return new_remote(dst, overwrite)
    return new_path(Path(open_filesystem(dst)[1]), overwrite)


def _shard_files(partial: Path, dst: str, num_shards: int) -> list[Path]:
    """Return the files to write: one, or those of a new folder."""
    if num_shards == 1:
        return [partial]
    partial.mkdir()
    suffix = Path(split_address(dst)[1]).suffix
    return [partial / f"{number:05d}{suffix}" for number in range(num_shards)]


def _copy(store: Store, files: list[Path], settings: CopySettings) -> dict[str, int]:
    """Copy a store into files, a task for each; return what `convert` does."""
    from raypipe.commands.copies import write_shard
    from raypipe.commands.tasks import run_tasks

    bounds = np.linspace(0, len(store), len(files) + 1).astype(int).tolist()
    ranges = itertools.pairwise(bounds)
    calls = [
        (store, file, start, stop, settings)
        for file, (start, stop) in zip(files, ranges, strict=True)
    ]
    counts = np.zeros(3, np.int64)
    skipped = list[tuple[int, str]]()
    for *chunk_counts, chunk_skipped in run_tasks(
        "the copy", True, write_shard, calls, len(store)
    ):
        counts += chunk_counts
        skipped += chunk_skipped
    num_samples, num_without_size, num_bytes = counts.tolist()
    if num_samples == len(skipped):
        raise StoreError(
            f"{store.address} has no readable sample; the first: {min(skipped)[1]}"
        )
    return {
        "samples": num_samples - len(skipped),
        "classes": len(settings.classes or store.classes or ()),
        "bytes": num_bytes,
        "skipped": len(skipped),
        "without_size": num_without_size,
    }


def _with_later(store: Store, first: Columns) -> dict[str, Any]:
    """Return the first values of columns, and what decides a type later: a value, or None among integers."""
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
    return columns


def _opened(
    src: Any, image_column: str, target_column: str, trust_pickles: bool
) -> Any:
    """Return what there is to be copied: a store, a source, samples or a Dataset.

    Raises:
        ConfigError: columns are named for something other than an address.
    """
    if isinstance(src, str | Path):
        source = open_source(src, Asked(image_column, target_column))
        if source and trust_pickles:
            raise ConfigError(
                f"trust_pickles has no effect on {src}: it is for an LMDB; leave it out"
            )
        return source or open_store(
            src, **store_options(image_column, target_column, trust_pickles)
        )
    if options := store_options(image_column, target_column, trust_pickles):
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(
            f"{given} are for an address, not for a {type(src).__name__}: give them to raypipe.open_store, or "
            "rename the columns of the samples"
        )
    return src


def _is_dataset(src: object) -> bool:
    return "ray.data" in sys.modules and isinstance(
        src, sys.modules["ray.data"].Dataset
    )


def _num_shards(store: Store, shards: int) -> int:
    """Return the number of shards: as many as are asked for, or of 1 GiB each, and enough to use all CPUs."""
    from raypipe.commands.tasks import count_cpus

    if shards:
        return min(len(store), shards)
    # A local destination is on this node, and files to upload are written here first: no other node writes.
    num_cpus = count_cpus("the copy", here=True)
    sample = np.linspace(0, len(store) - 1, min(64, len(store))).astype(int)
    images = store.read(sample, ("image",))["image"]
    total = sum(len(image or b"") for image in images) / len(sample) * len(store)
    by_size = int(np.ceil(total / _SHARD_BYTES))
    by_cpus = min(num_cpus, len(store) // 1000)
    return min(len(store), max(1, by_size, by_cpus))
