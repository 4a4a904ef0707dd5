"""The operations of a program on an image, which the kernel and the reference carry out alike.

README.md defines each in integers. A program's parameters are int64 (B, P): for each operation in turn,
whether it applies to the image (0 or 1), and the numbers that `NUM_PARAMS` counts.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

MAX_DECODE_BYTES = 5 << 28
"""1.25 GiB: what the decoding of one image may take at a time, the pixels that come out included. Two copies of a
photo of 200 MP as RGB, 16,384 x 12,288 pixels, as phones take them: cv2 holds two, and so does an upright turn."""
MAX_PIXELS = MAX_DECODE_BYTES // 6
"""223,696,213: at two copies as RGB. What takes more has fewer."""
NEAREST, LINEAR, CUBIC = range(3)
"""Interpolations, as OpenCV numbers them."""
MAX_RADIUS = 32
"""Of a separable filter, pixels."""
MAX_FILTER = 15
"""Side of a filter that is not separable, pixels."""


class Op(IntEnum):
    """Codes of the operations; csrc/kernel.c has the same."""

    CROP = 1  # top, left, height, width
    RESIZE = 2  # height, width, interpolation
    PAD = 3  # top, bottom, left, right, border, fill × 3
    TURN = 4  # code, see `geometry_steps.Turn`
    AFFINE = 5  # the matrix of the inverse in Q32 × 6, interpolation, border, fill × 3
    DROPOUT = 6  # fill × 3, number of boxes, (top, left, bottom, right) × that
    JITTER = 7  # order × 4, factors in Q16 × 3, hue in Q16 sextants
    GRAY = 8
    TABLE = 9  # SOLARIZE or POSTERIZE, numbers × 3
    BLUR = 10  # radius, border, coefficients in Q14 × (MAX_RADIUS + 1)
    FILTER = 11  # side, border, coefficients in Q14 × MAX_FILTER²


SOLARIZE = 0
POSTERIZE = 1

NUM_PARAMS = {
    Op.CROP: 4,
    Op.RESIZE: 3,
    Op.PAD: 8,
    Op.TURN: 1,
    Op.AFFINE: 11,
    Op.JITTER: 8,
    Op.GRAY: 0,
    Op.TABLE: 4,
    Op.BLUR: 2 + MAX_RADIUS + 1,
    Op.FILTER: 2 + MAX_FILTER**2,
}
"""Beside `apply`; of a dropout it depends on how many boxes the program draws at most."""


def sizes_behind(op: int, params: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return (height, width) of images after an operation that applies to them, int64 (…, 2).

    Args:
        params: the operation's parameters after `apply`, (…, n).
        sizes: sizes of the images before it, (…, 2).
    """
    if op == Op.CROP:
        return params[..., 2:4]
    if op == Op.RESIZE:
        return params[..., :2]
    if op == Op.PAD:
        return sizes + params[..., [0, 2]] + params[..., [1, 3]]
    if op == Op.TURN:
        return np.where(params[..., :1] & 4, sizes[..., ::-1], sizes)
    return sizes
