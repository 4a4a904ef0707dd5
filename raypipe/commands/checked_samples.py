"""Reads and decodes samples of a store in full, to find the bad ones.

If a read of many samples fails, smaller parts are read, down to single samples, so only the damaged samples count
as bad. In a store that is read in groups, damage to the images of a group counts for the whole group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import ConfigError, RaypipeError, SampleError
from raypipe.stores.base import Store, name_of
from raypipe.stores.numbers import NPY
from raypipe.stores.scan import spread
from raypipe.transform.columns import NO_COLUMNS, ColumnMaker, SampleColumns
from raypipe.transform.decode.array import decode_any, decode_array
from raypipe.transform.decode.image_header import image_kind
from raypipe.transform.fields import LABEL
from raypipe.transform.samples import WRONG_LABEL
from raypipe.transform.targets import decode_targets

# Encoded samples that a task holds at a time: a few MB of JPEGs, and bounded where single files are large.
_READ = 16
# Places of a store that is read in groups: one sample costs as much as its whole group.
_NUM_PLACES = 8


@dataclass(frozen=True)
class CheckedSample:
    """The result of reading and decoding one sample.

    Attributes:
        kind: the image's format, as `image_kind` names it, "npy", or "unknown".
        num_bytes: size of the encoded image; 0 = no image.
        height, width: pixels of the image; 0 where it cannot be decoded.
        error: why a run cannot use it; "" = it can.
        largest: the largest value of an image of more than 8 bits; 0 = it has 8.
    """

    index: int
    kind: str
    num_bytes: int
    height: int
    width: int
    error: str
    largest: int = 0


def spread_over(store: Store, num_most: int) -> np.ndarray:
    """Indices, int64 (n,), of up to `most` samples, evenly spread; at few places where there are groups."""
    if store.groups is None:
        return spread(len(store), num_most)
    places = spread(len(store), _NUM_PLACES)
    near = places[:, None] + np.arange(num_most // _NUM_PLACES)
    ends = store.groups[np.searchsorted(store.groups, places, side="right")]
    return np.unique(near[near < ends[:, None]])


def check_samples(
    store: Store,
    indices: np.ndarray,
    targets: Mapping[str, str] | None = None,
    of_run: SampleColumns | None = None,
    boxes_format: str = "",
) -> Iterator[CheckedSample]:
    """Read and decode samples of int64 indices (n,) in full, as a run does, targets and columns included."""
    targets = targets or {}
    of_run = of_run or NO_COLUMNS
    maker = ColumnMaker(of_run)
    label = [LABEL] if LABEL in store.schema.names else []
    names = dict.fromkeys(["image", *label, *targets.values(), *of_run.stored])
    for few in np.split(indices, range(_READ, len(indices), _READ)):
        read = [_read_each(store, few, name) for name in names]
        for index, *values in zip(few.tolist(), *read, strict=True):
            sample = dict(zip(names, values, strict=True))
            reason = next((_told(v) for v in values if isinstance(v, Exception)), "")
            sides = (0, 0)
            if not reason and label and sample[LABEL] is None:
                reason = WRONG_LABEL
            if not reason:
                try:
                    maker.one(sample, (index, 0))
                    height, width, _ = decode_any(sample["image"]).shape
                    sides = (height, width)
                    decode_targets(sample, targets, sides, boxes_format)
                except SampleError as error:
                    reason = str(error)
            image = sample["image"]
            image = b"" if isinstance(image, Exception) else bytes(image or b"")
            if not image:
                reason = _broken_link(store, index) or reason
            kind = "npy" if image.startswith(NPY) else image_kind(image) or "unknown"
            largest = 0 if reason else _largest(image)
            yield CheckedSample(index, kind, len(image), *sides, reason, largest)


def _told(error: Exception) -> str:
    if isinstance(error, RaypipeError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _broken_link(store: Store, index: int) -> str:
    """Say that a sample is a link to a file that does not exist; empty if it is none."""
    path = Path(name_of(store, index))
    if path.is_symlink() and not path.exists():
        return f"a broken link, to {path.readlink()}"
    return ""


def _largest(image: bytes) -> int:
    """Return the largest value of a PNG or TIFF of whole numbers of 16 bits; 0 for any other image."""
    is_deep = image_kind(image) == "TIFF" or image[12:16] + image[24:25] == b"IHDR\x10"
    if is_deep:
        with contextlib.suppress(ConfigError, SampleError):  # the extra is missing
            pixels = decode_array(image)
            if pixels.dtype == np.uint16:
                return int(pixels.max())
    return 0


def _read_each(store: Store, indices: np.ndarray, column: str) -> list[Any]:
    """Return the values of one column, all held at a time; an error for each that cannot be read."""
    try:
        return list(store.read(indices, (column,))[column])
    except MemoryError:  # the machine's state, not the samples' fault
        raise
    except Exception as error:  # whatever a damaged file makes a reader raise
        if len(indices) == 1:
            return [error]
    if column == "image" and store.groups is not None:
        groups = np.searchsorted(store.groups, indices, side="right")
        if np.ptp(groups) == 0:
            # they are read together, so one stands for all; each try reads the group again
            (first,) = _read_each(store, indices[:1], column)
            if isinstance(first, Exception):
                return [first] * len(indices)
    halves = np.array_split(indices, 2)
    return [value for half in halves for value in _read_each(store, half, column)]
