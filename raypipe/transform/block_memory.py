"""Memory of blocks, which the next block uses again."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# Bytes. Below, malloc reuses memory.
_LEAST_REUSED = 1 << 20
_ALIGNED = 8  # the widest numbers
# As much as the micro-batches of a block of items have, each its own; or one larger piece, since an actor ships a
# block before it makes the next.
_MAX_SPARE_BYTES = 128 << 20
_spare: deque[mmap.mmap] = deque()


def reused_memory(num_bytes: int) -> np.ndarray:
    """An empty array uint8 (n,); its memory serves the next one of about its size once nobody holds on to it.

    A block's new memory costs 0.1 ms for each image of 224 x 224 pixels: the system clears it page by page.
    """
    if num_bytes < _LEAST_REUSED:
        return np.empty(num_bytes, np.uint8)
    memory = _spare_of(num_bytes)
    if memory is None:
        # Blocks grow: memory of their former sizes would stay for good.
        free_spare(smaller_than=num_bytes)
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Views refer to the array that owns the memory: this one, since a mapping is not an array.
    array = np.frombuffer(memory, np.uint8, num_bytes)
    weakref.finalize(array, _spare_again, memory).atexit = False
    return array


def free_spare(smaller_than: float = math.inf) -> None:
    """Give spare memory back to the system: all, or the pieces below this number of bytes."""
    for memory in _taken():
        if len(memory) >= smaller_than:
            _spare.append(memory)


def free_unused() -> None:
    """Give spare memory back to the system, and what malloc keeps for later calls."""
    free_spare()
    with contextlib.suppress(AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _spare_again(memory: mmap.mmap) -> None:
    _spare.append(memory)
    with contextlib.suppress(IndexError):  # another thread has taken it
        while len(_spare) > 1 and sum(map(len, list(_spare))) > _MAX_SPARE_BYTES:
            _spare.popleft()


def _spare_of(num_bytes: int) -> mmap.mmap | None:
    """Take spare memory of this size, or of up to twice as much, for a block with fewer micro-batches.

    None = there is none, or another thread has taken it.
    """
    for memory in _taken():
        if num_bytes <= len(memory) <= 2 * num_bytes:
            return memory
        _spare.append(memory)
    return None


def _taken() -> Iterator[mmap.mmap]:
    """Take each piece of spare memory out, as far as other threads leave it."""
    for _ in range(len(_spare)):
        with contextlib.suppress(IndexError):
            yield _spare.popleft()


def reused_arrays(
    kinds: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
) -> dict[str, np.ndarray]:
    """Empty arrays of these shapes and dtypes, in one piece of `reused_memory`."""
    lengths = {
        name: math.prod(shape) * dtype.itemsize
        for name, (shape, dtype) in kinds.items()
    }
    memory = reused_memory(sum(map(_aligned, lengths.values())))
    arrays = {}
    for name, (shape, dtype) in kinds.items():
        arrays[name] = memory[: lengths[name]].view(dtype).reshape(shape)
        memory = memory[_aligned(lengths[name]) :]
    return arrays


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
