"""Coefficients of blurs, for a whole micro-batch: Albumentations' kernels, in integers."""

from __future__ import annotations

import math

import numpy as np

from raypipe.kernel.exact import exp, sin_cos
from raypipe.kernel.ops import MAX_FILTER, MAX_RADIUS

_ONE = 1 << 14  # in Q14
# OpenCV's number of the border that its filters use unless told otherwise
_REFLECT_101 = 4


def gaussian_coefficients(sigma: np.ndarray, side: np.ndarray) -> np.ndarray:
    """Return parameters of a blur, int64 (B, 2 + MAX_RADIUS + 1), see `Op.BLUR`.

    Args:
        sigma: standard deviations, pixels, float64 (B,).
        side: side of the kernels, int64 (B,); 0 = 3.5 standard deviations to each side, as Pillow has it.
    """
    radius = np.where(side == 0, np.floor(sigma * 3.5).astype(np.int64), side // 2)
    distance = np.arange(MAX_RADIUS + 1)
    weights = exp(-0.5 * (distance / sigma[:, None]) ** 2) * (
        distance <= radius[:, None]
    )
    total = weights[:, :1] + 2 * weights[:, 1:].sum(axis=1, keepdims=True)
    coefficients = np.rint(weights / total * _ONE).astype(np.int64)
    # make them add up to 1 after rounding
    coefficients[:, 0] = _ONE - 2 * coefficients[:, 1:].sum(axis=1)
    return np.column_stack([radius, np.full_like(radius, _REFLECT_101), coefficients])


def motion_kernels(
    side: np.ndarray, angle: np.ndarray, direction: np.ndarray, shift: np.ndarray
) -> np.ndarray:
    """Parameters of a filter that blurs along a line, int64 (B, 2 + MAX_FILTER²), see `Op.FILTER`.

    Args:
        side: side of the kernels, odd, int64 (B,).
        angle: angle of the line, degrees, float64 (B,).
        direction: from -1, only backwards, to 1, only forwards.
        shift: shift of the line, as a share of a quarter of the side, float64 (B, 2), (x, y).
    """
    column, row = _cells_of_line(side, angle, direction, shift)
    is_set = np.zeros((len(side), MAX_FILTER**2), bool)
    np.put_along_axis(is_set, row * side[:, None] + column, True, axis=1)
    weight = np.rint(_ONE / is_set.sum(axis=1)).astype(np.int64)
    return np.column_stack(
        [side, np.full_like(side, _REFLECT_101), is_set * weight[:, None]]
    )


def _cells_of_line(
    side: np.ndarray, angle: np.ndarray, direction: np.ndarray, shift: np.ndarray
) -> np.ndarray:
    """Return the cells (column, row) of kernels that points of a line are in, int64 (2, B, MAX_FILTER)."""
    last = side[:, None] - 1
    half = last // 2
    start = -half * np.minimum(1, 1 - direction[:, None])
    end = half * np.minimum(1, 1 + direction[:, None])
    # the line of a small kernel has fewer points than MAX_FILTER: its last one is there several times
    number = np.minimum(np.arange(MAX_FILTER), last)
    along = start + (end - start) * number / last
    sin, cos = sin_cos(angle * (math.pi / 180))
    slope = np.stack([cos, sin])[:, :, None]
    moved = (shift * half / 2).T[:, :, None]
    return np.clip(np.rint(half + slope * along + moved), 0, last).astype(np.int64)
