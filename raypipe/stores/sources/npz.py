"""A .npz of numpy arrays, read row by row; arrays of objects, which are pickles, are not opened."""

from __future__ import annotations

import contextlib
import math
import zipfile
from functools import partial
from typing import Any

import numpy as np

from raypipe.errors import SampleError, StoreError
from raypipe.stores.numbers import read_npy_header
from raypipe.stores.sources.arrays import ArrayRows, arrays_source
from raypipe.stores.sources.format_source import Asked, Source, explained, opened

_STEP_BYTES = 1 << 20  # unpacked at a time, into the rows' memory


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
        source = arrays_source(address, arrays, asked, "array")
    return source.closing(stack)


def _rows(address: str, name: str, file: Any) -> ArrayRows:
    try:
        shape, fortran, dtype = read_npy_header(file)
    except SampleError:
        return ArrayRows("named fields", ())
    read = partial(_values, file, dtype, shape[1:])
    if dtype.hasobject:
        return ArrayRows("a pickle", shape)
    if fortran and len(shape) > 1:
        return ArrayRows(
            "stored with the first axis innermost (save np.ascontiguousarray of it)",
            shape,
        )
    if dtype.kind == "U":
        if len(shape) == 1:
            return ArrayRows("text", shape, dtype, read)
        return ArrayRows("text in rows", shape)
    if dtype.kind == "S" and len(shape) == 1:
        return ArrayRows("bytes", shape, dtype, read)
    return ArrayRows(
        "numbers" if dtype.kind in "biuf" else f"{dtype} values", shape, dtype, read
    )


def _values(
    file: Any, dtype: np.dtype[Any], row_shape: tuple[int, ...], start: int, stop: int
) -> np.ndarray:
    """Return the next rows; `start` is where the last call ended."""
    num_bytes = (stop - start) * dtype.itemsize * math.prod(row_shape)
    content = np.empty(num_bytes, np.uint8)
    free = content.data
    while free and (num := file.readinto(free[:_STEP_BYTES])):
        free = free[num:]
    if free:
        row = start + (num_bytes - len(free)) * (stop - start) // num_bytes
        raise StoreError(f"{file.name} is truncated in row {row}; copy it again")
    return content.view(dtype).reshape(stop - start, *row_shape)
