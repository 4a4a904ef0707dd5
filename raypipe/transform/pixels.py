"""Where pixels are, and where they are put: boxes of images, and the memory of blocks."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

Box = tuple[int, int, int, int]
"""(top, left, height, width), pixels of an image, inside it."""

DecodeBox = Callable[[Box], np.ndarray]
"""A box → its pixels, uint8 RGB (h, w, 3), writable; they may come at a reduced scale."""

Undecoded = tuple[tuple[int, int], DecodeBox]
"""(height, width) of an image, pixels, and what decodes a box of it."""


def cut(image: np.ndarray, box: Box) -> np.ndarray:
    """The box of an image; a view."""
    top, left, height, width = box
    return image[top : top + height, left : left + width]


class Room:
    """Where the arrays of k micro-batches are put, one after the other: results are written once, where they are
    shipped from.

    Args:
        count: k.

    Attributes:
        arrays: each (k, B, …), made when the first micro-batch tells their shapes; empty where nothing is put in.
    """

    def __init__(self, count: int = 1) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._count, self._taken = count, 0

    def take(self, make: Callable[[int], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """The arrays (B, …) of the next micro-batch; `make` makes those of k."""
        self.arrays = self.arrays or make(self._count)
        self._taken += 1
        return {name: array[self._taken - 1] for name, array in self.arrays.items()}


# Bytes. Below, malloc has memory at hand.
_LEAST_REUSED = 1 << 20
# One that is being filled, and one that is being shipped.
_spare: deque[mmap.mmap] = deque(maxlen=2)


def reused_memory(shape: tuple[int, ...]) -> np.ndarray:
    """An empty array uint8; its memory serves the next one of its size once nobody holds on to it.

    A block's new memory costs 0.1 ms for each image of 224 x 224 pixels: the system clears it page by page.
    """
    num_bytes = math.prod(shape)
    if num_bytes < _LEAST_REUSED:
        return np.empty(shape, np.uint8)
    memory = None
    with contextlib.suppress(IndexError):  # there is none, or another thread has taken it
        memory = _spare.pop()
    if memory is None or len(memory) != num_bytes:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Views hold on to the array whose memory it is: to this one, since that of a mapping is no array's.
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, _spare.append, memory).atexit = False
    return array.reshape(shape)
