"""Keeps samples that can only be read in order, in a store in the cache folder, until they are copied."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from raypipe.errors import StoreError
from raypipe.storage.local_file import make_cache_folder
from raypipe.stores.base import ColumnValues
from raypipe.stores.plain_columns import column_types, plain
from raypipe.stores.sources import Source
from raypipe.stores.sources.format_source import up_to
from raypipe.stores.writers import open_writer

# Samples per read: a few MB of JPEGs.
CHUNK = 64


@contextlib.contextmanager
def kept_samples(source: Source, short_side: int) -> Iterator[Path]:
    """Context manager: the file of a store in the cache folder that keeps the samples, in their order.

    Args:
        source: its samples are taken once. One whose image is None may lack the other columns.
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
            chunks = iter(
                lambda: list(
                    pool.map(with_encoded_image, up_to(samples, CHUNK, _num_bytes))
                ),
                [],
            )
            first = next(chunks, [])
            if not first:
                raise StoreError("the source has no samples")
            columns = columns_of(first, "the samples", short_side, source.arrays)
            blank = {
                name: 0 if kind in ("int64", "float64") else None
                for name, kind in columns.items()
            }
            file = folder / "samples.lmdb"
            with open_writer(file, columns, source.classes) as writer:
                for number, sample in enumerate(
                    itertools.chain(first, itertools.chain.from_iterable(chunks))
                ):
                    if sample["image"] is None:
                        whole = {**blank, **sample}
                    else:
                        whole = sample
                    try:
                        writer.append(plain(whole, columns))
                    except StoreError as error:
                        raise StoreError(f"sample {number}: {error}") from error
                    if number % CHUNK == 0:
                        bar.update(shown, completed=number)
        yield file
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _num_bytes(sample: ColumnValues) -> int:
    """Return the bytes of a sample's image; 0 for what is not known to have any."""
    image = sample.get("image") if isinstance(sample, Mapping) else None
    if isinstance(image, bytes | bytearray):
        return len(image)
    return int(getattr(image, "nbytes", 0))


def columns_of(
    first: Iterable[ColumnValues],
    where: str,
    short_side: int,
    arrays: Collection[str] = (),
) -> dict[str, str]:
    """Return the columns of samples with their types, by the first samples; see `column_types`.

    Args:
        arrays: columns of arrays of one shape.
    """
    values: dict[str, Any] = {}
    for sample in first:
        for name, value in sample.items():
            values.setdefault(name, []).append(value)
    for name in arrays:
        values[name] = np.stack(values[name])
    return column_types(values, where, short_side)


def with_encoded_image(sample: ColumnValues) -> dict[str, Any]:
    """Return a sample with encoded bytes, or None, for its image."""
    import cv2

    if not isinstance(sample, Mapping) or "image" not in sample:
        raise StoreError(
            f"a sample is a mapping of columns, `image` among them, not {sample!r:.200}"
        )
    image = sample["image"]
    if image is None or isinstance(image, bytes | bytearray | memoryview):
        return {**sample, "image": None if image is None else bytes(image)}
    if getattr(image, "mode", "L") not in (
        "L",
        "RGB",
        "F",
        "I",
        "I;16",
    ):
        # Pillow's: a palette, alpha, CMYK
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
    ok, png = cv2.imencode(
        ".png", pixels[..., ::-1] if pixels.shape[2:] == (3,) else pixels
    )
    assert ok
    return {**sample, "image": png.tobytes()}
