"""Numbers that are drawn under the keys of samples, for a whole micro-batch at once.

A counter-based generator: number j of a sample is a hash of its key and j, and depends on nothing else. So a
micro-batch is drawn in a few calls of NumPy.
"""

from __future__ import annotations

import functools

import numpy as np

# Weyl's constant of SplitMix64 (Steele, Lea & Flood 2014)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DOMAIN = np.uint64(11)
"""Sets these hashes apart from all others under the same keys."""


def uniforms(keys: np.ndarray, num: int) -> np.ndarray:
    """Evenly distributed numbers, float64 (B, num), in [0, 1), multiples of 2^-53.

    Args:
        keys: uint64 (B, 2), one pair for each sample.
    """
    words = _mixed(_mixed(keys[:, :1] ^ _counters(num)) + keys[:, 1:])
    return (words >> np.uint64(11)) * 2.0**-53


@functools.lru_cache
def _counters(num: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return _mixed(np.arange(1, num + 1, dtype=np.uint64) * _GOLDEN ^ _DOMAIN)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3 (Appleby): a bijection of uint64 that flips half of the bits."""
    x = x ^ (x >> np.uint64(33))
    x = x * np.uint64(0xFF51AFD7ED558CCD)
    x = x ^ (x >> np.uint64(33))
    x = x * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def between(u: np.ndarray, limits: tuple[float, float] | np.ndarray) -> np.ndarray:
    """Numbers evenly distributed in [low, high), of uniforms; low and high may differ between columns."""
    low, high = limits
    return low + (high - low) * u


def integers(
    u: np.ndarray, low: np.ndarray | int, high: np.ndarray | int
) -> np.ndarray:
    """Integers, int64, evenly distributed in [low, high], of uniforms."""
    return low + np.floor(u * (np.asarray(high) - low + 1)).astype(np.int64)
