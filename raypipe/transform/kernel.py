"""The compiled kernel, called for a micro-batch at a time: csrc/kernel.c. Without it, it refuses all images.

What it refuses is decoded in Python, and transformed by it as pixels or by `raypipe.transform.reference`. Pixels,
and which samples are bad, are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raypipe import native
from raypipe.config import TransformConfig

Job = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Operations int32 (n, 2), see `Program.ops`; their parameters, int64 (B, P); slots uint8 (B, H, W, 3), in C order
but for the first axis."""


def sizes(images: Sequence[Any], config: TransformConfig) -> np.ndarray:
    """The sizes of encoded images that the kernel may take, by their headers.

    Args:
        images: B, bytes or None.

    Returns:
        (height, width), int32 (B, 2), pixels; zeros for those that it does not take: other formats, unusual
        JPEGs, and those to be turned upright, or decoded at a reduced scale.
    """
    kernel = native.module()
    if kernel is None:
        return np.zeros((len(images), 2), np.int32)
    found = kernel.sizes(images, config.apply_exif, config.decode_min_side or 0)
    return np.frombuffer(found, np.int32).reshape(-1, 2)


def run(images: Sequence[Any], sizes: np.ndarray, jobs: Sequence[Job], threads: int = 1) -> np.ndarray:
    """Make an image of each image in each job's slots.

    Args:
        images: B: bytes of JPEGs, pixels uint8 (H, W, 3) in C order, or None.
        sizes: their (height, width), int32 (B, 2), for which parameters were drawn.
        threads: that share the images.

    Returns:
        bool (B,), which are made in all jobs. The slots of others may hold anything.
    """
    kernel = native.module()
    if kernel is None:
        return np.zeros(len(images), bool)
    # True: files are read to their end, so that damage behind a crop is found.
    statuses = kernel.run(images, np.ascontiguousarray(sizes, np.int32), jobs, threads, True)
    return np.frombuffer(statuses, np.uint8) == 0
