"""HDF5 files, a source that `raypipe convert` reads once: a dataset of images and one of labels, row by row.

    images   uint8 (N, H, W, 3), (N, H, W, 1) or (N, H, W): pixels
             a list of uint8 of any length (vlen): encoded images
    labels   integers of shape (N,), or of as many axes more as they have one element in

Nothing outside the file is followed: no links to other files, no datasets whose data are elsewhere, no references.

libhdf5 trusts its files: damaged ones make it crash, loop forever, or unpack a chunk to any size. So it runs in a
process of its own, see `serve`, with 1 GiB and 10 s of CPU for an answer: a file that ends this process leads to
one StoreError.
"""

from __future__ import annotations

import importlib.util
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.lookup import to_install
from raypipe.storage.local_file import regular_path
from raypipe.stores.base import MAX_SAMPLE_BYTES, RENAMED, missing

_USUAL = {"image": ("images", "image", "x", "X"), "label": ("labels", "label", "y", "Y")}
_MAX_BYTES = 64 << 20  # of rows that are read at a time: a chunk of them is decompressed once
_READER_BYTES, _READER_CPU_S = 1 << 30, 10.0


def hdf5_samples(address: str | Path, image_column: str = "", label_column: str = "") -> Iterator[dict[str, Any]]:
    """Yield the rows of one local HDF5 file: `image`, encoded bytes or pixels, and `label`.

    Args:
        address: the file.
        image_column: path of the dataset of images in the file; empty = `images`, `image`, `x` or `X`.
        label_column: that of the labels; empty = `labels`, `label`, `y` or `Y`; there may be none of these.
    """
    if importlib.util.find_spec("h5py") is None:
        raise StoreError(f"HDF5 needs h5py: {to_install('hdf5')}")
    connection, other = Pipe()
    program = "import sys; from raypipe.stores import hdf5; hdf5.serve(*sys.argv[1:])"
    try:
        with other, regular_path(address) as path:
            limits = (str(_READER_BYTES), str(_READER_CPU_S))
            arguments = [str(other.fileno()), str(address), path, image_column, label_column, *limits]
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", program, *arguments],
                pass_fds=[other.fileno(), int(Path(path).name)],
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
            )
    except OSError as error:
        raise StoreError(f"{address} cannot be opened as HDF5: {error}") from error
    num_rows = 0
    try:
        while rows := connection.recv():
            if isinstance(rows, str):
                raise StoreError(rows)
            num_rows += len(rows)
            yield from rows
    except (EOFError, OSError):
        process.kill()
        code = process.wait()
        took = f"took more than {_READER_CPU_S:g} s of CPU" if code == -signal.SIGPROF else f"died ({code})"
        where = f"at row {num_rows}" if num_rows else "at its start"
        raise StoreError(
            f"{address} cannot be read as HDF5: libhdf5 {took} {where}. The file is damaged, or made to do that: "
            "copy it again"
        ) from None
    finally:
        process.kill()
        process.wait()
        connection.close()


def serve(
    number: str, address: str, path: str, image_name: str, label_name: str, max_bytes: str, max_cpu_s: str
) -> None:
    """The process that reads. It may use max_bytes more than at its start, and max_cpu_s for each answer; SIGPROF
    ends it.

    It sends lists of samples, and an empty one last; or what is wrong, as text.
    """
    import h5py

    with open("/proc/self/statm") as statm:  # noqa: PTH123
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + int(max_bytes),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(int(number))
    signal.setitimer(signal.ITIMER_PROF, float(max_cpu_s))
    where = f"{address} cannot be opened as HDF5"
    try:
        with h5py.File(path, "r", locking=False) as file:
            where = f"{address} cannot be read as HDF5"
            images = _dataset(file, address, image_name, "image")
            labels = _dataset(file, address, label_name, "label")
            num_at_once = _num_at_once(address, images)
            numbers = None if labels is None else _checked_labels(address, labels, len(images))
            for start in range(0, len(images), num_at_once):
                where = f"{address} cannot be read at row {start}"
                signal.setitimer(signal.ITIMER_PROF, float(max_cpu_s))
                rows = images[start : start + num_at_once]
                found: list[dict[str, Any]] = [{"image": row.tobytes() if row.ndim == 1 else row} for row in rows]
                if numbers is not None:
                    for sample, label in zip(found, numbers[start : start + len(found)], strict=True):
                        sample["label"] = int(label)
                connection.send(found)
        connection.send([])
    except StoreError as error:
        connection.send(str(error))
    except BrokenPipeError:
        pass  # nobody wants the rest
    except Exception as error:
        connection.send(f"{where}: {str(error) or type(error).__name__}; copy it again")


def _dataset(file: Any, address: str, given: str, column: str) -> Any:
    """The dataset of a column, or None if no labels were named and there are none."""
    import h5py

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


def _num_at_once(address: str, images: Any) -> int:
    """How many rows are read at a time; raises StoreError unless they are images."""
    import h5py

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
