"""The copy of a shard: its images made smaller or seekable and measured, written, and read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from raypipe import kernel
from raypipe.commands.ordered_samples import CHUNK
from raypipe.errors import ConfigError, SampleError, StoreError
from raypipe.kernel import is_seekable
from raypipe.stores import open_store
from raypipe.stores.base import Store, is_class
from raypipe.stores.plain_columns import plain
from raypipe.stores.record import Fingerprint, RecordLayout
from raypipe.stores.scan import SIZE_COLUMNS
from raypipe.stores.writers import open_writer
from raypipe.transform.decode.array import header_size
from raypipe.transform.decode.image_header import image_kind
from raypipe.transform.decode.rgb import decode, encode_jpeg, resize_short_side

NO_SIZE = {"width": -1, "height": -1}

ChunkReport = tuple[int, int, int, list[tuple[int, str]]]
"""What a task has done: how many samples, how many of those written have no known size, bytes of images; and the
indices skipped, each with its reason."""


@dataclass(frozen=True)
class CopySettings:
    """Settings of a copy of samples.

    Attributes:
        sizes, short_side, quality, exif, seekable, on_bad_sample, classes: see `raypipe.convert`.
        columns: all columns of the copy, with their types.
        sized: which of SIZE_COLUMNS are made from the images, and not read.
    """

    sizes: bool = True
    short_side: int = 0
    quality: int = 90
    exif: bool = False
    seekable: bool = False
    on_bad_sample: str = "raise"
    classes: tuple[str, ...] | None = None
    columns: dict[str, str] = field(default_factory=dict)
    sized: tuple[str, ...] = ()

    def of_columns(self, columns: dict[str, str]) -> CopySettings:
        """Return the settings for a source of these columns, to which those of sizes are added."""
        sized = tuple(
            name
            for name in SIZE_COLUMNS
            if self.sizes and (self.short_side or name not in columns)
        )
        written = columns | dict.fromkeys(sized, "int64")
        return replace(self, columns=written, sized=sized)


def write_shard(
    store: Store, file: Path, start: int, stop: int, settings: CopySettings
) -> Iterator[ChunkReport]:
    """A task: writes samples start … stop - 1, yields what it did with each chunk, and reads all of it back.

    Raises:
        SampleError: a sample is bad, and on_bad_sample is "raise".
        StoreError: the shard differs from its samples when it is read back.
    """
    columns = settings.columns
    read = {name: kind for name, kind in columns.items() if name not in settings.sized}
    numbers = None
    if settings.classes is not None:
        numbers = class_numbers(store, settings.classes)
    with open_writer(file, columns, settings.classes or store.classes) as writer:
        for first, samples in _chunks(store, read, start, stop):
            num_without_size = 0
            num_bytes = 0
            skipped = []
            for index, sample in enumerate(samples, first):
                try:
                    size = make_image(sample, settings)
                except SampleError as error:
                    if settings.on_bad_sample == "raise":
                        raise SampleError(
                            f"{store.address}: sample {index}: {error}. Exclude such samples with "
                            "--on-bad-sample skip"
                        ) from None
                    skipped.append((index, f"sample {index}: {error}"))
                    continue
                if numbers is not None:
                    sample["label"] = _label_in(numbers, sample["label"])
                num_without_size += size == NO_SIZE
                writer.append(sample)
                num_bytes += len(sample["image"])
            yield len(samples), num_without_size, num_bytes, skipped
    if shard_fingerprint(file, columns) != writer.fingerprint:
        raise StoreError(
            f"{file} does not read back as it was written: check the disk, and try again"
        )


def make_image(sample: dict[str, Any], settings: CopySettings) -> dict[str, int]:
    """Replace a sample's image by its copy, with its size, and return that size, see `header_sides`.

    Raises:
        SampleError: the sample is bad.
    """
    image = _checked(sample["image"], settings.short_side, settings.quality)
    if settings.seekable:
        image = _made_seekable(image)
    size = header_sides(image, settings.exif)
    sample["image"] = image
    sample |= {name: size[name] for name in settings.sized}
    return size


def class_numbers(store: Store, classes: tuple[str, ...]) -> Sequence[int]:
    """Return what each label of a store is among other classes; raise ConfigError if these cannot name them."""
    reason = ""
    number_of = {name: number for number, name in enumerate(classes)}
    lacking = [name for name in store.classes or () if name not in number_of]
    if "label" not in store.schema.names or not is_class(store):
        reason = "has no integer labels to name: leave it out"
    elif lacking:
        reason = f"has the class {lacking[0]!r} too: add it"
    if reason:
        raise ConfigError(f"classes={classes!r:.200}: {store.address} {reason}")
    if not store.classes:
        return range(len(classes))
    return [number_of[name] for name in store.classes]


def _label_in(numbers: Sequence[int], label: int) -> int:
    """Return the label that a sample has among other classes; raise StoreError if it is none of them."""
    if not 0 <= label < len(numbers):
        raise StoreError(
            f"a sample has the label {label}, and classes names {len(numbers)}: name all of them"
        )
    return numbers[label]


def shard_fingerprint(file: Path, columns: dict[str, str]) -> str:
    """The fingerprint of a shard as it reads back."""
    store = open_store(file)
    layout = RecordLayout(columns)
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
        every = (
            dict(zip(rows, values, strict=True))
            for values in zip(*rows.values(), strict=True)
        )
        yield first, [plain(sample, columns) for sample in every]


def _checked(image: bytes | memoryview | None, short_side: int, quality: int) -> bytes:
    if not image:
        raise SampleError("it has no bytes")
    if not short_side:
        return bytes(image)
    return encode_jpeg(
        resize_short_side(decode(image, min_side=short_side), short_side), quality
    )


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
