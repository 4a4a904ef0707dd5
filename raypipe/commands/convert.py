"""Copy a store, an iterable or a `ray.data.Dataset` into a new LMDB or Parquet store, verified.

    a store → ranges → one task per shard writes, reads back and compares
    → one rename, or, at a URI, one manifest: the new store exists whole or not at all

A local destination of one shard is a file, of several a folder of shards; a remote one is a folder. Order and
indices are the source's, unless samples are skipped. Samples and Datasets, which can only be read in
order, go through this process once, into a store in the cache folder, which is then copied like any other.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import Progress

from raypipe.commands.tasks import count_cpus, run_tasks
from raypipe.errors import ConfigError, SampleError, StoreError
from raypipe.rayext.cluster import connect
from raypipe.storage.filesystem import check_lasting, is_remote, open_filesystem, split
from raypipe.storage.local_file import make_cache_folder
from raypipe.stores import open_store, store_options
from raypipe.stores.addresses import expand
from raypipe.stores.base import Columns, Store
from raypipe.stores.destination import new_path, new_remote
from raypipe.stores.lmdb import LMDBStore
from raypipe.stores.record import ColumnValues, Fingerprint, RecordLayout, column_types, plain
from raypipe.stores.scan import SIZE_COLUMNS, scan
from raypipe.stores.sources import Asked, Source, open_source
from raypipe.stores.writers import WRITTEN_SUFFIXES, open_writer
from raypipe.transform import kernel
from raypipe.transform.decode import decode, encode_jpeg, resize_short_side
from raypipe.transform.decode_array import header_size
from raypipe.transform.image_header import image_kind
from raypipe.transform.seekable import is_seekable

if TYPE_CHECKING:
    import ray.data

# A shard is small enough to be copied and cached as one object, and large enough to be few.
_SHARD_BYTES = 1 << 30
# Samples per read: a few MB of JPEGs.
CHUNK = 64
NO_SIZE = {"width": -1, "height": -1}

Part = tuple[int, int, int, list[tuple[int, str]]]
"""What a task has done: how many samples, how many of those written have no known size, bytes of images; and the
indices skipped, each with its reason."""


def convert(
    src: str | Path | Store | ray.data.Dataset | Iterable[ColumnValues],
    dst: str | Path,
    *,
    image_column: str = "image",
    target_column: str = "label",
    trust_pickles: bool = False,
    classes: Sequence[str] | None = None,
    short_side: int = 0,
    quality: int = 90,
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
        classes: class names by label, for samples, a Dataset or a format that has none; a store has its own.
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
    if shards < 0 or short_side < 0 or not 1 <= quality <= 100:
        raise ConfigError(
            "shards and short_side must be at least 0 and quality in [1, 100], "
            f"got {shards}, {short_side} and {quality}"
        )
    if seekable and (why := kernel.why_no_kernel()):
        raise ConfigError(f"seekable JPEGs need the compiled extension, which is not used here: {why}")
    dst = str(dst)
    suffix = Path(split(dst)[1]).suffix
    if suffix not in WRITTEN_SUFFIXES:
        raise StoreError(f"{dst}: the destination must end in one of {', '.join(WRITTEN_SUFFIXES)}")
    if expand(dst) != [dst] or "*" in dst:
        raise StoreError(
            f"{dst}: several files cannot appear at once in a folder with others: name one destination, such as "
            "train.lmdb; several --shards make it a folder of shards"
        )
    check_lasting(dst, "the destination")
    with contextlib.ExitStack() as stack:
        opened = _opened(src, image_column, target_column, trust_pickles)
        if isinstance(opened, Store):
            store = opened
        else:
            store = open_store(stack.enter_context(_kept_samples(opened, classes, short_side)))
        if not len(store):
            raise StoreError(f"{store.address} has no samples")
        first = store.read(np.arange(min(len(store), CHUNK)), store.columns)
        columns = column_types(_with_later(store, first), store.address, short_side)
        sized = tuple(name for name in SIZE_COLUMNS if sizes and (short_side or name not in columns))
        columns |= dict.fromkeys(sized, "int64")
        connect()
        # A local destination is on this node, and files to upload are written here first: no other node writes.
        num_shards = min(len(store), shards or _num_shards(store, count_cpus("the copy", here=True)))
        partial = stack.enter_context(
            new_remote(dst, overwrite) if is_remote(dst) else new_path(Path(open_filesystem(dst)[1]), overwrite)
        )
        files = [partial]
        if num_shards > 1:
            partial.mkdir()
            files = [partial / f"{number:05d}{suffix}" for number in range(num_shards)]
        bounds = np.linspace(0, len(store), len(files) + 1).astype(int).tolist()
        calls = [
            (store, file, *ends, columns, short_side, quality, on_bad_sample, sized, exif, seekable)
            for file, ends in zip(files, itertools.pairwise(bounds), strict=True)
        ]
        counts, skipped = np.zeros(3, np.int64), list[tuple[int, str]]()
        for *part_counts, part_skipped in run_tasks("the copy", True, write_shard, calls, len(store)):
            counts += part_counts
            skipped += part_skipped
        num_samples, num_without_size, num_bytes = counts.tolist()
        if num_samples == len(skipped):
            raise StoreError(f"{store.address} has no readable sample; the first: {min(skipped)[1]}")
        return {
            "samples": num_samples - len(skipped),
            "classes": len(store.classes or ()),
            "bytes": num_bytes,
            "skipped": len(skipped),
            "without_size": num_without_size,
        }


def _with_later(store: Store, first: Columns) -> Columns:
    """Return the first values of columns, and what decides a type later: a value, or None among integers."""
    columns = dict(first)
    # An LMDB has the types of its columns, and is read whole for any of them.
    for name in columns.keys() - {"image", "label"} if not isinstance(store, LMDBStore) else ():
        kinds = set(map(type, first[name]))
        if kinds == {NoneType} or all(issubclass(kind, int | np.integer | np.bool_) for kind in kinds):
            later = (value for part in scan(store, (name,), "") for value in part[name])
            decisive = (value for value in later if (value is None) != (kinds == {NoneType}))
            columns[name] = [*first[name], *itertools.islice(decisive, 1)]
    return columns


def _opened(src: Any, image_column: str, target_column: str, trust_pickles: bool) -> Store | Source:
    """Return what there is to be copied.

    Raises:
        ConfigError: columns are named, and it is no address.
    """
    if isinstance(src, str | Path):
        source = open_source(src, Asked(image_column, target_column))
        return source or open_store(src, **store_options(image_column, target_column, trust_pickles))
    if store_options(image_column, target_column):
        raise ConfigError(
            f"image_column={image_column!r} and target_column={target_column!r} are for an address, not for a "
            f"{type(src).__name__}: give them to raypipe.open_store, or rename the columns of the samples"
        )
    return src if isinstance(src, Store) else Source(_rows_of(src))


def _rows_of(src: ray.data.Dataset | Iterable[ColumnValues]) -> Iterator[ColumnValues]:
    import ray.data

    if not isinstance(src, ray.data.Dataset):
        yield from src
        return
    options = src.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield from src.iter_rows()
    finally:
        options.preserve_order = before


@contextlib.contextmanager
def _kept_samples(source: Source, classes: Sequence[str] | None, short_side: int) -> Iterator[Path]:
    """Context manager: the file of a store in the cache folder that keeps the samples, in their order.

    Args:
        source: its samples are taken once. One whose image is None may lack the other columns.
        classes: class names by label; None = the source's.
        short_side: see `column_types`.
    """
    folder = Path(tempfile.mkdtemp(prefix="samples-", dir=make_cache_folder()))
    samples = iter(source.samples)
    try:
        with (
            ThreadPoolExecutor() as pool,  # pixels are encoded, a chunk at a time
            Progress(console=Console(stderr=True), transient=True) as bar,
        ):
            shown = bar.add_task("the samples", total=source.num_samples)
            chunks = iter(lambda: list(pool.map(_encoded, itertools.islice(samples, CHUNK))), [])
            first = next(chunks, [])
            if not first:
                raise StoreError("the source has no samples")
            columns = _columns_of(first, source.arrays, short_side)
            blank = {name: 0 if kind in ("int64", "float64") else None for name, kind in columns.items()}
            file = folder / "samples.lmdb"
            with open_writer(file, columns, classes or source.classes) as writer:
                for number, sample in enumerate(itertools.chain(first, itertools.chain.from_iterable(chunks))):
                    whole = {**blank, **sample} if sample["image"] is None else sample
                    try:
                        writer.append(plain(whole, columns))
                    except StoreError as error:
                        raise StoreError(f"sample {number}: {error}") from error
                    bar.advance(shown)
        yield file
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _columns_of(first: Iterable[ColumnValues], arrays: Collection[str], short_side: int) -> dict[str, str]:
    """Return the columns of samples with their types, by the first samples."""
    values: dict[str, Any] = {}
    for sample in first:
        for name, value in sample.items():
            values.setdefault(name, []).append(value)
    for name in arrays:
        values[name] = np.stack(values[name])
    return column_types(values, "the samples", short_side)


def _encoded(sample: ColumnValues) -> dict[str, Any]:
    """Return the sample with encoded bytes, or None, for its image."""
    import cv2

    if not isinstance(sample, Mapping) or "image" not in sample:
        raise StoreError(f"a sample is a mapping of columns, `image` among them, not {sample!r:.200}")
    image = sample["image"]
    if image is None or isinstance(image, bytes | bytearray | memoryview):
        return {**sample, "image": None if image is None else bytes(image)}
    if getattr(image, "mode", "L") not in ("L", "RGB", "F", "I", "I;16"):  # Pillow's: a palette, alpha, CMYK
        image = image.convert("RGB")
    pixels = np.asarray(image)
    if (
        not pixels.size
        or pixels.dtype != np.uint8
        or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3)))
    ):
        raise StoreError(
            f"an image is {pixels.dtype} of {pixels.shape}; images are encoded bytes, or uint8 (H, W, 3), "
            "(H, W, 1) or (H, W)"
        )
    # OpenCV has blue first.
    ok, png = cv2.imencode(".png", pixels[..., ::-1] if pixels.shape[2:] == (3,) else pixels)
    assert ok
    return {**sample, "image": png.tobytes()}


def _num_shards(store: Store, num_cpus: int) -> int:
    sample = np.linspace(0, len(store) - 1, min(64, len(store))).astype(int)
    images = store.read(sample, ("image",))["image"]
    total = sum(len(image or b"") for image in images) / len(sample) * len(store)
    return max(1, int(np.ceil(total / _SHARD_BYTES)), min(num_cpus, len(store) // 1000))


def write_shard(
    store: Store,
    file: Path,
    start: int,
    stop: int,
    columns: dict[str, str],
    short_side: int,
    quality: int,
    on_bad_sample: str,
    sized: Sequence[str] = (),
    exif: bool = False,
    seekable: bool = False,
) -> Iterator[Part]:
    """A task: writes samples start … stop - 1, yields what it did with each chunk, and reads all of it back.

    Args:
        sized: which of SIZE_COLUMNS are made from the images, and not read.
        exif: see `convert`.
        seekable: see `convert`.

    Raises:
        SampleError: a sample is bad, and on_bad_sample is "raise".
        StoreError: the shard differs from its samples when it is read back.
    """
    read = {name: kind for name, kind in columns.items() if name not in sized}
    with open_writer(file, columns, store.classes) as writer:
        for first, samples in _chunks(store, read, start, stop):
            num_without_size, num_bytes, skipped = 0, 0, []
            for index, sample in enumerate(samples, first):
                try:
                    sample["image"] = _checked(sample["image"], short_side, quality)
                    if seekable:
                        sample["image"] = _made_seekable(sample["image"])
                    size = size_of(sample["image"], exif)
                except SampleError as error:
                    if on_bad_sample == "raise":
                        raise SampleError(
                            f"{store.address}: sample {index}: {error}. Exclude such samples with "
                            "--on-bad-sample skip"
                        ) from None
                    skipped.append((index, f"sample {index}: {error}"))
                    continue
                sample |= {name: size[name] for name in sized}
                num_without_size += size == NO_SIZE
                writer.append(sample)
                num_bytes += len(sample["image"])
            yield len(samples), num_without_size, num_bytes, skipped
    if digest_of(file, columns) != writer.fingerprint:
        raise StoreError(f"{file} does not read back as it was written: check the disk, and try again")


def digest_of(file: Path, columns: dict[str, str]) -> str:
    """The fingerprint of a shard as it reads back."""
    store, layout = open_store(file), RecordLayout(columns)
    digest = Fingerprint(columns, store.classes)
    for _, samples in _chunks(store, columns, 0, len(store)):
        for sample in samples:
            digest.add(layout.pack(sample))
    store.close()
    return digest.hexdigest()


def _chunks(
    store: Store, columns: Mapping[str, str], start: int, stop: int
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield samples, as writers take them, with the index of the first."""
    for first in range(start, stop, CHUNK):
        rows = store.read(np.arange(first, min(stop, first + CHUNK)), tuple(columns))
        every = (dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True))
        yield first, [plain(sample, columns) for sample in every]


def _checked(image: bytes | memoryview | None, short_side: int, quality: int) -> bytes:
    if not image:
        raise SampleError("it has no bytes")
    if not short_side:
        return bytes(image)
    return encode_jpeg(resize_short_side(decode(image, min_side=short_side), short_side), quality)


def _made_seekable(image: bytes) -> bytes:
    """Make a JPEG seekable, with its pixels compared; other images and unusual JPEGs stay as they are.

    Raises:
        SampleError: it is a damaged JPEG, or over a limit.
    """
    if image_kind(image) != "JPEG":
        return image
    pixels = decode(image)
    if is_seekable(image):
        return image
    try:
        seekable = kernel.to_seekable(image)
    except ValueError:
        return image
    return seekable if np.array_equal(decode(seekable), pixels) else image


def size_of(image: bytes, exif: bool = False) -> dict[str, int]:
    """Return `width` and `height`, in pixels, as decoding gives them, by the header.

    NO_SIZE if this machine lacks the image's decoder, which the readers of the copy may have.

    Raises:
        SampleError: no decoder reads the header.
    """
    try:
        height, width = header_size(image, exif)
    except ConfigError:
        return NO_SIZE
    return {"width": width, "height": height}
