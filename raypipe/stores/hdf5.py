"""HDF5 files, as a source for `raypipe ingest`: one dataset of images, and one of labels, row by row.

    images   uint8 (N, H, W, 3), (N, H, W, 1) or (N, H, W): pixels, which are read as PNG, so as they are
             a list of uint8 of any length (vlen): encoded images
    labels   integers of shape (N,), or of as many axes more as they have one element in

What leads out of the file is not followed: links to others, datasets whose data are in others, references.

libhdf5 trusts its files: damaged ones let it crash, go round for ever, or unpack a chunk to any size. So it works
in a process of its own, with 1 GiB and 10 s of CPU for an answer: a file that ends it gives one StoreError.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import signal
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.local_file import open_regular
from raypipe.stores.base import MAX_SAMPLE_BYTES, Columns, check_columns, check_indices

_MAX_BYTES = 64 << 20  # of neighbouring rows that are read at a time: a chunk of them is decompressed once
_READER_BYTES, _READER_CPU_S = 1 << 30, 10.0
_NUM_HASHED = 64


class HDF5Store:
    """A store in one local HDF5 file.

    Args:
        address: the file; a relative path is made absolute, since other processes have other folders.
        image_column: path of the dataset of images in the file; empty = `images`, `image`, `x` or `X`.
        label_column: that of the labels; empty = `labels`, `label`, `y` or `Y`, or, where there is none, a store
            without labels.
    """

    def __init__(self, address: str | Path, image_column: str = "", label_column: str = "") -> None:
        self.address = str(Path(address).absolute())
        self._names = (image_column, label_column)
        self._opened: _Opened | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, *self._names)

    @property
    def columns(self) -> tuple[str, ...]:
        return ("image",) if self._open().labels is None else ("image", "label")

    @property
    def classes(self) -> None:
        return None

    @property
    def groups(self) -> None:
        return None

    @property
    def fingerprint(self) -> str:
        """Hash over the shape and type of the images, all labels, and the images of 64 samples."""
        opened = self._open()
        digest = hashlib.blake2b(repr((opened.shape, opened.dtype)).encode(), digest_size=16)
        digest.update(b"" if opened.labels is None else opened.labels.tobytes())
        for row in np.unique(np.linspace(0, len(self) - 1, _NUM_HASHED).astype(int)).tolist():
            for _, pixels in opened.rows([row]):
                digest.update(len(pixels).to_bytes(8, "little") + pixels.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return int(self._open().shape[0])

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Columns:
        """Read samples, see `Store.read`; pixels come as PNG."""
        opened = self._open()
        wanted = check_indices(indices, len(self), self.address)
        check_columns(columns, self.columns, self.address)
        result: Columns = {}
        for name in columns:
            if name == "label":
                assert opened.labels is not None
                result[name] = opened.labels[wanted]
                continue
            rows = np.unique(wanted)
            encoded = {row: _encoded(value) for row, value in opened.rows(rows.tolist())}
            result[name] = [encoded[row] for row in wanted.tolist()]
        return result

    def sample_name(self, index: int) -> str:
        """The file, and a sample's row in it."""
        return f"{self.address}, row {index}"

    def close(self) -> None:
        if self._opened is not None:
            self._opened.end()
        self._opened = None

    def _open(self) -> _Opened:
        # A forked child opens it anew, and so does the next read after one that the reader has died of.
        if self._opened is None or self._opened.pid != os.getpid() or self._opened.has_ended:
            self._opened = _Opened(self.address, *self._names)
        return self._opened


class _Opened:
    """A file that a process of its own reads.

    Attributes:
        shape, dtype: of the images.
        labels: int64 of shape (N,); None where there are none.
        has_ended: the process has.
    """

    def __init__(self, address: str, image_name: str, label_name: str) -> None:
        if importlib.util.find_spec("h5py") is None:
            raise StoreError("HDF5 needs h5py: pip install 'raypipe[hdf5]'")
        self._address, self.pid, self.has_ended = address, os.getpid(), False
        program = Path(__file__).with_name("hdf5_reader.py")
        names, limits = (image_name, label_name), (str(_READER_BYTES), str(_READER_CPU_S))
        try:
            descriptor = open_regular(address)
        except OSError as error:
            raise StoreError(f"{address} cannot be opened as HDF5: {error}") from error
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(program), address, f"/dev/fd/{descriptor}", *names, *limits],
                pass_fds=[descriptor],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
            )
        finally:
            os.close(descriptor)
        self.end = weakref.finalize(self, _end, self._process)
        try:
            found = json.loads(self._answer("while it was opened"))
            self.shape, self.dtype = tuple(map(int, found["shape"])), str(found["dtype"])
            self._is_list = len(self.shape) == 1
            self.labels = None
            if found["is_labelled"]:
                self.labels = np.frombuffer(self._answer("while it was opened"), np.int64)
        except BaseException:
            self.end()
            raise
        self._row_bytes = 1 << 20 if self._is_list else math.prod(self.shape[1:])
        if self._row_bytes > MAX_SAMPLE_BYTES:
            self.end()
            raise StoreError(f"{address}: images of {self.shape[1:]} are too large")

    def rows(self, rows: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield rows, which ascend: pixels, or uint8 of shape (num_bytes,)."""
        most = max(1, _MAX_BYTES // self._row_bytes)
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and rows[stop] == rows[stop - 1] + 1 and stop - start < most:
                stop += 1
            yield from zip(rows[start:stop], self._read(rows[start], rows[stop - 1] + 1), strict=True)
            start = stop

    def _read(self, start: int, stop: int) -> list[np.ndarray]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(struct.pack("<qq", start, stop))
            self._process.stdin.flush()
        except OSError:  # it has died; what of, the answer says
            pass
        sizes = np.frombuffer(self._answer(f"at row {start}"), np.uint64).astype(np.int64)
        values = np.split(np.frombuffer(self._answer(f"at row {start}"), np.uint8), np.cumsum(sizes)[:-1])
        if len(sizes) != stop - start or not (self._is_list or np.all(sizes == self._row_bytes)):
            raise StoreError(f"{self._address} cannot be read at row {start}: it has changed; open it again")
        return values if self._is_list else [value.reshape(self.shape[1:]) for value in values]

    def _answer(self, where: str) -> bytes:
        assert self._process.stdout is not None
        head = self._process.stdout.read(9)
        kind, num_bytes = (head[:1], int.from_bytes(head[1:], "little")) if len(head) == 9 else (b"", 0)
        content = self._process.stdout.read(num_bytes) if num_bytes <= _READER_BYTES else b""
        if kind == b"E":
            raise StoreError(content.decode(errors="replace"))
        if not kind or len(content) < num_bytes:
            self.has_ended = True
            self._process.kill()  # if it lives, and says what it should not
            code = self._process.wait()
            took = f"took more than {_READER_CPU_S:g} s of CPU" if code == -signal.SIGPROF else f"died ({code})"
            raise StoreError(
                f"{self._address} cannot be read as HDF5: libhdf5 {took} {where}. The file is damaged, or made "
                "to do that: copy it again"
            )
        return content


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _encoded(value: np.ndarray) -> bytes:
    if value.ndim == 1:
        return value.tobytes()
    # OpenCV has blue first.
    ok, png = cv2.imencode(".png", value[..., ::-1] if value.ndim == 3 and value.shape[2] == 3 else value)
    assert ok
    return png.tobytes()
