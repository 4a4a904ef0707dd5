"""HDF5 files, a source that `raypipe convert` reads once: a dataset of images and one of labels, row by row.

    images   uint8 (N, H, W, 3), (N, H, W, 1) or (N, H, W): pixels
             a list of uint8 of any length (vlen): encoded images
    labels   integers of shape (N,), or of as many axes more as they have one element in

Nothing outside the file is followed: no links to other files, no datasets whose data are elsewhere, no references.
libhdf5 trusts its files: one that is damaged in its middle may end the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.lookup import to_install
from raypipe.storage.local_file import regular_path
from raypipe.stores.base import MAX_SAMPLE_BYTES, RENAMED, missing

_USUAL = {"image": ("images", "image", "x", "X"), "label": ("labels", "label", "y", "Y")}
_MAX_BYTES = 64 << 20  # of rows that are read at a time: a chunk of them is decompressed once


def hdf5_samples(address: str | Path, image_column: str = "", label_column: str = "") -> Iterator[dict[str, Any]]:
    """Yield the rows of one local HDF5 file: `image`, encoded bytes or pixels, and `label`.

    Args:
        address: the file.
        image_column: path of the dataset of images in the file; empty = `images`, `image`, `x` or `X`.
        label_column: that of the labels; empty = `labels`, `label`, `y` or `Y`; there may be none of these.
    """
    try:
        import h5py
    except ImportError:
        raise StoreError(f"HDF5 needs h5py: {to_install('hdf5')}") from None
    address, where = str(address), f"{address} cannot be opened as HDF5"
    try:
        with regular_path(address) as path, h5py.File(path, "r", locking=False) as file:
            where = f"{address} cannot be read as HDF5"
            images = _dataset(h5py, file, address, image_column, "image")
            labels = _dataset(h5py, file, address, label_column, "label")
            num_at_once = _num_at_once(h5py, address, images)
            numbers = None if labels is None else _checked_labels(address, labels, len(images))
            for start in range(0, len(images), num_at_once):
                where = f"{address} cannot be read at row {start}"
                for number, row in enumerate(images[start : start + num_at_once], start):
                    sample: dict[str, Any] = {"image": row.tobytes() if row.ndim == 1 else row}
                    yield sample if numbers is None else sample | {"label": int(numbers[number])}
    except StoreError:
        raise
    except Exception as error:  # h5py has a type for each of libhdf5's
        raise StoreError(f"{where}: {str(error) or type(error).__name__}; copy it again") from error


def _dataset(h5py: Any, file: Any, address: str, given: str, column: str) -> Any:
    """The dataset of a column, or None if no labels were named and there are none."""
    for name in [given] if given else _USUAL[column]:
        found: Any = file
        for part in filter(None, name.split("/")):
            link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
            if link is not None and not isinstance(link, h5py.HardLink):
                raise StoreError(f"{address}: {name!r} is a link ({type(link).__name__}), which is not followed")
            found = None if link is None else found[part]
        if not isinstance(found, h5py.Dataset):
            continue
        if found.is_virtual or found.external:
            raise StoreError(f"{address}: the data of {name!r} are in other files, which are not read")
        return found
    if not given and column == "label":
        return None
    raise StoreError(
        missing(address, given or " or ".join(_USUAL[column]), list(file), RENAMED[column], "dataset")
    )


def _num_at_once(h5py: Any, address: str, images: Any) -> int:
    """How many rows are read at a time; raises StoreError unless they are images."""
    shape = images.shape
    is_list = shape is not None and len(shape) == 1 and h5py.check_vlen_dtype(images.dtype) == np.uint8
    is_pixels = shape is not None and (len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3)))
    if not is_list and not (is_pixels and images.dtype == np.uint8):
        raise StoreError(
            f"{address}, {images.name}: {images.dtype} of {shape}; images are uint8 (N, H, W, 3), (N, H, W, 1), "
            "(N, H, W), or lists of uint8, encoded images; set image_column"
        )
    if not all(shape):
        raise StoreError(f"{address}, {images.name} has no samples: {shape}")
    row_bytes = 1 << 20 if is_list else math.prod(shape[1:])
    if row_bytes > MAX_SAMPLE_BYTES:
        raise StoreError(f"{address}: images of {shape[1:]} are too large")
    return max(1, _MAX_BYTES // row_bytes)


def _checked_labels(address: str, labels: Any, num_samples: int) -> np.ndarray:
    shape = labels.shape
    is_one_each = bool(shape) and shape[0] == num_samples and all(side == 1 for side in shape[1:])
    if labels.dtype.kind not in "iub" or not is_one_each:
        raise StoreError(
            f"{address}, {labels.name}: {labels.dtype} of {shape}; labels are one integer for each of the "
            f"{num_samples} images; set label_column"
        )
    return np.asarray(labels[...].reshape(num_samples))
