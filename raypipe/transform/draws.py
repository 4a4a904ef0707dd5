"""Numbers that are drawn under the keys of samples, for a whole micro-batch at once.

A counter-based generator: number j of a sample is a hash of its key and j, and depends on nothing else. So a
micro-batch is drawn in a few calls of NumPy.
"""

from __future__ import annotations

import functools

import numpy as np

from raypipe.plan.order import Domain, mix64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # Weyl's constant of SplitMix64 (Steele, Lea & Flood 2014)


def uniforms(keys: np.ndarray, num: int) -> np.ndarray:
    """Evenly distributed numbers, float64 (B, num), in [0, 1), multiples of 2^-53.

    Args:
        keys: uint64 (B, 2), see `Plan.sample_keys`.
    """
    words = mix64(mix64(keys[:, :1] ^ _counters(num)) + keys[:, 1:])
    return (words >> np.uint64(11)) * 2.0**-53


@functools.lru_cache
def _counters(num: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return mix64(np.arange(1, num + 1, dtype=np.uint64) * _GOLDEN ^ np.uint64(Domain.STEPS))


def between(u: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Numbers evenly distributed in [low, high), of uniforms."""
    low, high = limits
    return low + (high - low) * u


def integers(u: np.ndarray, low: np.ndarray | int, high: np.ndarray | int) -> np.ndarray:
    """Integers, int64, evenly distributed in [low, high], of uniforms."""
    return low + np.floor(u * (np.asarray(high) - low + 1)).astype(np.int64)
