"""A .npz of numpy arrays, read row by row; arrays of objects, which are pickles, are not opened."""

from __future__ import annotations

import contextlib
import math
import zipfile
from functools import partial
from typing import Any

import numpy as np

from raypipe.errors import SampleError
from raypipe.stores.numbers import read_npy_header
from raypipe.stores.sources.arrays import ArrayRows, arrays_source
from raypipe.stores.sources.format_source import Asked, Source, explained, opened

_KINDS = dict.fromkeys("biuf", "numbers") | {"S": "bytes", "U": "text"}


def open_npz(address: str, asked: Asked) -> Source:
    """Open the arrays of one .npz, each of which is unpacked as its rows are read."""
    stack = contextlib.ExitStack()
    with explained(address):
        archive = stack.enter_context(
            zipfile.ZipFile(stack.enter_context(opened(address)))
        )
        arrays = {
            name.removesuffix(".npy"): _rows(
                address, name, stack.enter_context(archive.open(name))
            )
            for name in archive.namelist()
            if name.endswith(".npy")
        }
        source = arrays_source(address, arrays, asked)
    return source.closing(stack)


def _rows(address: str, name: str, file: Any) -> ArrayRows:
    try:
        shape, fortran, dtype = read_npy_header(file)
    except SampleError:
        return ArrayRows("named fields", ())
    if dtype.hasobject:
        return ArrayRows("a pickle", shape)
    if fortran and len(shape) > 1:
        return ArrayRows(
            "stored with the first axis innermost (save np.ascontiguousarray of it)",
            shape,
        )
    kind = _KINDS.get(dtype.kind)
    if kind is None or (kind != "numbers" and len(shape) != 1):
        return ArrayRows(f"{dtype} values", shape)
    return ArrayRows(kind, shape, dtype, partial(_values, file, dtype, shape[1:]))


def _values(
    file: Any, dtype: np.dtype[Any], row_shape: tuple[int, ...], rows: slice
) -> np.ndarray:
    """Return the next rows."""
    num_rows = rows.stop - rows.start
    content = file.read(num_rows * dtype.itemsize * math.prod(row_shape))
    return np.frombuffer(content, dtype).reshape(num_rows, *row_shape)
