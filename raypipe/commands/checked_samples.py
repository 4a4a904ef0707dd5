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
    groups = store.groups
    if groups is None or not len(store):
        return spread(len(store), num_most)
    places = np.linspace(0, len(store) - 1, _NUM_PLACES).astype(np.int64)
    near = places[:, None] + np.arange(num_most // _NUM_PLACES)
    ends = groups[np.searchsorted(groups, places, side="right")]
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
        read = {name: read_each(store, few, name) for name in names}
        for position, index in enumerate(few.tolist()):
            sample = {name: values[position] for name, (values, _) in read.items()}
            reasons = (errors.get(position, "") for _, errors in read.values())
            reason = next(filter(None, reasons), "")
            if label and sample[LABEL] is None:
                reason = reason or WRONG_LABEL
            sides = (0, 0)
            if not reason:
                try:
                    maker.one(sample, (index, 0))
                    sides = _decoded(sample, targets, boxes_format)
                except SampleError as error:
                    reason = str(error)
            image = bytes(sample["image"] or b"")
            if not image:
                reason = _broken_link(store, index) or reason
            largest = 0 if reason else _largest(image)
            yield CheckedSample(
                index, _format(image), len(image), *sides, reason, largest
            )


def _decoded(
    sample: Mapping[str, Any], targets: Mapping[str, str], boxes_format: str
) -> tuple[int, int]:
    """Decode an image and its targets; return the image's height and width."""
    height, width, _ = decode_any(sample["image"]).shape
    decode_targets(sample, targets, (height, width), boxes_format)
    return height, width


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


def read_each(
    store: Store, indices: np.ndarray, column: str
) -> tuple[list[Any], dict[int, str]]:
    """Values of one column, None where they cannot be read, and the reasons, by position; all held at a time."""
    try:
        return list(store.read(indices, (column,))[column]), {}
    except MemoryError:  # the machine's state, not the samples' fault
        raise
    except Exception as error:  # whatever a damaged file makes a reader raise
        if isinstance(error, RaypipeError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
    if len(indices) == 1:
        return [None], {0: reason}
    groups = (
        ()
        if store.groups is None
        else np.unique(np.searchsorted(store.groups, indices, side="right"))
    )
    if column == "image" and len(groups) == 1:
        # The images of a group are read together, so one stands for all; each try reads the group again.
        _, errors = read_each(store, indices[:1], column)
        if errors:
            return [None] * len(indices), dict.fromkeys(range(len(indices)), errors[0])
    half = len(indices) // 2
    first, first_errors = read_each(store, indices[:half], column)
    second, second_errors = read_each(store, indices[half:], column)
    return first + second, first_errors | {
        half + position: reason for position, reason in second_errors.items()
    }


def _format(image: bytes) -> str:
    if image.startswith(NPY):
        return "npy"
    return image_kind(image) or "unknown"
