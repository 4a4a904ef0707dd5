"""Elementary functions whose last bit is the same on every machine.

The C library's exp, sin and cos differ in their last bit between machines, and a last bit can decide a pixel.
These use only IEEE float64 addition, multiplication and rounding to an integer, one NumPy call each, so no
compiler can fuse two of them.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# ln 2 and pi / 2 in parts of at most 33 bits, as fdlibm cuts them: a product with an integer below 2^20 is exact.
_LN2 = (float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33"))
_HALF_PI = tuple(
    float.fromhex(digits)
    for digits in ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69")
)
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")

# Taylor's series, highest power first: their next terms are below 1e-17 within half a ln 2, and within pi / 4.
_EXP = [1 / math.factorial(n) for n in range(13, -1, -1)]
_SIN = [(-1) ** n / math.factorial(2 * n + 1) for n in range(8, -1, -1)]
_COS = [(-1) ** n / math.factorial(2 * n) for n in range(8, -1, -1)]


def exp(x: npt.ArrayLike) -> Floats:
    """Compute e^x to 1e-15 of its value, for x up to 709; below -708 it is 0."""
    exponent = np.asarray(x, np.float64)
    bounded = np.clip(exponent, -708.0, 709.0)
    num_halvings = np.rint(bounded * _LOG2_E)
    remainder = _without(bounded, num_halvings, _LN2)
    return np.where(
        exponent < -708.0,
        0.0,
        np.ldexp(_polynomial(_EXP, remainder), num_halvings.astype(np.int32)),
    )


def sin_cos(x: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Compute sine and cosine to 1e-15, for angles up to a million radians on either side of 0."""
    angle = np.asarray(x, np.float64)
    num_quarters = np.rint(angle * _TWO_OVER_PI)
    remainder = _without(angle, num_quarters, _HALF_PI)
    square = remainder * remainder
    sine = remainder * _polynomial(_SIN, square)
    cosine = _polynomial(_COS, square)
    quarter = num_quarters.astype(np.int64) & 3
    by_quarter = [sine, cosine, -sine, -cosine]
    return np.choose(quarter, by_quarter), np.choose((quarter + 1) & 3, by_quarter)


def _without(x: Floats, num: Floats, parts: tuple[float, ...]) -> Floats:
    """Subtract a multiple of a constant that is given in parts."""
    for term in parts:
        x = x - num * term
    return x


def _polynomial(coefficients: list[float], x: Floats) -> Floats:
    """Evaluate by Horner's rule, highest power first."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
