"""The copy of samples: made smaller or seekable and measured, written as a shard, and read back."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raypipe import kernel
from raypipe.errors import ConfigError, SampleError, StoreError
from raypipe.kernel import is_seekable
from raypipe.storage.files import RemoteFile
from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_file import make_cache_folder
from raypipe.storage.retries import in_threads
from raypipe.stores import open_store
from raypipe.stores.base import ColumnValues, Store
from raypipe.stores.destination import put_shard
from raypipe.stores.plain_columns import plain
from raypipe.stores.record import Fingerprint, RecordLayout
from raypipe.stores.scan import SIZE_COLUMNS
from raypipe.stores.writers import FileWriter, open_writer
from raypipe.transform.decode.array import header_size
from raypipe.transform.decode.image_header import image_kind
from raypipe.transform.decode.rgb import decode, encode_jpeg, resize_short_side

NO_SIZE = {"width": -1, "height": -1}

CHUNK = 64
"""Samples per read: a few MB of JPEGs."""

# A shard is small enough to be copied and cached as one object, and large enough to be few.
SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class CopySettings:
    """Settings of a copy of samples.

    Attributes:
        sizes, short_side, quality, exif, seekable, on_bad_sample: see `raypipe.convert`.
        source: where the samples come from, for errors.
        dst: a URI, or the local folder of the new shards.
        suffix: suffix of the shards.
        classes: class names by label.
        numbers: the number among `classes` of each label of the source; None = the same.
        columns: all columns of the copy, with their types.
        sized: which of SIZE_COLUMNS are made from the images, and not read.
        num_threads: threads of a task that make images.
    """

    sizes: bool = True
    short_side: int = 0
    quality: int = 90
    exif: bool = False
    seekable: bool = False
    on_bad_sample: str = "raise"
    source: str = ""
    dst: str = ""
    suffix: str = ""
    classes: tuple[str, ...] | None = None
    numbers: Sequence[int] | None = None
    columns: dict[str, str] = field(default_factory=dict)
    sized: tuple[str, ...] = ()
    num_threads: int = 1

    def of_columns(self, columns: dict[str, str]) -> CopySettings:
        """Return the settings for a source of these columns, to which those of sizes are added."""
        sized = tuple(
            name
            for name in SIZE_COLUMNS
            if self.sizes and (self.short_side or name not in columns)
        )
        written = columns | dict.fromkeys(sized, "int64")
        return replace(self, columns=written, sized=sized)


class Made(NamedTuple):
    """A sample as it is written.

    Attributes:
        record: see `raypipe.stores.record`.
        num_bytes: size of its image.
        has_size: whether the size of its image is known.
    """

    record: bytes
    num_bytes: int
    has_size: bool


class Report(NamedTuple):
    """A part of a task's work.

    Attributes:
        samples: how many it has looked at.
        without_size: how many of those written have no known size.
        num_bytes: bytes of images written.
        skipped: indices of the others, each with its reason.
        shard: the number and the file of a finished shard.
    """

    samples: int = 0
    without_size: int = 0
    num_bytes: int = 0
    skipped: tuple[tuple[int, str], ...] = ()
    shard: tuple[int, str | RemoteFile] | None = None


def write_shard(
    rows: Callable[[], Iterator[ColumnValues]],
    first: int,
    number: int,
    settings: CopySettings,
) -> Iterator[Report]:
    """A task: writes samples as a shard, yields what it did with each chunk, reads all back, and yields the shard.

    Args:
        first: index of the first sample.
        number: the shard's.

    Raises:
        SampleError: a sample is bad, and on_bad_sample is "raise".
        StoreError: the shard differs from its samples when it is read back.
    """
    columns = settings.columns
    with shards_folder(settings.dst) as folder:
        file = folder / f"{number:05d}{settings.suffix}"
        # a task that died may have left it
        file.unlink(missing_ok=True)
        with open_writer(file, columns, settings.classes) as writer:
            samples = rows()
            while chunk := list(itertools.islice(samples, CHUNK)):
                yield _append(writer, chunk, first, settings)
                first += len(chunk)
        if not writer.num_written:
            file.unlink()
            return
        if shard_fingerprint(file, columns) != writer.fingerprint:
            raise StoreError(
                f"{file} does not read back as it was written: check the disk, and try again"
            )
        shard: str | RemoteFile = file.name
        if is_remote(settings.dst):
            shard = put_shard(file, settings.dst, number)
        yield Report(shard=(number, shard))


@contextlib.contextmanager
def shards_folder(dst: str) -> Iterator[Path]:
    """Context manager: the folder that shards are written to, a temporary one before an upload."""
    if not is_remote(dst):
        yield Path(dst)
        return
    cache = make_cache_folder()
    with tempfile.TemporaryDirectory(dir=cache, prefix="convert-") as folder:
        yield Path(folder)


def _append(
    writer: FileWriter, chunk: list[ColumnValues], first: int, settings: CopySettings
) -> Report:
    """Make and write samples; raise the error of one that is not skipped."""
    num_bytes = 0
    without_size = 0
    skipped = []
    do = partial(make, settings=settings, layout=writer.layout)
    samples = list(enumerate(chunk, first))
    made: Iterable[Made | str] = map(do, samples)
    if settings.num_threads > 1:
        made = in_threads(do, samples, settings.num_threads)
    for (index, _), sample in zip(samples, made, strict=True):
        if isinstance(sample, str):
            skipped.append((index, sample))
            continue
        writer.append_record(sample.record)
        num_bytes += sample.num_bytes
        without_size += not sample.has_size
    return Report(len(chunk), without_size, num_bytes, tuple(skipped))


def make(
    numbered: tuple[int, ColumnValues], settings: CopySettings, layout: RecordLayout
) -> Made | str:
    """Return a sample, next to its index, as it is written, or why it is skipped; raise its error otherwise."""
    index, sample = numbered
    try:
        image = _made_image(image_of(sample), settings)
        size = header_sides(image, settings.exif)
        sizes = {name: size[name] for name in settings.sized}
        values = plain({**sample, "image": image, **sizes}, settings.columns)
        if (numbers := settings.numbers) is not None:
            label = values.get("label")
            if label is None or not 0 <= label < len(numbers):
                raise StoreError(
                    f"a sample has the label {label}, and classes names {len(numbers)}: name all of them"
                )
            values["label"] = numbers[label]
        return Made(layout.pack(values), len(image), size != NO_SIZE)
    except StoreError as error:
        raise StoreError(f"{settings.source}: sample {index}: {error}") from None
    except SampleError as error:
        reason = f"sample {index}: {error}"
        if settings.on_bad_sample == "skip":
            return reason
        raise SampleError(
            f"{settings.source}: {reason}. Exclude such samples with --on-bad-sample skip"
        ) from None


def image_of(sample: ColumnValues) -> bytes | np.ndarray | None:
    """Return a sample's image, encoded or pixels; raise StoreError if it cannot have one."""
    if not isinstance(sample, Mapping) or "image" not in sample:
        raise StoreError(
            f"a sample is a mapping of columns, `image` among them, not {sample!r:.200}"
        )
    image = sample["image"]
    if image is None or isinstance(image, bytes):
        return image
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    if getattr(image, "mode", "L") not in ("L", "RGB", "F", "I", "I;16"):
        # Pillow's: a palette, alpha, CMYK
        image = image.convert("RGB")
    pixels = np.asarray(image)
    if (
        not pixels.size
        or pixels.dtype != np.uint8
        or pixels.ndim < 2
        or pixels.shape[2:] not in ((), (1,), (3,))
    ):
        raise StoreError(
            f"an image is {pixels.dtype} of {pixels.shape}; images are encoded bytes, or uint8 (H, W, 3), "
            "(H, W, 1) or (H, W)"
        )
    return pixels


def _made_image(image: bytes | np.ndarray | None, settings: CopySettings) -> bytes:
    """Return an image as it is written; raise SampleError if it is bad."""
    if isinstance(image, np.ndarray):
        image = _png(image)
    if not image:
        raise SampleError("it has no bytes")
    if short_side := settings.short_side:
        pixels = resize_short_side(decode(image, min_side=short_side), short_side)
        image = encode_jpeg(pixels, settings.quality)
    return _made_seekable(image) if settings.seekable else image


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    gray_or_rgb = pixels[:, :, 0] if pixels.shape[2:] == (1,) else pixels
    Image.fromarray(gray_or_rgb).save(file, "PNG")
    return file.getvalue()


def class_numbers(
    source: str,
    are_classes: bool,
    stored: Sequence[str] | None,
    classes: tuple[str, ...],
) -> Sequence[int]:
    """Return what each label of a source is among other classes; raise ConfigError if these cannot name them.

    Args:
        are_classes: whether the source has labels, and they are integers.
        stored: its own class names.
    """
    reason = ""
    number_of = {name: number for number, name in enumerate(classes)}
    named = stored or classes
    lacking = [name for name in named if name not in number_of]
    if len(number_of) < len(classes):
        reason = "needs a different name for each label"
    elif not are_classes:
        reason = "has no integer labels to name: leave it out"
    elif lacking:
        reason = f"has the class {lacking[0]!r} too: add it"
    if reason:
        raise ConfigError(f"classes={classes!r:.200}: {source} {reason}")
    return [number_of[name] for name in named]


def num_shards(num_samples: int, num_bytes: int, num_cpus: int) -> int:
    """Return the number of shards: of 1 GiB each, and enough to use all CPUs."""
    by_size = math.ceil(num_bytes / SHARD_BYTES)
    return max(1, by_size, min(num_cpus, num_samples // 1000))


def shard_fingerprint(file: Path, columns: dict[str, str]) -> str:
    """The fingerprint of a shard as it reads back."""
    store = open_store(file)
    layout = RecordLayout(columns)
    digest = Fingerprint(columns, store.classes)
    for sample in samples_in(store, columns, 0, len(store)):
        digest.add(layout.pack(plain(sample, columns)))
    store.close()
    return digest.hexdigest()


def samples_in(
    store: Store, columns: Iterable[str], first: int, stop: int
) -> Iterator[dict[str, Any]]:
    """Yield samples first … stop - 1 of a store."""
    for start in range(first, stop, CHUNK):
        rows = store.read(np.arange(start, min(stop, start + CHUNK)), tuple(columns))
        yield from rows.samples()


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
    if np.array_equal(decode(seekable), pixels):
        return seekable
    return image


def header_sides(image: bytes, exif: bool = False) -> dict[str, int]:
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
