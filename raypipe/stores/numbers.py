"""Exact numbers: casts that raise instead of changing a number, labels of 64 bits, and a strict reader of .npy."""

from __future__ import annotations

import io
import json
import math
import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raypipe.errors import SampleError

NPY = b"\x93NUMPY"
"""First bytes of a .npy file."""
MAX_SAMPLE_BYTES = 1 << 29
"""Largest file, member or record that is read as an image; a larger one, which might take all memory, becomes
None. The limit is the size of 179 million pixels, the decoder's limit, as uncompressed RGB. Unpacking or joining
such a value takes twice as much memory."""
MAX_LABEL = (1 << 63) - 1
"""Largest label: labels are int64."""
_MAX_HEADER_BYTES = 10_000  # numpy's own default
_WHOLE = 2.0**53  # from here on, a float64 may stand for several integers


class InexactError(ValueError):
    """A cast to a dtype would change a number; the message is `the number …, and … cannot hold it`."""


def exactly(values: Any, dtype: npt.DTypeLike | None = None) -> np.ndarray:
    """Return numbers as an array, of a dtype if one is passed: integers keep their values, and floats stay finite.

    Floats may be rounded, for example from float64 to float32.

    Raises:
        InexactError: a number would change.
        ValueError: the values do not form an array.
    """
    array = np.asarray(values)
    if array.dtype.kind == "f" and not isinstance(values, np.ndarray | np.generic):
        # numpy turns integers next to floats into floats, and integers over 63 bits next to negative ones too.
        large = np.abs(array) >= _WHOLE
        for value in np.asarray(values, object)[large].flat if large.any() else ():
            if isinstance(value, int | np.integer) and int(float(value)) != int(value):
                raise InexactError(f"the number {value}, and float64 cannot hold it")
    if dtype is None or array.dtype == dtype or not array.size:
        if dtype is None:
            return array
        return array.astype(dtype, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
        changed = _changed(array, cast)
    if changed.any():
        raise InexactError(
            f"the number {array[changed].flat[0]}, and {cast.dtype} cannot hold it"
        )
    return cast


def stored_numbers(value: Any, raw: str = "") -> np.ndarray:
    """Return numbers that are stored as such, as JSON, as a .npy, or as the little-endian bytes of `raw` ones.

    Raises:
        InexactError: their array would hold others.
        ValueError, TypeError, OverflowError, RecursionError, SampleError: they are none.
    """
    if is_npy(value):
        value = read_npy(value)
    elif isinstance(value, bytes) and raw:
        value = np.frombuffer(value, np.dtype(raw).newbyteorder("<"))
    elif isinstance(value, str | bytes):
        value = json.loads(value)
    numbers = exactly(value)
    if numbers.dtype.kind not in "biuf":
        raise TypeError(f"they are {numbers.dtype}")
    return numbers


def is_npy(value: Any) -> bool:
    """True if a value begins like a .npy."""
    return isinstance(value, bytes) and value.startswith(NPY)


def _changed(array: np.ndarray, cast: np.ndarray) -> np.ndarray:
    """Return whether each number changed in a cast, as bool of the same shape."""
    if array.dtype.kind == "f":
        if cast.dtype.kind == "f":
            return np.isfinite(array) & ~np.isfinite(cast)
        # casting floats to integers is never exact enough
        return np.ones(array.shape, bool)
    if cast.dtype.kind != "f":
        return np.asarray(cast != array)
    # Python compares integers with floats exactly.
    return np.asarray(cast.astype(object) != array.astype(object))


class NpyHeader(NamedTuple):
    """Header of a .npy; `fortran` = the first axis varies fastest, `begin` = offset of the values."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    begin: int


def read_npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of a .npy: shape, whether the first axis varies fastest, dtype.

    Raises:
        SampleError: its arrays have named fields.
        Exception: it is damaged.
    """
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise SampleError(f"a .npy of version {version}, for arrays with named fields")
    return readers[version](file, max_header_size=_MAX_HEADER_BYTES)


def npy_header(data: bytes) -> NpyHeader:
    """Return the header of a .npy of numbers.

    Raises:
        SampleError: it is damaged, is not an array of numbers, or declares more or fewer bytes than it has. The
            error comes before anything of the declared size is allocated.
    """
    file = io.BytesIO(data)
    try:
        shape, fortran, dtype = read_npy_header(file)
    except SampleError:
        raise
    except Exception as error:  # the header is a Python expression, so damage raises MemoryError and other types
        raise SampleError(
            f"damaged .npy: {' '.join(str(error).split())[:200] or type(error).__name__}"
        ) from None
    if dtype.hasobject or dtype.kind not in "biuf" or not 0 < dtype.itemsize <= 8:
        kind = "objects, which need a pickle" if dtype.hasobject else f"{dtype!s:.200}"
        raise SampleError(f"a .npy of {kind}: store integers or floats of 8 to 64 bits")
    value_bytes = len(data) - file.tell()
    num_bytes = math.prod(shape) * dtype.itemsize
    if value_bytes != num_bytes or not all(0 <= side <= sys.maxsize for side in shape):
        damage = "truncated" if value_bytes < num_bytes else "damaged"
        raise SampleError(
            f"{damage} .npy: {value_bytes} bytes after its header, which declares {dtype} of shape {shape!s:.200}"
        )
    return NpyHeader(tuple(map(int, shape)), fortran, dtype, file.tell())


def read_npy(data: bytes, header: NpyHeader | None = None) -> np.ndarray:
    """Return the array of a .npy, writable, C-contiguous, in native byte order; raises like `npy_header`."""
    shape, fortran, dtype, begin = header or npy_header(data)
    values = np.frombuffer(data, dtype, offset=begin)
    try:
        values = values.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:
        # too many axes, or two overlong axes next to an axis of 0
        raise SampleError(f"damaged .npy: {error}") from None
    return np.array(values, dtype.newbyteorder("="), order="C")
