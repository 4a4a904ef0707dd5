"""What an epoch draws, where that is not each sample once: position → index and repeat, in O(1). Numpy only.

Leaf       one store, or a bucket of it: pass and position → index, and the how-manieth draw of it
Part       what a run draws from on and on: number of the draw → index and repeat
Passes     a leaf as a part, pass after pass
Mixture    several parts by weights, see `raypipe.plan.mixture`
Walk       a part, cut into epochs of any length
Repeated   each draw k times

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

    def buckets(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The buckets of these draws, int64 (n,); 0 where there are none."""
        ...


class Part(Protocol):
    """What is drawn from through a run."""

    def drawn(self, begun: int, numbers: np.ndarray) -> Drawn:
        """The draws with these numbers, int64 (n,), counted through the run; their epoch's first is `begun`."""
        ...

    def buckets_of(self, numbers: np.ndarray) -> np.ndarray:
        """The buckets of these draws, int64 (n,); 0 where there are none."""
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

    def buckets(self, number: int, positions: np.ndarray) -> np.ndarray:
        """The buckets of these draws, int64 (n,); 0 where there are none."""
        return np.zeros(len(positions), np.int64)


class Once(Leaf):
    """A leaf of which each pass draws every sample once.

    Args:
        order: of the samples; a pass has the keys that an epoch of this number has.
    """

    def __init__(self, order: Order) -> None:
        self.order, self.size, self.copies = order, order.size, 1

    def draws(self, number: int, positions: np.ndarray) -> Drawn:
        """See `Leaf.draws`."""
        return self.order.indices(number, positions), None


@dataclass(frozen=True)
class Passes:
    """A leaf, pass after pass; passes that an epoch takes part in have repeats of their own.

    Attributes:
        leaf: of a store.
        offset: of the store's samples among those of all stores.
    """

    leaf: Leaf
    offset: int = 0

    def drawn(self, begun: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Part.drawn`."""
        leaf = self.leaf
        passes, positions = np.divmod(numbers, leaf.size)
        indices = np.empty(len(numbers), np.int64)
        repeats = (passes - begun // leaf.size) * leaf.copies
        for number in np.unique(passes).tolist():
            inside = passes == number
            indices[inside], again = leaf.draws(number, positions[inside])
            if again is not None:
                repeats[inside] += again
        return indices + self.offset, repeats

    def buckets_of(self, numbers: np.ndarray) -> np.ndarray:
        """See `Part.buckets_of`."""
        passes, positions = np.divmod(numbers, self.leaf.size)
        found = np.empty(len(numbers), np.int64)
        for number in np.unique(passes).tolist():
            inside = passes == number
            found[inside] = self.leaf.buckets(number, positions[inside])
        return found


@dataclass(frozen=True)
class Walk:
    """A part through the epochs of a run: an epoch goes on where the one before ended.

        passes of 5   a b c d e | c a e b d | …
        epochs of 3   0     | 1     | 2     | …

    Attributes:
        part: what is drawn from.
        per_epoch: draws in an epoch.
    """

    part: Part
    per_epoch: int

    def draws(self, epoch: int, positions: np.ndarray) -> Drawn:
        """See `Draws.draws`."""
        begun = epoch * self.per_epoch
        return self.part.drawn(begun, begun + positions)

    def buckets(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Draws.buckets`."""
        return self.part.buckets_of(epoch * self.per_epoch + positions)


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
        of_inner, copy = self._of_inner(positions)
        indices, repeats = self.inner.draws(epoch, of_inner)
        return indices, copy if repeats is None else repeats * self.times + copy

    def buckets(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """See `Draws.buckets`."""
        return self.inner.buckets(epoch, self._of_inner(positions)[0])

    def _of_inner(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is repeated at these positions, and which copy they are."""
        run, place = np.divmod(positions, self.stride)
        run, copy = np.divmod(run, self.times)
        return run * self.stride + place, copy
