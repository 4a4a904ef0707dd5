"""HDF5 files: a data set of images, one of labels, and others of as many rows.

Nothing outside the file is followed: no external or soft links, no data in other files, no references. libhdf5
trusts its files: one that is damaged in its middle may end the process.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from raypipe.storage.filesystem import is_remote
from raypipe.storage.local_file import regular_path
from raypipe.storage.read_limit import check_read
from raypipe.stores.sources.arrays import ArrayRows, arrays_source
from raypipe.stores.sources.format_source import (
    Asked,
    Source,
    explained,
    library,
    opened,
)


def open_hdf5(address: str, asked: Asked) -> Source:
    """Open one HDF5 file; the data sets of groups are named by their paths."""
    h5py = library("h5py", "HDF5")
    stack = contextlib.ExitStack()
    with explained(address):
        content = stack.enter_context(
            opened(address) if is_remote(address) else regular_path(address)
        )
        file = stack.enter_context(h5py.File(content, "r", locking=False))
        arrays: dict[str, ArrayRows] = {}

        def note(name: str, dataset: Any) -> None:
            if isinstance(dataset, h5py.Dataset):
                # a chunk is unpacked whole
                chunk_bytes = math.prod(dataset.chunks or ()) * dataset.dtype.itemsize
                check_read(
                    f"{address}: {name!r}",
                    chunk_bytes,
                    dataset.id.get_storage_size(),
                    "write smaller chunks",
                )
                arrays[name] = _rows(h5py, dataset)

        file.visititems(note)  # hard links only
        source = arrays_source(address, arrays, asked)
    return source.closing(stack)


def _rows(h5py: Any, dataset: Any) -> ArrayRows:
    dtype = dataset.dtype
    shape = dataset.shape or ()
    text = h5py.check_string_dtype(dtype)
    if dataset.is_virtual or dataset.external:
        return ArrayRows("in other files", shape)
    if dtype.kind in "biuf":
        return ArrayRows("numbers", shape, dtype, dataset.__getitem__)
    is_void = dtype.kind == "V" and dtype.names is None
    if text is not None and len(shape) == 1:
        kind = "bytes" if text.encoding == "ascii" else "text"
    elif is_void or h5py.check_vlen_dtype(dtype) == np.uint8:
        kind = "bytes"
    else:
        return ArrayRows(f"{dtype} values", shape)
    return ArrayRows(kind, shape, read=dataset.__getitem__)
