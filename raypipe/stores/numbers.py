"""Numbers that stay what they are: casts that change none, labels of 64 bits, .npy that hold what they declare."""

from __future__ import annotations

import io
import math
import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raypipe.errors import SampleError

NPY = b"\x93NUMPY"
"""The bytes that a .npy file starts with."""
_MAX_HEADER_BYTES = 10_000  # numpy's own default
_WHOLE = 2.0**53  # from here on, a float64 may stand for several integers


class InexactError(ValueError):
    """An array of a dtype would hold another number than the one that was given: `the number …, and …`."""


def exactly(values: Any, dtype: npt.DTypeLike | None = None) -> np.ndarray:
    """Numbers as an array, of a dtype where one is given: integers keep their values, and floats stay finite.

    The fractions of floats are rounded, as those of a float64 in float32 must be.

    Raises:
        InexactError: a number would change.
        ValueError: the values make no array.
    """
    array = np.asarray(values)
    if array.dtype.kind == "f" and not isinstance(values, np.ndarray | np.generic):
        # numpy makes floats of integers that stand beside floats, and of those over 63 bits beside negative ones.
        large = np.abs(array) >= _WHOLE
        for value in np.asarray(values, object)[large].flat if large.any() else ():
            if isinstance(value, int | np.integer) and int(float(value)) != int(value):
                raise InexactError(f"the number {value}, and float64 cannot hold it")
    if dtype is None or array.dtype == dtype or not array.size:
        return array if dtype is None else array.astype(dtype, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
        changed = _changed(array, cast)
    if changed.any():
        raise InexactError(f"the number {array[changed].flat[0]}, and {cast.dtype} cannot hold it")
    return cast


def _changed(array: np.ndarray, cast: np.ndarray) -> np.ndarray:
    """Which numbers are others after a cast, bool of their shape."""
    if array.dtype.kind == "f":
        if cast.dtype.kind == "f":
            return np.isfinite(array) & ~np.isfinite(cast)
        return np.ones(array.shape, bool)  # of floats no integers are made
    if cast.dtype.kind != "f" or array.dtype.kind == "b":
        return np.asarray(cast != array)
    wide = cast.astype(np.float64)
    fits = wide < 2.0 ** (8 * array.dtype.itemsize - (array.dtype.kind == "i"))
    return ~fits | (np.where(fits, wide, 0).astype(array.dtype) != array)


def labels_of(values: Any) -> Any:
    """Integer labels as int64 (n,); a list of n where some have no value, or int64 cannot hold them: None."""
    if isinstance(values, np.ndarray) and (values.dtype != np.uint64 or values.max(initial=0) < 1 << 63):
        return values.astype(np.int64, copy=False)
    labels = [None if value is None or not -(1 << 63) <= value < 1 << 63 else int(value) for value in values]
    return labels if None in labels else np.array(labels, np.int64)


class NpyHeader(NamedTuple):
    """What a .npy says of its array: whether the first axis varies fastest, and where the values begin."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    begin: int


def npy_header(data: bytes) -> NpyHeader:
    """The header of a .npy of numbers.

    Raises:
        SampleError: it is damaged, holds something else, or declares more or fewer bytes than there are. Nothing
            of its size has been allocated by then.
    """
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise SampleError(f"a .npy of version {version}, which is for arrays with named fields")
        shape, fortran, dtype = readers[version](file, max_header_size=_MAX_HEADER_BYTES)
    except SampleError:
        raise
    except Exception as error:  # it is a Python expression: MemoryError of a thousand brackets, and the like
        raise SampleError(f"damaged .npy: {' '.join(str(error).split())[:200] or type(error).__name__}") from None
    if dtype.hasobject or dtype.kind not in "biuf" or not 0 < dtype.itemsize <= 8:
        what = "objects, which only a pickle holds" if dtype.hasobject else f"{dtype!s:.200}"
        raise SampleError(f"a .npy of {what}: store integers or floats of 8 to 64 bits")
    there, num_bytes = len(data) - file.tell(), math.prod(shape) * dtype.itemsize
    if there != num_bytes or not all(0 <= side <= sys.maxsize for side in shape):
        damage = "truncated" if there < num_bytes else "damaged"
        raise SampleError(
            f"{damage} .npy: {there} bytes behind its header, and it declares {dtype} of shape {shape!s:.200}"
        )
    return NpyHeader(tuple(map(int, shape)), fortran, dtype, file.tell())


def read_npy(data: bytes, header: NpyHeader | None = None) -> np.ndarray:
    """The array of a .npy, writable, C-contiguous and in native byte order; raises SampleError as `npy_header`."""
    shape, fortran, dtype, begin = header or npy_header(data)
    values = np.frombuffer(data, dtype, offset=begin) if begin < len(data) else np.empty(0, dtype)
    try:
        values = values.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:  # of too many axes, or of two that are too long beside one of 0
        raise SampleError(f"damaged .npy: {error}") from None
    return np.array(values, dtype.newbyteorder("="), order="C")
