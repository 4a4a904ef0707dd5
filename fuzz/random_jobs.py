"""Images and jobs of the kernel by chance."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import cv2
import numpy as np
from fuzz_kernel import originals, random_op

from raypipe.kernel import reference
from raypipe.transform.decode.rgb import decode


class Input(NamedTuple):
    """An image, encoded or not, a program, and the pixels that the reference makes."""

    image: bytes | np.ndarray
    ops: np.ndarray
    params: np.ndarray
    expected: np.ndarray


def random_inputs(num: int) -> Iterator[Input]:
    """Of random images and programs, those that the reference takes."""
    jpegs = originals()
    for number in range(num):
        rng = np.random.default_rng([number, 2])
        image: bytes | np.ndarray = jpegs[number % len(jpegs)]
        pixels = decode(image)
        if number % 3:
            size = [int(side) for side in rng.integers(1, 100, 2)]
            image = pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_NEAREST)
        ops, row = list[list[int]](), list[int]()
        for _ in range(int(rng.integers(1, 4))):
            code, params = random_op(rng)
            ops.append([code, len(row)])
            row += [1, *params]
        table = np.array(ops, np.int32).reshape(-1, 2), np.array(row, np.int64)
        with contextlib.suppress(ValueError):
            yield Input(
                image, table[0], table[1][None], reference.apply_all(pixels, *table)
            )
