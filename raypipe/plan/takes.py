"""Shares of a store, in the words of `store.take`. Numpy only.

A share is cut from an order of the store's samples: the stored one, or one by hashes of their indices. Of the
latter a training takes the first samples, and a validation the last, so neither moves when the other grows.

    hashed order          4 0 6 2 1 5 3
    training, "50%"       4 0 6
    validation, "2"                 5 3
"""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np

from raypipe.errors import ConfigError
from raypipe.plan.order import Domain, derive_keys, mix64, shuffled
from raypipe.section import shown

BY_CLASS = " by class"
_TAKE = re.compile(
    r"(?:(first|last) )?(\d{1,15}|\d{1,3}(?:\.\d{1,9})?%)(?(1)|(?: by class)?(?: seed (\d{1,9}))?)",
    re.ASCII,
)


def taken(
    words: str, num_samples: int, classes: np.ndarray | None, is_val: bool
) -> np.ndarray:
    """Return whether a share has each sample of a store, bool (N,).

    Args:
        words: the share, such as "10% by class".
        classes: the class of each sample, (N,), for such words.
        is_val: whether it is a validation.

    Raises:
        ConfigError: the words are unknown, or the store has no such share.
    """
    match = _TAKE.fullmatch(words)
    if match is None:
        raise ConfigError(
            'store.take must be words such as "80%", "10000", "first 10000", "last 10%", "10% by class" or '
            f'"10% by class seed 1", got {shown(words)}'
        )
    side, amount, seed = match.groups()
    if amount.endswith("%"):
        size = int(Fraction(amount[:-1]) * num_samples / 100)
    else:
        size = int(amount)
    if not 0 < size <= num_samples:
        raise ConfigError(
            f"store.take {words!r} has {size:,} samples, and the store {num_samples:,}: take from 1 to all"
        )
    order = np.arange(num_samples)
    if not side:
        key = derive_keys(1, int(seed or 0), Domain.TAKE)[0]
        order = shuffled(num_samples, key)
        if classes is not None:
            order = _spread(order, classes, key)
    if side == "last" or (is_val and not side):
        order = order[::-1]
    keep = np.zeros(num_samples, bool)
    keep[order[:size]] = True
    return keep


def _spread(order: np.ndarray, classes: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return an order with each class spread evenly over it, so that each share has its share of the class.

    The samples of a class of n have the places (0 + x) / n, (1 + x) / n, …, each with its own x in [0, 1).
    """
    _, numbers, counts = np.unique(
        classes[order], return_inverse=True, return_counts=True
    )
    grouped = np.argsort(numbers, kind="stable")
    ranks = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    hashes = mix64(grouped.astype(np.uint64) ^ key) / 2.0**64
    places = (ranks + hashes) / np.repeat(counts, counts)
    return order[grouped[np.argsort(places, kind="stable")]]
