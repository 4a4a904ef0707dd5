"""HDF5 files, as a source for `raypipe ingest`: one dataset of images, and one of labels, row by row.

    images   uint8 (N, H, W, 3), (N, H, W, 1) or (N, H, W): pixels, which are read as PNG, so as they are
             a list of uint8 of any length (vlen): encoded images
    labels   integers of shape (N,), or of as many axes more as they have one element in

What leads out of the file is not followed: links to others, datasets whose data are in others, references.

libhdf5 trusts its files: damaged ones let it crash, go round for ever, or unpack a chunk to any size. So it works
in a process of its own, see `serve`, with 1 GiB and 10 s of CPU for an answer: a file that ends it gives one
StoreError.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.local_file import regular_path
from raypipe.stores.base import MAX_SAMPLE_BYTES, Columns, FileStore

_USUAL = {"image": ("images", "image", "x", "X"), "label": ("labels", "label", "y", "Y")}
_MAX_BYTES = 64 << 20  # of neighbouring rows that are read at a time: a chunk of them is decompressed once
_READER_BYTES, _READER_CPU_S = 1 << 30, 10.0
_NUM_HASHED = 64


class HDF5Store(FileStore["_Reader"]):
    """A store in one local HDF5 file.

    Args:
        address: the file; a relative path is made absolute, since other processes have other folders.
        image_column: path of the dataset of images in the file; empty = `images`, `image`, `x` or `X`.
        label_column: that of the labels; empty = `labels`, `label`, `y` or `Y`, or, where there is none, a store
            without labels.
    """

    def __init__(self, address: str | Path, image_column: str = "", label_column: str = "") -> None:
        super().__init__(address, image_column, label_column)

    def _open(self) -> _Reader:
        return _Reader(self.address, *self._options)

    @property
    def _contents(self) -> _Reader:
        # A forked child opens it anew, and so does the next read after one that the reader has died of.
        if self._opened is not None and (self._opened.pid != os.getpid() or self._opened.connection.closed):
            self._opened = None
        return super()._contents

    def close(self) -> None:
        if self._opened is not None:
            self._opened.end()
        super().close()


class _Reader:
    """A file that a process of its own reads.

    Attributes:
        pid: of the process that opened it, this one.
        process, connection: the one that reads, and the way to it; closed where it has ended.
    """

    classes = groups = None

    def __init__(self, address: str, image_name: str, label_name: str) -> None:
        if importlib.util.find_spec("h5py") is None:
            raise StoreError("HDF5 needs h5py: pip install 'raypipe[hdf5]'")
        self.address, self.pid = address, os.getpid()
        self.connection, other = Pipe()
        program = "import sys; from raypipe.stores import hdf5; hdf5.serve(*sys.argv[1:])"
        try:
            with other, regular_path(address) as path:
                limits = (str(_READER_BYTES), str(_READER_CPU_S))
                arguments = [str(other.fileno()), address, path, image_name, label_name, *limits]
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", program, *arguments],
                    pass_fds=[other.fileno(), int(Path(path).name)],
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
                )
        except OSError as error:
            raise StoreError(f"{address} cannot be opened as HDF5: {error}") from error
        self.end = weakref.finalize(self, _end, self.process, self.connection)
        try:
            self._shape, self._dtype, self._labels = self._answer("while it was opened")
            self._is_list = len(self._shape) == 1
            self._row_bytes = 1 << 20 if self._is_list else math.prod(self._shape[1:])
            if self._row_bytes > MAX_SAMPLE_BYTES:
                raise StoreError(f"{address}: images of {self._shape[1:]} are too large")
        except BaseException:
            self.end()
            raise

    @property
    def columns(self) -> tuple[str, ...]:
        return ("image",) if self._labels is None else ("image", "label")

    @property
    def fingerprint(self) -> str:
        """Hash over the shape and type of the images, all labels, and the images of 64 samples."""
        digest = hashlib.blake2b(repr((self._shape, self._dtype)).encode(), digest_size=16)
        digest.update(b"" if self._labels is None else self._labels.tobytes())
        for row in np.unique(np.linspace(0, len(self) - 1, _NUM_HASHED).astype(int)).tolist():
            for _, pixels in self._rows([row]):
                digest.update(len(pixels).to_bytes(8, "little") + pixels.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self._shape[0]

    def read(self, indices: np.ndarray, columns: tuple[str, ...]) -> Columns:
        result: Columns = {}
        for name in columns:
            if name == "label":
                assert self._labels is not None
                result[name] = self._labels[indices]
            else:
                encode = np.ndarray.tobytes if self._is_list else encode_png
                encoded = {row: encode(value) for row, value in self._rows(np.unique(indices).tolist())}
                result[name] = [encoded[row] for row in indices.tolist()]
        return result

    def sample_name(self, index: int) -> str:
        """The file, and a sample's row in it."""
        return f"{self.address}, row {index}"

    def _rows(self, rows: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield rows, which ascend: pixels, or uint8 of shape (num_bytes,)."""
        most = max(1, _MAX_BYTES // self._row_bytes)
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and rows[stop] == rows[stop - 1] + 1 and stop - start < most:
                stop += 1
            with contextlib.suppress(OSError):  # it has died; what of, the answer says
                self.connection.send((rows[start], rows[stop - 1] + 1))
            found = self._answer(f"at row {rows[start]}")
            sizes = {self._row_bytes} if self._is_list else {row.size for row in found}
            if len(found) != stop - start or sizes != {self._row_bytes}:
                raise StoreError(
                    f"{self.address} cannot be read at row {rows[start]}: it has changed; open it again"
                )
            yield from zip(rows[start:stop], found, strict=True)
            start = stop

    def _answer(self, where: str) -> Any:
        try:
            found = self.connection.recv()
        except (EOFError, OSError):
            self.connection.close()
            self.process.kill()
            code = self.process.wait()
            took = f"took more than {_READER_CPU_S:g} s of CPU" if code == -signal.SIGPROF else f"died ({code})"
            raise StoreError(
                f"{self.address} cannot be read as HDF5: libhdf5 {took} {where}. The file is damaged, or made "
                "to do that: copy it again"
            ) from None
        if isinstance(found, str):
            raise StoreError(found)
        return found


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode uint8 of shape (H, W, 3), (H, W, 1) or (H, W)."""
    import cv2  # not in the process that reads

    # OpenCV has blue first.
    ok, png = cv2.imencode(".png", pixels[..., ::-1] if pixels.ndim == 3 and pixels.shape[2] == 3 else pixels)
    assert ok
    return png.tobytes()


def serve(
    number: str, address: str, path: str, image_name: str, label_name: str, max_bytes: str, max_cpu_s: str
) -> None:
    """The process that reads. It may use max_bytes more than at its start, and max_cpu_s for each answer; SIGPROF
    ends it.

    It sends (shape, dtype, labels) of the file first, then for each (start, stop) those rows; and an error's text
    in place of any.
    """
    import h5py

    with open("/proc/self/statm") as statm:  # noqa: PTH123
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + int(max_bytes),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(int(number))
    signal.setitimer(signal.ITIMER_PROF, float(max_cpu_s))
    try:
        file = h5py.File(path, "r", locking=False)
    except Exception as error:
        return connection.send(f"{address} cannot be opened as HDF5: {error}")
    try:
        images = _dataset(file, address, image_name, "image")
        labels = _dataset(file, address, label_name, "label")
        _check_images(address, images)
        numbers = None if labels is None else _checked_labels(address, labels, images.shape[0])
        connection.send((tuple(map(int, images.shape)), str(images.dtype), numbers))
    except StoreError as error:
        return connection.send(str(error))
    except Exception as error:
        return connection.send(f"{address} cannot be read as HDF5: {error}; copy it again")
    with contextlib.suppress(EOFError):
        while True:
            start, stop = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, float(max_cpu_s))
            try:
                connection.send([np.ascontiguousarray(row, np.uint8) for row in images[start:stop]])
            except Exception as error:
                reason = str(error) or type(error).__name__
                connection.send(f"{address} cannot be read at row {start}: {reason}; copy it again")


def _dataset(file: Any, address: str, given: str, column: str) -> Any:
    """The dataset of a column, or None where none is named and there is none for labels."""
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
    there, names = ", ".join(list(file)[:20]), given or " or ".join(_USUAL[column])
    raise StoreError(f"{address} has no dataset {names!r} for {column}, only: {there}; set {column}_column")


def _check_images(address: str, images: Any) -> None:
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


def _checked_labels(address: str, labels: Any, num_samples: int) -> np.ndarray:
    shape = labels.shape
    is_one_each = bool(shape) and shape[0] == num_samples and all(side == 1 for side in shape[1:])
    if labels.dtype.kind not in "iub" or not is_one_each:
        raise StoreError(
            f"{address}, {labels.name}: {labels.dtype} of {shape}; labels are one integer for each of the "
            f"{num_samples} images; set label_column"
        )
    return labels[...].reshape(num_samples).astype(np.int64)
