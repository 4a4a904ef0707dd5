"""What an epoch draws, where that is not each sample once: position → index and repeat, in O(1). Numpy only.

Leaf       one store: pass and position → index, and the how-manieth draw of it
Walk       a leaf through the epochs of a run, pass after pass, whatever an epoch's length
Repeated   each draw k times
Mixture    several leaves by weights, see `raypipe.plan.mixture`

A repeat tells the draws of a sample in an epoch apart, so that each has an augmentation of its own; the first draw
has repeat 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from raypipe.plan.order import Order

Drawn = tuple[np.ndarray, np.ndarray | None]
"""Indices of samples, int64, and, of the same shape, their repeats, int64, which tell the draws of a sample in an
epoch apart; None = all are 0."""


class Draws(Protocol):
    """What the epochs of a run draw."""

    def draws(self, epoch: int, positions: np.ndarray) -> Drawn:
        """The samples at int64 positions (n,) of an epoch, and their repeats."""
        ...


class Leaf(Protocol):
    """Passes over one store.

    Attributes:
        size: draws in a pass.
        copies: a pass draws no sample more often; repeats are below it.
    """

    size: int
    copies: int

    def draws(self, number: int, positions: np.ndarray) -> Drawn:
        """The samples at int64 positions (n,) of a pass, and their repeats."""
        ...


class Once:
    """A leaf of which each pass draws every sample once.

    Args:
        order: of the samples; a pass has the keys that an epoch of this number has.
    """

    copies = 1

    def __init__(self, order: Order) -> None:
        self.order, self.size = order, order.size

    def draws(self, number: int, positions: np.ndarray) -> Drawn:
        """See `Leaf.draws`."""
        return self.order.indices(number, positions), None


def walked(leaf: Leaf, begun: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draws of a leaf by their numbers, int64 (n,), counted through all passes; indices and repeats, int64 (n,).

    Args:
        begun: the number of the epoch's first draw; passes that the epoch takes part in have repeats of their own.
    """
    passes, positions = np.divmod(numbers, leaf.size)
    indices = np.empty(len(numbers), np.int64)
    repeats = (passes - begun // leaf.size) * leaf.copies
    for number in np.unique(passes).tolist():
        inside = passes == number
        indices[inside], again = leaf.draws(number, positions[inside])
        if again is not None:
            repeats[inside] += again
    return indices, repeats


@dataclass(frozen=True)
class Walk:
    """One leaf through the epochs of a run: an epoch goes on where the one before ended.

        passes of 5   a b c d e | c a e b d | …
        epochs of 3   0     | 1     | 2     | …

    Attributes:
        leaf: the store's.
        per_epoch: draws in an epoch.
    """

    leaf: Leaf
    per_epoch: int

    def draws(self, epoch: int, positions: np.ndarray) -> Drawn:
        """See `Draws.draws`."""
        begun = epoch * self.per_epoch
        return walked(self.leaf, begun, begun + positions)


@dataclass(frozen=True)
class Repeated:
    """Each draw k times, each time with a repeat of its own, so that augmentation makes something else of it.

        stride 1, k = 2   a a b b | c c d d     micro-batches of 4: copies stand side by side
        stride 4, k = 2   a b c d | a b c d     copies stand in the same row of neighbouring micro-batches

    Attributes:
        inner: what is repeated.
        times: k.
        stride: draws between two copies.
    """

    inner: Draws
    times: int
    stride: int

    def draws(self, epoch: int, positions: np.ndarray) -> Drawn:
        """See `Draws.draws`."""
        run, place = np.divmod(positions, self.stride)
        run, copy = np.divmod(run, self.times)
        indices, repeats = self.inner.draws(epoch, run * self.stride + place)
        return indices, copy if repeats is None else repeats * self.times + copy
