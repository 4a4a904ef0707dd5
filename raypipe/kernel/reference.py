"""Geometry of the kernel by NumPy: exactly the pixels of csrc/geometry.h and csrc/resize.h.

Each function takes an image, uint8 (H, W, 3), which it does not write to, and the params behind `apply`, as steps
draw them. It raises ValueError for a crop that the image has no room for, and for a result that is too large. A
node without the extension runs them; tests hold the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raypipe.kernel.opencv import cv2
from raypipe.kernel.ops import CUBIC, MAX_PIXELS, NEAREST, Op
from raypipe.kernel.reference_color import COLOR, Params, bordered

Operation = Callable[[np.ndarray, Params], np.ndarray]

_MAX_SIDE = 65_500  # pixels, MAX_SIDE of csrc/image.h
_COEFFICIENT_BITS = 11
_CONSTANT, _REPLICATE, _REFLECT, _WRAP, _REFLECT_101 = range(
    5
)  # borders, as OpenCV numbers them


def crop(image: np.ndarray, params: Params) -> np.ndarray:
    """Cut out a box: top, left, height, width. A view."""
    top, left, height, width = params[:4]
    rows, columns = image.shape[:2]
    if not (0 <= top <= rows - height and 0 <= left <= columns - width):
        sizes = f"{(height, width)} vs {(rows, columns)}"
        raise ValueError(f"Crop size (height, width) exceeds image dimensions: {sizes}")
    return image[top : top + height, left : left + width]


def resize(image: np.ndarray, params: Params) -> np.ndarray:
    """Resize to height, width by an interpolation: cv2.resize, but for cubic, which is in integers here."""
    height, width, interpolation = params[:3]
    _check_size(height, width)
    if cv2 is not None and interpolation != CUBIC:
        return cv2.resize(image, (width, height), interpolation=interpolation)
    if interpolation == NEAREST:
        return nearest(image, height, width)
    if image.shape[:2] == (height, width):
        return image
    is_cubic = interpolation == CUBIC
    rows, by_row = _taps(image.shape[0], height, is_cubic)
    columns, by_column = _taps(image.shape[1], width, is_cubic)
    across = np.sum([image[:, columns[k]] * by_column[k][:, None] for k in range(4)], 0)
    # 16 bits, of which 7 or 6 are a fraction
    kept = (across + 16) >> 5 if is_cubic else across >> 4
    parts = [kept[rows[k]] * by_row[k][:, None, None] for k in range(4)]
    if is_cubic:
        total = (np.sum(parts, 0) + (1 << 16)) >> 17
    else:
        total = (sum(part >> 16 for part in parts) + 2) >> 2
    return np.clip(total, 0, 255).astype(np.uint8)


def nearest(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize an image, or a mask (H, W), without mixing its pixels."""
    rows = np.arange(height) * (1 / (height / image.shape[0]))
    columns = np.arange(width) * (1 / (width / image.shape[1]))
    return image[np.ix_(rows.astype(int), columns.astype(int))]


def _taps(source: int, result: int, is_cubic: bool) -> tuple[np.ndarray, np.ndarray]:
    """Source positions and int32 coefficients of 11 bits, (4, result) each: floats as OpenCV rounds them."""
    scale = 1.0 / (result / source)
    coordinate = ((np.arange(result) + 0.5) * scale - 0.5).astype(np.float32)
    first = np.floor(coordinate)
    x = coordinate - first
    weights = _cubic(x) if is_cubic else [0 * x, 1 - x, x, 0 * x]
    coefficients = np.rint(np.stack(weights) * (1 << _COEFFICIENT_BITS))
    assert coefficients.dtype == np.float32
    positions = first.astype(np.int64) + np.arange(-1, 3)[:, None]
    return positions.clip(0, source - 1), coefficients.astype(np.int32)


def _cubic(x: np.ndarray) -> list[np.ndarray]:
    """Weights with A = -0.75; OpenCV's own floats make pixels that differ by 1 level at most."""
    a = -0.75

    def near(distance: np.ndarray) -> np.ndarray:
        return ((a + 2) * distance - (a + 3)) * distance * distance + 1

    c0 = ((a * (x + 1) - 5 * a) * (x + 1) + 8 * a) * (x + 1) - 4 * a
    c1 = near(x)
    c2 = near(1 - x)
    return [c0, c1, c2, 1 - c0 - c1 - c2]


def pad(image: np.ndarray, params: Params) -> np.ndarray:
    """Add borders: top, bottom, left, right, border (cv2's number), r, g, b."""
    top, bottom, left, right, border = params[:5]
    _check_size(image.shape[0] + top + bottom, image.shape[1] + left + right)
    return bordered(image, params[:4], border, params[5:8])


def turn(image: np.ndarray, params: Params) -> np.ndarray:
    """Transpose if code & 4, then turn upside down if code & 2, then reverse the columns if code & 1."""
    code = params[0]
    if code & 4:
        image = image.transpose(1, 0, 2)
    return np.ascontiguousarray(
        image[:: -1 if code & 2 else 1, :: -1 if code & 1 else 1]
    )


def affine(image: np.ndarray, params: Params) -> np.ndarray:
    """Pixel (X, Y) comes from x = a X + b Y + c, y = d X + e Y + f, Q32; interpolation, border, r, g, b."""
    interpolation = params[6]
    border = params[7]
    color = params[8:11]
    a, b, c, d, e, f = np.array(params[:6], np.int64)
    rows = np.arange(image.shape[0])[:, None]
    columns = np.arange(image.shape[1])
    with np.errstate(over="ignore"):  # they wrap around as in C
        x = a * columns + (b * rows + c)
        y = d * columns + (e * rows + f)
    if interpolation == NEAREST:
        x += 1 << 31
        y += 1 << 31
    x0 = x >> 32
    y0 = y >> 32

    def neighbors(right: int, below: int) -> np.ndarray:
        column = _border_at(x0 + right, image.shape[1], border)
        row = _border_at(y0 + below, image.shape[0], border)
        pixels = image[row, column]
        pixels[(row < 0) | (column < 0)] = np.array(color, np.uint8)
        return pixels

    if interpolation == NEAREST:
        return neighbors(0, 0)
    fx = _fraction_q10(x)
    fy = _fraction_q10(y)
    above = neighbors(0, 0) * (1024 - fx) + neighbors(1, 0) * fx
    below = neighbors(0, 1) * (1024 - fx) + neighbors(1, 1) * fx
    return ((above * (1024 - fy) + below * fy + (1 << 19)) >> 20).astype(np.uint8)


def _fraction_q10(coordinate: np.ndarray) -> np.ndarray:
    """Return the fraction of a coordinate in Q32 as a factor of pixels, int32 (H, W, 1) in Q10."""
    return (coordinate >> 22 & 1023).astype(np.int32)[:, :, None]


def dropout(image: np.ndarray, params: Params) -> np.ndarray:
    """Fill boxes: r, g, b, their number, then top, left, bottom, right of each, clipped to the image."""
    num = params[3]
    image = image.copy()
    for hole in range(num):
        top, left, bottom, right = (
            max(0, edge) for edge in params[4 + 4 * hole : 8 + 4 * hole]
        )
        image[top:bottom, left:right] = np.array(params[:3], np.uint8)
    return image


OPERATIONS: dict[int, Operation] = {
    Op.CROP: crop,
    Op.RESIZE: resize,
    Op.PAD: pad,
    Op.TURN: turn,
    Op.AFFINE: affine,
    Op.DROPOUT: dropout,
    **COLOR,
}
"""By code."""


def apply_all(image: np.ndarray, ops: np.ndarray, params: np.ndarray) -> np.ndarray:
    """Carry out a program on one image: ops int32 (n, 2), params int64 (P,), see `raypipe.kernel.ops`."""
    for code, offset in ops.tolist():
        if params[offset]:
            image = OPERATIONS[code](image, params[offset + 1 :].tolist())
    return np.ascontiguousarray(image)


def _border_at(coordinate: np.ndarray, side: int, border: int) -> np.ndarray:
    """Return where pixels beyond the image come from, as cv2.borderInterpolate has it; -1 = the constant."""
    if border == _CONSTANT:
        return np.where((coordinate >= 0) & (coordinate < side), coordinate, -1)
    if border == _REPLICATE:
        return coordinate.clip(0, side - 1)
    period = np.arange(side)
    if border == _REFLECT:
        period = np.append(period, period[::-1])
    elif border == _REFLECT_101:
        period = np.append(period, period[-2:0:-1])
    return period[coordinate % len(period)]


def _check_size(height: int, width: int) -> None:
    if max(height, width) > _MAX_SIDE or height * width > MAX_PIXELS:
        raise ValueError(f"an operation makes an image of {height}x{width} pixels")
