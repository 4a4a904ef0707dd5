"""The sizes of images by their headers: one image, or all images of a store, kept in a file next to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.commands.inspection import READ, read_each
from raypipe.commands.tasks import PART, check_wanted, run_over
from raypipe.errors import ConfigError, SampleError
from raypipe.storage.files import check_place
from raypipe.stores.base import Store
from raypipe.stores.scan import SIZE_COLUMNS, sizes_address, write_sizes
from raypipe.transform.decode_array import header_size

NO_SIZE = {"width": -1, "height": -1}


def size_of(image: bytes | memoryview | None, exif: bool = False) -> dict[str, int]:
    """`width` and `height`, in pixels, that `decode`, or else `decode_array`, gives by the header; or NO_SIZE."""
    try:
        height, width = header_size(image, exif)
    except SampleError:
        return NO_SIZE
    return {"width": width, "height": height}


def size_range(
    wanted: Path, store: Store, start: int, stop: int, exif: bool = False
) -> Iterator[tuple[int, np.ndarray]]:
    """A task: yields the first of some samples from start to stop - 1, and their sizes, int32 (n, 2)."""
    for first in range(start, stop, PART):
        indices, sizes = np.arange(first, min(stop, first + PART)), []
        for few in np.split(indices, range(READ, len(indices), READ)):
            check_wanted(wanted)
            images, _ = read_each(store, few, "image")
            sizes += [list(size_of(image, exif).values()) for image in images]
        yield first, np.array(sizes, np.int32)


def add_sizes(store: Store, *, exif: bool = False, progress: bool = True) -> dict[str, Any]:
    """Write the sizes of all images to a file next to their store, on Ray; the store itself stays as it is.

    Args:
        store: at a path or a URI.
        exif: measure images after `transform.apply_exif` has turned them upright.
        progress: show a progress bar on standard error.

    Returns:
        `samples`, `without_size` (how many have none), `width_px` and `height_px` ([least, median, most] of the
        others, None without any), `sizes` (where they are), `seconds`, `images_per_s`.

    Raises:
        ConfigError: the store has sizes, or no place for a file next to it.
        StoreError, ResourceError: see `verify`.
    """
    address, num_samples = sizes_address(store), len(store)
    if set(SIZE_COLUMNS) <= set(store.columns):
        raise ConfigError(f"{store.address} has columns width and height already")
    if not address:
        raise ConfigError(
            f"{store.address}: nothing can be written next to it; `raypipe convert` writes sizes too"
        )
    check_place(address)
    started = time.perf_counter()
    sizes = np.full((num_samples, 2), -1, np.int32)
    parts = run_over("the reading of sizes", store, size_range, (exif,), lambda part: len(part[1]), progress)
    for first, part in parts:
        sizes[first : first + len(part)] = part
    address = write_sizes(store, sizes)
    seconds = time.perf_counter() - started
    known = sizes[sizes[:, 0] >= 0]
    ranges = [[int(f(side)) for f in (np.min, np.median, np.max)] if len(known) else None for side in known.T]
    return {
        "samples": num_samples,
        "without_size": num_samples - len(known),
        "width_px": ranges[0],
        "height_px": ranges[1],
        "sizes": address,
        "seconds": seconds,
        "images_per_s": num_samples / seconds,
    }
