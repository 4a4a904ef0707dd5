"""Copy a store, an iterable or a `ray.data.Dataset` into a new LMDB, Parquet or WebDataset store, verified.

    a store → ranges → one task per shard writes and hashes → one task per shard reads and compares
    → one rename, or, at a URI, one manifest: the new store exists whole or not at all

A local destination of one shard is a file, of several a folder of shards; a remote one is a folder. Order and
indices are the source's, unless samples are skipped. What can be read in one order alone, samples or a Dataset,
goes through this process once, into a store in the cache folder, and is then copied as any other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raypipe.commands.tasks import Tasks, check_wanted
from raypipe.errors import ConfigError, SampleError, StoreError
from raypipe.rayext.cluster import connect
from raypipe.storage.filesystem import check_lasting, is_remote, open_filesystem, split
from raypipe.storage.local_file import make_cache_folder
from raypipe.stores import open_store, open_writer
from raypipe.stores.addresses import expand
from raypipe.stores.base import Store
from raypipe.stores.destination import WRITTEN_SUFFIXES, new_path, new_remote
from raypipe.stores.hdf5 import encode_png
from raypipe.stores.memory import MemoryStore
from raypipe.stores.record import Fingerprint, RecordLayout
from raypipe.transform.decode import decode, encode_jpeg, resize_short_side

if TYPE_CHECKING:
    import ray.data

# A shard is small enough to be copied and cached as one object, and large enough to be few.
_SHARD_BYTES = 1 << 30
# Samples per read: a few MB of JPEGs.
CHUNK = 64

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Reencode:
    """Decode once and store smaller.

    Attributes:
        short_side: pixels of the shorter side; larger images are scaled down, smaller keep their size.
            0 = store the bytes as they are.
        quality: of the JPEG, 1 to 100.
    """

    short_side: int = 0
    quality: int = 90

    def __post_init__(self) -> None:
        if self.short_side < 0 or not 1 <= self.quality <= 100:
            raise ConfigError(
                f"short_side must be at least 0 and quality in [1, 100], got {self.short_side} and {self.quality}"
            )


def ingest(
    src: str | Path | Store | ray.data.Dataset | Iterable[Sample],
    dst: str,
    *,
    classes: Sequence[str] | None = None,
    reencode: Reencode | None = None,
    shards: int = 0,
    on_bad_sample: Literal["raise", "skip"] = "raise",
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, int]:
    """Copy samples into a new store, on the connected Ray cluster or a local one that is started for it.

    Args:
        src: a store or its address; or samples, each a mapping from columns to values, with an `image`: encoded
            bytes, or pixels, uint8 of shape (H, W, 3), (H, W, 1) or (H, W), which become PNG; or a Dataset of such
            rows. All samples have the columns of the first: int, float, bytes, str, or lists of them.
        dst: a local path or a URI that ends in `.lmdb` or `.parquet`.
        classes: names, position = label, of samples or a Dataset; a store has its own.
        reencode: decode once and store smaller; None = the bytes as they are.
        shards: files of the new store, none without samples; 0 = 1 GiB each, and enough to use all CPUs on a
            large store.
        on_bad_sample: "raise", or "skip" samples that have no bytes or, when re-encoded, cannot be decoded.
        overwrite: replace a store at `dst`.
        progress: show a progress bar on standard error.

    Returns:
        `samples` written, `classes` named, `bytes` of images written, `skipped` samples.

    Raises:
        StoreError: the source is damaged, the destination exists, or the copy does not compare equal.
        SampleError: a sample is bad, and on_bad_sample is "raise".
        ResourceError: this node has no CPU to spare, or a task died.
    """
    if shards < 0:
        raise ConfigError(f"shards must be at least 0, got {shards}")
    suffix = Path(split(dst)[1]).suffix
    if suffix not in WRITTEN_SUFFIXES:
        raise StoreError(f"{dst}: the destination must end in one of {', '.join(WRITTEN_SUFFIXES)}")
    if expand(dst) != [dst]:
        raise StoreError(
            f"{dst}: several files beside others cannot appear all at once: name one destination, such as "
            "train.lmdb, and several --shards make it a folder of shards"
        )
    check_lasting(dst, "the destination")
    destination = new_remote if is_remote(dst) else new_path
    where: Any = dst if is_remote(dst) else Path(open_filesystem(dst)[1])
    with contextlib.ExitStack() as stack:
        if isinstance(src, str | Path):
            store = open_store(src)
        else:
            store = src if isinstance(src, Store) else stack.enter_context(_kept(src, classes))
        if not len(store):
            raise StoreError(f"{store.address} has no samples")
        columns = column_types(store, reencode)
        connect()
        # A local destination is this node's, and what is uploaded is written here: no task writes it elsewhere.
        tasks = Tasks("the copy", here=True)
        num_shards = min(len(store), shards or _num_shards(store, tasks.num_cpus()))
        partial = stack.enter_context(destination(where, overwrite))
        stack.enter_context(tasks)
        files = [partial]
        if num_shards > 1:
            partial.mkdir()
            files = [partial / f"{number:05d}{suffix}" for number in range(num_shards)]
        return _copy(store, partial, files, columns, reencode, on_bad_sample, tasks, progress)


def _copy(
    store: Store,
    partial: Path,
    files: list[Path],
    columns: dict[str, str],
    reencode: Reencode | None,
    on_bad_sample: str,
    tasks: Tasks,
    progress: bool,
) -> dict[str, int]:
    """Write the files of a new store, and read them back."""
    bounds = np.linspace(0, len(store), len(files) + 1).astype(int).tolist()
    calls = [
        (store, file, start, stop, columns, reencode, on_bad_sample)
        for file, (start, stop) in zip(files, itertools.pairwise(bounds), strict=True)
    ]
    # Stable: what one shard yields, and what it skips, stays in order.
    written = tasks.stream(write_shard, calls, len(store), _num_seen, progress)
    parts = sorted(written, key=lambda part: part["first"])
    digests = [part["digest"] for part in parts if part["digest"]]
    found = tasks.results(digest_of, [(file, columns) for file in files])
    for file, digest, again in zip(files, digests, found, strict=True):
        if digest != again:
            raise StoreError(f"{file} does not read back as it was written: check the disk, and try again")
    skipped = [record for part in parts for record in part["skipped"]]
    samples = sum(part["samples"] for part in parts)
    if not samples:
        raise StoreError(f"{store.address} has no readable sample; the first: {skipped[0]}")
    copy = open_store(partial)
    if len(copy) != samples:
        raise StoreError(f"{partial} has {len(copy)} samples, {samples} were written")
    copy.close()
    return {
        "samples": samples,
        "classes": len(store.classes or ()),
        "bytes": sum(part["bytes"] for part in parts),
        "skipped": len(skipped),
    }


@contextlib.contextmanager
def _kept(src: ray.data.Dataset | Iterable[Sample], classes: Sequence[str] | None) -> Iterator[Store]:
    """A store of samples, in their order, as long as it is needed."""
    folder = Path(tempfile.mkdtemp(prefix="samples-", dir=make_cache_folder()))
    try:
        samples = iter(_rows_of(src))
        first = [_encoded(sample) for sample in itertools.islice(samples, CHUNK)]
        if not first:
            raise StoreError("there are no samples")
        names = list(first[0])
        values = {name: [sample.get(name) for sample in first] for name in names if name != "image"}
        columns = column_types(MemoryStore([sample["image"] for sample in first], None, columns=values))
        file = folder / "samples.lmdb"
        with open_writer(file, columns, classes) as writer:
            for sample in itertools.chain(first, map(_encoded, samples)):
                writer.append(_plain(sample))
        yield open_store(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rows_of(src: ray.data.Dataset | Iterable[Sample]) -> Iterator[Sample]:
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


def _encoded(sample: Sample) -> dict[str, Any]:
    """A sample whose image is bytes, or None."""
    if not isinstance(sample, Mapping) or "image" not in sample:
        raise StoreError(f"a sample is a mapping of columns, `image` among them, not {sample!r:.200}")
    image = sample["image"]
    if image is None or isinstance(image, bytes | bytearray | memoryview):
        return {**sample, "image": None if image is None else bytes(image)}
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3))):
        raise StoreError(
            f"an image is {pixels.dtype} of {pixels.shape}; images are encoded bytes, or uint8 (H, W, 3), "
            "(H, W, 1) or (H, W)"
        )
    return {**sample, "image": encode_png(pixels)}


def _num_seen(part: dict[str, Any]) -> int:
    return part["samples"] + len(part["skipped"])


def _num_shards(store: Store, num_cpus: int) -> int:
    sample = np.linspace(0, len(store) - 1, min(64, len(store))).astype(int)
    images = store.read(sample, ("image",))["image"]
    total = sum(len(image or b"") for image in images) / len(sample) * len(store)
    return max(1, int(np.ceil(total / _SHARD_BYTES)), min(num_cpus, len(store) // 1000))


def column_types(store: Store, reencode: Reencode | None = None) -> dict[str, str]:
    """The columns of a store with the types that writers know, found by its first samples.

    Raises:
        StoreError: there are no images, or a column holds something that writers do not know.
        ConfigError: images are to change their size, and lists, which may be boxes in their pixels, are not.
    """
    if "image" not in store.columns:
        raise StoreError(f"{store.address} has no column 'image'; its columns are: {', '.join(store.columns)}")
    first = store.read(np.arange(min(len(store), CHUNK)), store.columns)
    types: dict[str, str] = {}
    for name, values in first.items():
        value = next((value for value in values if value is not None), None)
        if name == "image":
            types[name] = "binary"
        elif isinstance(value, bool | int | np.integer | np.bool_):
            types[name] = "int64"
        elif isinstance(value, float | np.floating):
            types[name] = "float64"
        elif isinstance(value, bytes):
            types[name] = "binary"
        elif _is_json(value) and reencode and reencode.short_side:
            raise ConfigError(
                f"{store.address}: column {name!r} holds lists. If they are boxes, in pixels, they would no "
                "longer fit the images that --short-side makes smaller: leave it out"
            )
        elif isinstance(value, str) or _is_json(value):
            types[name] = "string"  # lists as JSON, which loses nothing: writers have no type for them
        else:
            raise StoreError(
                f"{store.address}: column {name!r} holds {type(value).__name__}; "
                "int, float, bytes and str columns, and lists of them but of bytes, can be copied"
            )
    return types


def write_shard(
    wanted: Path,
    store: Store,
    file: Path,
    start: int,
    stop: int,
    columns: dict[str, str],
    reencode: Reencode | None,
    on_bad_sample: str,
) -> Iterator[dict[str, Any]]:
    """A task: writes samples start … stop - 1; yields what each chunk wrote, and last the digest of all."""
    layout, digest = RecordLayout(columns), Fingerprint(columns, store.classes)
    check_wanted(wanted)
    with open_writer(file, columns, store.classes) as writer:
        for first in range(start, stop, CHUNK):
            check_wanted(wanted)
            indices = np.arange(first, min(stop, first + CHUNK))
            rows = store.read(indices, tuple(columns))
            done: dict[str, Any] = {"samples": 0, "bytes": 0, "skipped": [], "digest": "", "first": start}
            for row, index in enumerate(indices):
                sample = _plain({name: rows[name][row] for name in columns})
                try:
                    sample["image"] = _checked(sample["image"], reencode)
                except SampleError as error:
                    if on_bad_sample == "raise":
                        raise SampleError(
                            f"{store.address}: sample {index}: {error}. Leave such samples out with "
                            "--on-bad-sample skip"
                        ) from None
                    done["skipped"].append(f"sample {index}: {error}")
                    continue
                writer.append(sample)
                digest.add(layout.pack(sample))
                done["samples"] += 1
                done["bytes"] += len(sample["image"])
            yield done
    yield {"samples": 0, "bytes": 0, "skipped": [], "digest": digest.hexdigest(), "first": start}


def digest_of(wanted: Path, file: Path, columns: dict[str, str]) -> str:
    """A task: the digest of a shard as it reads back."""
    check_wanted(wanted)
    store, layout = open_store(file), RecordLayout(columns)
    digest = Fingerprint(columns, store.classes)
    for first in range(0, len(store), CHUNK):
        check_wanted(wanted)
        rows = store.read(np.arange(first, min(len(store), first + CHUNK)), tuple(columns))
        for row in range(len(rows["image"])):
            digest.add(layout.pack({name: rows[name][row] for name in columns}))
    store.close()
    return digest.hexdigest()


def _plain(sample: Sample) -> dict[str, Any]:
    """A sample with values of their columns' types."""
    plain = dict(sample)
    for name, value in sample.items():
        if isinstance(value, bool | np.bool_):
            plain[name] = int(value)
        elif isinstance(value, list | np.ndarray):
            plain[name] = _as_json(value)
    return plain


def _as_json(values: Any) -> str:
    return json.dumps(values, default=np.ndarray.tolist)


def _is_json(value: Any) -> bool:
    if not isinstance(value, list | np.ndarray):
        return False
    try:
        return bool(_as_json(value))
    except TypeError:  # bytes, dates and the like
        return False


def _checked(image: bytes | None, reencode: Reencode | None) -> bytes:
    if not image:
        raise SampleError("it has no bytes")
    if reencode is None or not reencode.short_side:
        return image
    pixels = decode(image, min_side=reencode.short_side)
    return encode_jpeg(resize_short_side(pixels, reencode.short_side), reencode.quality)
