"""What all stores check alike: the indices and columns of a `read`, and the sample names of a folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from raypipe.errors import StoreError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""Suffixes, in lower case, of the files that folder and tar stores take for samples."""

MAX_SAMPLE_BYTES = 1 << 29
"""A file, member or record above this size is no encoded image, and reading it might take all memory: its sample
has the image None. It is the size of 179 million pixels, the decoder's limit, as RGB uncompressed; what unpacks or
joins such a value holds it twice."""


def part_of(bounds: np.ndarray, index: int) -> tuple[int, int]:
    """The part that holds a sample, and its number within it; part i begins with the sample bounds[i]."""
    number = int(np.searchsorted(bounds, index, "right")) - 1
    return number, index - int(bounds[number])


def check_indices(indices: Sequence[int] | np.ndarray, num_samples: int, address: str) -> np.ndarray:
    """Return the indices as int64 of shape (n,).

    Raises:
        IndexError: an index is outside [0, num_samples). Negative ones do not count from the end.
    """
    wanted = np.asarray(indices)
    if wanted.size == 0:
        return np.empty(0, np.int64)
    if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        raise IndexError(f"indices must be integers of shape (n,), not {wanted.dtype} of {wanted.shape}")
    outside = wanted[(wanted < 0) | (wanted >= num_samples)]
    if outside.size:
        raise IndexError(f"index {outside[0]} is outside [0, {num_samples}) of {address}")
    return wanted.astype(np.int64, copy=False)


def check_columns(wanted: Iterable[str], present: Iterable[str], address: str) -> None:
    """Raise StoreError if a column is asked for that the store lacks."""
    present = tuple(present)
    for name in wanted:
        if name not in present:
            raise StoreError(f"{address} has no column {name!r}; its columns are: {', '.join(present)}")


def image_and_label_first(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names with `image`, then `label`, in front, and the others in their given order."""
    first = {"image": 0, "label": 1}
    return tuple(sorted(names, key=lambda name: first.get(name, 2)))
