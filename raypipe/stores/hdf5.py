"""HDF5 files, as a source for `raypipe ingest`: one dataset of images, and one of labels, row by row.

    images   uint8 (N, H, W, 3), (N, H, W, 1) or (N, H, W): pixels, which are read as PNG, so as they are
             a list of uint8 of any length (vlen): encoded images
    labels   integers of shape (N,), or of as many axes more as they have one element in

What leads out of the file is not followed: links to others, datasets whose data are in others, references. The
file is read by libhdf5, which trusts its files more than raypipe does its own: take none from strangers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from raypipe.errors import StoreError
from raypipe.local_file import regular_path
from raypipe.stores.base import Columns
from raypipe.stores.checks import MAX_SAMPLE_BYTES, check_columns, check_indices

_IMAGES, _LABELS = ("images", "image", "x", "X"), ("labels", "label", "y", "Y")
_MAX_BYTES = 64 << 20  # of neighbouring rows that are read at a time: a chunk of them is decompressed once
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
        digest = hashlib.blake2b(repr((opened.images.shape, str(opened.images.dtype))).encode(), digest_size=16)
        digest.update(b"" if opened.labels is None else opened.labels.tobytes())
        for row in np.unique(np.linspace(0, len(self) - 1, _NUM_HASHED).astype(int)).tolist():
            for _, pixels in opened.rows(self.address, [row]):
                digest.update(len(pixels).to_bytes(8, "little") + pixels.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return int(self._open().images.shape[0])

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
            encoded = {row: _encoded(value) for row, value in opened.rows(self.address, rows.tolist())}
            result[name] = [encoded[row] for row in wanted.tolist()]
        return result

    def sample_name(self, index: int) -> str:
        """The file, and a sample's row in it."""
        return f"{self.address}, row {index}"

    def close(self) -> None:
        if self._opened is not None:
            self._opened.file.close()
        self._opened = None

    def _open(self) -> _Opened:
        # A forked child opens it anew: libhdf5's state is its parent's.
        if self._opened is None or self._opened.pid != os.getpid():
            self._opened = _open(self.address, *self._names)
        return self._opened


@dataclass
class _Opened:
    """An open file: h5py's dataset of images, and labels, int64 of shape (N,)."""

    file: Any
    images: Any
    labels: np.ndarray | None
    pid: int = field(default_factory=os.getpid)

    def rows(self, address: str, rows: list[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield rows, which ascend: pixels, or uint8 of shape (num_bytes,)."""
        is_list = self.images.ndim == 1
        row_bytes = 1 << 20 if is_list else int(np.prod(self.images.shape[1:]))
        most = max(1, _MAX_BYTES // row_bytes)
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and rows[stop] == rows[stop - 1] + 1 and stop - start < most:
                stop += 1
            try:
                values = self.images[rows[start] : rows[stop - 1] + 1]
            except (OSError, RuntimeError, ValueError) as error:
                raise StoreError(
                    f"{address} cannot be read at row {rows[start]}: {error}; copy it again"
                ) from error
            yield from zip(rows[start:stop], values, strict=True)
            start = stop


def _encoded(value: np.ndarray) -> bytes:
    if value.ndim == 1:
        return value.tobytes()
    # OpenCV has blue first.
    ok, png = cv2.imencode(".png", value[..., ::-1] if value.ndim == 3 and value.shape[2] == 3 else value)
    assert ok
    return png.tobytes()


def _open(address: str, image_name: str, label_name: str) -> _Opened:
    try:
        import h5py
    except ImportError:
        raise StoreError("HDF5 needs h5py: pip install 'raypipe[hdf5]'") from None
    try:
        with regular_path(address) as path:
            file = h5py.File(path, "r", locking=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise StoreError(f"{address} cannot be opened as HDF5: {error}") from error
    try:
        images = _dataset(file, address, image_name, _IMAGES, "image")
        labels = _dataset(file, address, label_name, _LABELS, "label")
        assert images is not None
        _check_images(address, images)
        return _Opened(file, images, None if labels is None else _labels(address, labels, images.shape[0]))
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        file.close()
        raise StoreError(f"{address} cannot be read as HDF5: {error}; copy it again") from error
    except StoreError:
        file.close()
        raise


def _dataset(file: Any, address: str, given: str, usual: tuple[str, ...], column: str) -> Any:
    """The dataset of a column, or None where none is named and there is none for labels."""
    import h5py

    for name in [given] if given else usual:
        found, parts = file, [part for part in name.split("/") if part]
        for part in parts:
            link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
            if link is None:
                found = None
                break
            if not isinstance(link, h5py.HardLink):
                raise StoreError(f"{address}: {name!r} is a link ({type(link).__name__}), which is not followed")
            found = found[part]
        if not isinstance(found, h5py.Dataset):
            continue
        if found.is_virtual or found.external:
            raise StoreError(f"{address}: the data of {name!r} are in other files, which are not read")
        return found
    if not given and column == "label":
        return None
    there, names = ", ".join(list(file)[:20]), given or " or ".join(usual)
    raise StoreError(f"{address} has no dataset {names!r} for {column}, only: {there}; set {column}_column")


def _check_images(address: str, images: Any) -> None:
    import h5py

    shape, of = images.shape, h5py.check_vlen_dtype(images.dtype)
    is_list = shape is not None and len(shape) == 1 and of == np.uint8
    is_pixels = images.dtype == np.uint8 and shape is not None and len(shape) in (3, 4)
    if is_pixels and len(shape) == 4 and shape[3] not in (1, 3):
        is_pixels = False
    if not is_list and not is_pixels:
        raise StoreError(
            f"{address}, {images.name}: {images.dtype} of {shape}; images are uint8 (N, H, W, 3), (N, H, W, 1), "
            "(N, H, W), or lists of uint8, encoded images; set image_column"
        )
    if not all(shape):
        raise StoreError(f"{address}, {images.name} has no samples: {shape}")
    if is_pixels and np.prod([int(side) for side in shape[1:]], dtype=object) > MAX_SAMPLE_BYTES:
        raise StoreError(f"{address}, {images.name}: images of {shape[1:]} are too large")


def _labels(address: str, labels: Any, num_samples: int) -> np.ndarray:
    shape = labels.shape
    if (
        labels.dtype.kind not in "iub"
        or not shape
        or shape[0] != num_samples
        or any(side != 1 for side in shape[1:])
    ):
        raise StoreError(
            f"{address}, {labels.name}: {labels.dtype} of {shape}; labels are one integer for each of the "
            f"{num_samples} images; set label_column"
        )
    return labels[...].reshape(num_samples).astype(np.int64)
