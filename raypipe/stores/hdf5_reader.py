"""The process that reads an HDF5 file for `raypipe.stores.hdf5`: libhdf5 may die of a file, or never end.

    python -P hdf5_reader.py ADDRESS PATH IMAGE_COLUMN LABEL_COLUMN MAX_BYTES MAX_CPU_S

It may use MAX_BYTES more than it has at its start, and MAX_CPU_S for each answer; SIGPROF ends it. It imports
nothing of raypipe, so that it starts in a tenth of a second. An answer is its kind, a uint64 length, and bytes:

    at first            J, JSON of shape, dtype, is_labelled; then, if it is, D, the labels, int64
    (start, stop)       D, the length of each row, uint64; then D, the rows; int64 each, on stdin
    any that fails      E, why
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

import h5py
import numpy as np

_IMAGES, _LABELS = ("images", "image", "x", "X"), ("labels", "label", "y", "Y")


class _RefusalError(Exception):
    """What the file has is not read; the message says what, and what to do."""


def main(address: str, path: str, image_name: str, label_name: str, max_bytes: int, max_cpu_s: float) -> None:
    out = os.fdopen(os.dup(1), "wb")
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + max_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    try:
        file = h5py.File(path, "r", locking=False)
    except Exception as error:
        return _send(out, b"E", f"{address} cannot be opened as HDF5: {error}".encode())
    try:
        images = _dataset(file, address, image_name, _IMAGES, "image")
        labels = _dataset(file, address, label_name, _LABELS, "label")
        _check_images(address, images)
        numbers = None if labels is None else _checked_labels(address, labels, images.shape[0])
        found = {"shape": images.shape, "dtype": str(images.dtype), "is_labelled": numbers is not None}
    except _RefusalError as error:
        return _send(out, b"E", str(error).encode())
    except Exception as error:
        return _send(out, b"E", f"{address} cannot be read as HDF5: {error}; copy it again".encode())
    _send(out, b"J", json.dumps(found, default=int).encode())
    if numbers is not None:
        _send(out, b"D", numbers.tobytes())
    while len(asked := sys.stdin.buffer.read(16)) == 16:
        start, stop = struct.unpack("<qq", asked)
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
        try:
            rows = [np.ascontiguousarray(row, np.uint8) for row in images[start:stop]]
        except Exception as error:
            reason = str(error) or type(error).__name__
            _send(out, b"E", f"{address} cannot be read at row {start}: {reason}; copy it again".encode())
            continue
        _send(out, b"D", np.array([row.size for row in rows], np.uint64).tobytes())
        _send(out, b"D", *rows)


def _send(out: BinaryIO, kind: bytes, *parts: Any) -> None:
    out.write(kind + struct.pack("<Q", sum(memoryview(part).nbytes for part in parts)))
    for part in parts:
        out.write(part)
    out.flush()


def _dataset(file: Any, address: str, given: str, usual: tuple[str, ...], column: str) -> Any:
    """The dataset of a column, or None where none is named and there is none for labels."""
    for name in [given] if given else usual:
        found, parts = file, [part for part in name.split("/") if part]
        for part in parts:
            link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
            if link is None:
                found = None
                break
            if not isinstance(link, h5py.HardLink):
                raise _RefusalError(
                    f"{address}: {name!r} is a link ({type(link).__name__}), which is not followed"
                )
            found = found[part]
        if not isinstance(found, h5py.Dataset):
            continue
        if found.is_virtual or found.external:
            raise _RefusalError(f"{address}: the data of {name!r} are in other files, which are not read")
        return found
    if not given and column == "label":
        return None
    there, names = ", ".join(list(file)[:20]), given or " or ".join(usual)
    raise _RefusalError(f"{address} has no dataset {names!r} for {column}, only: {there}; set {column}_column")


def _check_images(address: str, images: Any) -> None:
    shape, of = images.shape, h5py.check_vlen_dtype(images.dtype)
    is_list = shape is not None and len(shape) == 1 and of == np.uint8
    is_pixels = images.dtype == np.uint8 and shape is not None and len(shape) in (3, 4)
    if is_pixels and len(shape) == 4 and shape[3] not in (1, 3):
        is_pixels = False
    if not is_list and not is_pixels:
        raise _RefusalError(
            f"{address}, {images.name}: {images.dtype} of {shape}; images are uint8 (N, H, W, 3), (N, H, W, 1), "
            "(N, H, W), or lists of uint8, encoded images; set image_column"
        )
    if not all(shape):
        raise _RefusalError(f"{address}, {images.name} has no samples: {shape}")


def _checked_labels(address: str, labels: Any, num_samples: int) -> np.ndarray:
    shape = labels.shape
    is_one_each = bool(shape) and shape[0] == num_samples and all(side == 1 for side in shape[1:])
    if labels.dtype.kind not in "iub" or not is_one_each:
        raise _RefusalError(
            f"{address}, {labels.name}: {labels.dtype} of {shape}; labels are one integer for each of the "
            f"{num_samples} images; set label_column"
        )
    return labels[...].reshape(num_samples).astype(np.int64)


if __name__ == "__main__":
    _, own_address, own_path, images_column, labels_column, most_bytes, most_cpu_s = sys.argv
    main(own_address, own_path, images_column, labels_column, int(most_bytes), float(most_cpu_s))
