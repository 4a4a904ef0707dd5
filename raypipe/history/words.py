"""The numbers that a program drew for an image, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from raypipe.kernel import Op, Program, Step

_TURNS = {
    1: "flipped left to right",
    2: "flipped upside down",
    3: "turned by 180 degrees",
    4: "transposed",
    5: "turned right",
    6: "turned left",
    7: "transposed about the other diagonal",
}
_ONE_Q16 = 1 << 16
_ONE_Q32 = 1 << 32


def drawn_words(program: Program, params: np.ndarray) -> list[str]:
    """Return a phrase for each operation that was drawn for an image; those that all images get alike have none.

    Args:
        params: int64 (P,), see `Program.draw`.
    """
    phrases = [
        _phrase(step, op, numbers) for step, op, numbers in program.applied(params)
    ]
    return [phrase for phrase in phrases if phrase]


def _phrase(step: Step, op: Op, numbers: Sequence[int]) -> str:
    if op == Op.CROP:
        top, left, height, width = numbers
        return f"crop {height} x {width} at ({top}, {left})"
    if op == Op.TURN:
        return _TURNS.get(numbers[0], "")
    if op == Op.AFFINE:
        return _affine(numbers)
    if op == Op.DROPOUT:
        number = numbers[3]
        return f"{number} box{'es' if number > 1 else ''} dropped"
    if op == Op.JITTER:
        return _jitter(numbers)
    if op == Op.GRAY:
        return "gray"
    if op == Op.TABLE:
        return _table(step, numbers)
    if op == Op.BLUR:
        return f"blurred within {numbers[0]} px"
    if op == Op.FILTER:
        return f"blurred along a line of {numbers[0]} px"
    return ""  # a resize or a border


def _affine(numbers: Sequence[int]) -> str:
    """The turn and the scale of the map of which an operation has the inverse."""
    a, b, _, d, e, _ = (number / _ONE_Q32 for number in numbers[:6])
    determinant = a * e - b * d
    if not determinant:
        return "mapped to a point"
    scale = 1 / math.sqrt(abs(determinant))
    degrees = math.degrees(math.atan2(b - d, a + e))
    return f"affine, turned by {degrees:.1f} degrees, scaled by {scale:.2f}"


def _jitter(numbers: Sequence[int]) -> str:
    factors = [number / _ONE_Q16 for number in numbers[4:7]]
    hue = numbers[7] / _ONE_Q16 * 60
    names = ("brightness", "contrast", "saturation")
    parts = [
        f"{name} x {factor:.2f}" for name, factor in zip(names, factors, strict=True)
    ]
    return f"{', '.join(parts)}, hue {(hue + 180) % 360 - 180:+.0f} degrees"


def _table(step: Step, numbers: Sequence[int]) -> str:
    if type(step).__name__ == "Solarize":
        return f"solarized from {numbers[1]}"
    return f"posterized to {int(numbers[1]).bit_count()} bits"
