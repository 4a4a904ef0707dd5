"""Colors, blurs and filters of the kernel by NumPy: exactly the pixels of csrc/color.h and csrc/filter.h.

Each function takes an image, uint8 (H, W, 3), which it does not write to, and the params behind `apply`, as steps
draw them: it does not check them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raypipe.kernel.ops import SOLARIZE, Op

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
"""What a jitter does, by number."""

Params = Sequence[int]
_ONE = 1 << 16  # in Q16
# NumPy's names of OpenCV's borders, in the order of their numbers
_BORDERS: Any = ("constant", "edge", "symmetric", "wrap", "reflect")


def gray_of(image: np.ndarray) -> np.ndarray:
    """Gray of pixels, int64 (H, W)."""
    r, g, b = image.astype(np.int64).transpose(2, 0, 1)
    return (r * 9798 + g * 19235 + b * 3735 + 16384) >> 15


def jitter(image: np.ndarray, params: Params) -> np.ndarray:
    """Brightness, contrast, saturation (factors in Q16) and hue (Q16 sextants) in an order, -1 for none."""
    for operation in params[:4]:
        if operation == HUE:
            image = _hue(image, params[7])
        elif operation >= 0:
            base: np.ndarray | int = 0
            if operation == CONTRAST:
                values = gray_of(image)
                base = (2 * int(values.sum()) + values.size) // (2 * values.size)
            elif operation == SATURATION:
                base = gray_of(image)[:, :, None]
            image = _blended(image, base, params[4 + operation])
    return image


def _blended(image: np.ndarray, base: np.ndarray | int, factor: int) -> np.ndarray:
    """image * factor + base * (1 - factor)."""
    total = image.astype(np.int64) * factor + base * (_ONE - factor)
    return np.clip((total + 32768) >> 16, 0, 255).astype(np.uint8)


def _hue(image: np.ndarray, shift: int) -> np.ndarray:
    """Turn the hue on the circle of six sextants, exactly but for the last rounding."""
    r, g, b = image.astype(np.int64).transpose(2, 0, 1)
    largest = image.max(axis=2).astype(np.int64)
    chroma = largest - image.min(axis=2)
    hue = np.where(
        largest == r,
        g - b,
        np.where(largest == g, 2 * chroma + b - r, 4 * chroma + r - g),
    )
    circle = np.maximum(6 * chroma << 16, 1)
    turned = (hue << 16) + shift * chroma
    channels = []
    for start in (5, 3, 1):
        k = (turned + start * (chroma << 16)) % circle
        below = np.clip(np.minimum(k, (4 * chroma << 16) - k), 0, chroma << 16)
        channels.append(((largest << 16) - below + 32768) >> 16)
    return np.stack(channels, axis=2).astype(np.uint8)


def gray(image: np.ndarray, params: Params) -> np.ndarray:
    """Return images that are gray in all three channels."""
    return np.repeat(gray_of(image)[:, :, None], 3, axis=2).astype(np.uint8)


def table(image: np.ndarray, params: Params) -> np.ndarray:
    """SOLARIZE: invert values from a threshold on; POSTERIZE: keep the bits of a mask for each channel."""
    kind, *numbers = params[:4]
    if kind == SOLARIZE:
        return np.where(image >= numbers[0], 255 - image, image).astype(np.uint8)
    return image & np.array(numbers, np.uint8)


def bordered(
    image: np.ndarray, sides: Params, border: int, color: Params = (0,)
) -> np.ndarray:
    """Add so many pixels at the top, bottom, left and right, as cv2.copyMakeBorder does."""
    base = np.array(color, np.uint8)
    widths = [sides[:2], sides[2:], (0, 0)]
    # uint8 wraps around, so that the zeros of NumPy's constant border become the color
    return np.pad(image - base, widths, _BORDERS[border]) + base


def blur(image: np.ndarray, params: Params) -> np.ndarray:
    """Separable: radius, border, then the coefficients of the middle and to each side of it, in Q14."""
    radius, border = params[:2]
    middle, *sides = params[2 : 3 + radius]
    taps = np.array([*reversed(sides), middle, *sides], np.int64)
    padded = bordered(image, [radius] * 4, border).astype(np.int64)
    height, width = image.shape[:2]
    across = (
        sum(padded[:, k : k + width] * tap for k, tap in enumerate(taps)) + 32
    ) >> 6
    total = sum(across[k : k + height] * tap for k, tap in enumerate(taps))
    return ((total + (1 << 21)) >> 22).astype(np.uint8)


def filtered(image: np.ndarray, params: Params) -> np.ndarray:
    """side, border, then side * side coefficients in Q14, row by row."""
    side, border = params[:2]
    taps = np.array(params[2 : 2 + side * side], np.int64).reshape(side, side)
    radius = side // 2
    (height, width) = image.shape[:2]
    padded = bordered(image, [radius] * 4, border).astype(np.int64)
    total = sum(
        padded[y : y + height, x : x + width] * taps[y, x]
        for y, x in zip(*np.nonzero(taps), strict=True)
    )
    return np.clip((total + (1 << 13)) >> 14, 0, 255).astype(np.uint8)


COLOR: dict[int, Callable[[np.ndarray, Params], np.ndarray]] = {
    Op.JITTER: jitter,
    Op.GRAY: gray,
    Op.TABLE: table,
    Op.BLUR: blur,
    Op.FILTER: filtered,
}
"""By code."""
