"""The command `convert`: copies a store, another format, an iterable or a `ray.data.Dataset` into a new store.

    a store                    → ranges             → one task per shard writes, reads back and compares
    samples, format, Dataset   → blocks in memory     → one rename, or, at a URI, one manifest: the new store
                                                        exists whole or not at all

A local destination of one shard is a file, of several a folder of shards; a remote one is a folder. Order and
indices are the source's, unless samples are skipped. See `raypipe.commands.copied_samples` for the left side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raypipe.config import RunConfig
from raypipe.errors import ConfigError, StoreError
from raypipe.storage.filesystem import (
    check_lasting,
    is_remote,
    open_filesystem,
    split_address,
)
from raypipe.stores.addresses import expand
from raypipe.stores.base import ColumnValues, Store

if TYPE_CHECKING:
    import ray.data

    from raypipe.commands.copied_samples import Samples
    from raypipe.commands.copies import CopySettings, Report

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
        classes=list(map(str.strip, classes.split(","))) if classes else None,
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
    from raypipe.commands.copied_samples import samples_of
    from raypipe.commands.copies import CopySettings, class_numbers
    from raypipe.rayext.cluster import connect
    from raypipe.stores.plain_columns import column_types

    dst = str(dst)
    if isinstance(classes, str):
        raise ConfigError(f"classes={classes!r:.200}: give a list of names")
    settings = CopySettings(
        sizes=sizes,
        short_side=short_side,
        quality=quality,
        exif=exif,
        seekable=seekable,
        on_bad_sample=on_bad_sample,
        suffix=Path(split_address(dst)[1]).suffix,
        classes=None if classes is None else tuple(classes),
    )
    _check_arguments(dst, shards, settings)
    with _destination(dst, overwrite) as (folder, finished):
        samples = samples_of(src, image_column, target_column, trust_pickles)
        types = column_types(samples.first, samples.name, short_side)
        settings = replace(settings.of_columns(types), source=samples.name, dst=folder)
        if settings.classes is not None:
            are_classes = types.get("label") == "int64"
            numbers = class_numbers(
                samples.name, are_classes, samples.classes, settings.classes
            )
            settings = replace(settings, numbers=numbers)
        elif "label" in types:
            settings = replace(settings, classes=samples.classes)
        connect()
        return _counted(_written(samples, settings, shards), settings, finished)


def _written(samples: Samples, settings: CopySettings, shards: int) -> Iterator[Report]:
    """Yield the reports of the tasks, each of which writes a shard."""
    from raypipe.commands.copied_samples import shards_of
    from raypipe.commands.copies import shards_folder, write_shard
    from raypipe.commands.tasks import count_cpus, run_tasks
    from raypipe.stores.destination import put_shard

    dst = settings.dst
    is_here = not samples.is_anywhere or not is_remote(dst)
    num_cpus = count_cpus("the copy", is_here)
    found = shards_of(samples, shards, num_cpus)
    are_pixels = isinstance(samples.first["image"][0], np.ndarray)
    makes_images = are_pixels or settings.seekable or settings.short_side > 0
    if isinstance(found, list) and makes_images:
        # a few tasks leave CPUs to each other's threads
        num_threads = max(1, num_cpus // len(found))
        settings = replace(settings, num_threads=num_threads)
    with contextlib.ExitStack() as stack:
        if is_here:
            folder = stack.enter_context(shards_folder(dst))
            settings = replace(settings, dst=str(folder))
        calls = (
            (rows, first, number, settings)
            for number, (first, rows) in enumerate(found)
        )
        for report in run_tasks(
            "the copy", is_here, write_shard, calls, samples.num_samples, num_cpus
        ):
            if report.shard and is_here and is_remote(dst):
                # this process has the credentials of who called
                number, name = report.shard
                file = folder / name
                report = report._replace(shard=(number, put_shard(file, dst, number)))
                file.unlink()
            yield report


def _counted(
    reports: Iterable[Report], settings: CopySettings, finished: list[Any]
) -> dict[str, int]:
    """Add up what the tasks report; return what `convert` does. `finished` gets the shards, in order."""
    samples, without_size, num_bytes, skipped, shards = zip(*reports, strict=True)
    why_skipped = [entry for entries in skipped for entry in entries]
    if sum(samples) == len(why_skipped):
        raise StoreError(
            f"{settings.source} has no readable sample; the first: {min(why_skipped)[1]}"
        )
    finished += (file for _, file in sorted(filter(None, shards)))
    return {
        "samples": sum(samples) - len(why_skipped),
        "classes": len(settings.classes or ()),
        "bytes": sum(num_bytes),
        "skipped": len(why_skipped),
        "without_size": sum(without_size),
    }


def _check_arguments(dst: str, shards: int, settings: CopySettings) -> None:
    """Raise an error for arguments of `convert` that are wrong for any source."""
    from raypipe import kernel
    from raypipe.stores.writers import WRITTEN_SUFFIXES

    quality = settings.quality
    short_side = settings.short_side
    if shards < 0 or short_side < 0 or not 1 <= quality <= 100:
        raise ConfigError(
            "shards and short_side must be at least 0 and quality in [1, 100], "
            f"got {shards}, {short_side} and {quality}"
        )
    if settings.seekable and (why := kernel.why_no_kernel()):
        raise ConfigError(
            f"seekable JPEGs need the compiled extension, which is not used here: {why}"
        )
    if quality != _QUALITY and not short_side:
        raise ConfigError(
            f"quality={quality} has no effect without short_side, which makes new JPEGs"
        )
    if settings.exif and not settings.sizes and not short_side:
        raise ConfigError("exif has no effect without sizes, which it measures")
    if settings.suffix not in WRITTEN_SUFFIXES:
        raise StoreError(
            f"{dst}: the destination must end in one of {', '.join(WRITTEN_SUFFIXES)}"
        )
    if expand(dst) != [dst] or "*" in dst:
        raise StoreError(
            f"{dst}: several files cannot appear at once in a folder with others: name one destination, such as "
            "train.lmdb; several --shards make it a folder of shards"
        )
    check_lasting(dst, "the destination")


@contextlib.contextmanager
def _destination(dst: str, overwrite: bool) -> Iterator[tuple[str, list[Any]]]:
    """Context manager: where shards are written, and a list of them, which become the new store, or none does."""
    from raypipe.stores.destination import new_path, new_remote

    if is_remote(dst):
        with new_remote(dst, overwrite) as shards:
            yield dst, shards
        return
    with new_path(Path(open_filesystem(dst)[1]), overwrite) as partial:
        partial.mkdir()
        names: list[str] = []
        yield str(partial), names
        for number, name in enumerate(names):
            (partial / name).rename(partial / f"{number:05d}{partial.suffix}")
