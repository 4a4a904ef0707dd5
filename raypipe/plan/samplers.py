"""Samplers: positions, counted through a run, → draws of samples. Numpy only.

Permuted     each sample of a store, or of a bucket of it, once in a pass
Weighted     each as often as its weight says
Bucketed     one store, a bucket at a time
Mixture      several samplers by shares of each global batch, see `raypipe.plan.mixture`
Repeated     each draw k times
WithRest     epochs with their last samples, fewer than a step's, and padding
Custom       a user's sampler, see `raypipe.plan.custom`
Sequential   each sample once, in stored order, then padding: for validations
"""

from __future__ import annotations

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from raypipe.plan.order import Domain, Shuffle, derive_keys
from raypipe.plan.places import PADDING
from raypipe.plan.selection import Selection

# Weights become integers whose sum is below this, as exact as it allows.
_MAX_TOTAL_BITS = 61


class Draws(NamedTuple):
    """Draws of samples, int64 arrays of one shape. No two of a run have the same index, pass and repeat.

    Attributes:
        indices: indices of the samples in the store or the joined store; PADDING = no sample.
        passes: numbers of the passes over its store, or over the bucket of it; in a plain plan, the epoch.
        repeats: numbers of the sample's draws in that pass; the first is 0. A user's sampler has positions in the
            epoch here, which are as different.
        buckets: each sample's bucket; 0 without buckets.
    """

    indices: np.ndarray
    passes: np.ndarray
    repeats: np.ndarray
    buckets: np.ndarray

    def at(self, key: int | slice) -> Draws:
        """Return the draws at an index of the first axis, or at several."""
        return Draws(*(column[key] for column in self))

    def flat(self, num_rows: int | None = None) -> Draws:
        """Return the first rows of each of several micro-batches, (k, B), end to end; None = all."""
        return Draws(*(column[:, :num_rows].ravel() for column in self))


class RunSampler(Protocol):
    """Draws samples on and on, through a run; a sampler may wrap others."""

    def draw(self, positions: np.ndarray) -> Draws:
        """The draws at int64 positions (n,), counted through the run."""
        ...


def draw_parts(parts: np.ndarray, draw: Callable[[int, np.ndarray], Draws]) -> Draws:
    """Draws of several parts, put together.

    Args:
        parts: int64 (n,), the part that each draw is of.
        draw: makes those of one part, by its number and the places, intp (k,), where `parts` has it.
    """
    columns = np.empty((len(Draws._fields), len(parts)), np.int64)
    for number in np.unique(parts).tolist():
        places = np.flatnonzero(parts == number)
        for column, values in zip(columns, draw(number, places), strict=True):
            column[places] = values
    return Draws(*columns)


class PassSampler(RunSampler):
    """A sampler that goes through one store, or a bucket of it, pass after pass.

    Attributes:
        size: draws that a pass may have.
        per_pass: draws of a pass that the run takes; the rest are skipped. Each pass has its own key, so it
            skips different samples.
    """

    size: int
    per_pass: int

    def draw(self, positions: np.ndarray) -> Draws:
        """See `RunSampler.draw`."""
        passes, inside = np.divmod(positions, self.per_pass)
        return draw_parts(
            passes,
            lambda pass_number, places: self.draw_pass(pass_number, inside[places]),
        )

    @abstractmethod
    def draw_pass(self, pass_number: int, positions: np.ndarray) -> Draws:
        """The draws at int64 positions (n,), in [0, size), of one pass."""


class Permuted(PassSampler):
    """Sampler that draws each sample once in a pass.

    Args:
        shuffle: the order of the samples' numbers.
        selection: which samples these are.
        offset: number of the store's first sample in a joined store.
        per_pass: see `PassSampler`; 0 = all.
    """

    def __init__(
        self, shuffle: Shuffle, selection: Selection, offset: int = 0, per_pass: int = 0
    ) -> None:
        self.shuffle = shuffle
        self.selection = selection
        self._offset = offset
        self.size = self.weight = shuffle.size
        self.per_pass = per_pass or self.size

    def draw_pass(self, pass_number: int, positions: np.ndarray) -> Draws:
        """See `PassSampler.draw_pass`."""
        indices = self._indices(self.shuffle.numbers(pass_number, positions))
        zeros = np.zeros(len(positions), np.int64)
        return Draws(indices, zeros + pass_number, zeros, zeros)

    def sample_of(self, key: int, epoch: int) -> int:
        """Return a sample chosen by a key, of any epoch, since each has all samples."""
        return int(self._indices(np.array([key % self.size]))[0])

    def signature(self) -> str:
        """A hash of what it draws from."""
        return self.selection.signature()

    def _indices(self, numbers: np.ndarray) -> np.ndarray:
        return self.selection.indices(numbers) + self._offset


class Weighted(PassSampler):
    """Systematic sampling: a pass draws each sample in proportion to its weight, rounded down or up.

        sample          0     1           2   3
        weight          2     4           1   1            of 8 in all, L = 6 draws in a pass
        cumulative      |-----|-----------|---|---|
        draws             ^    ^    ^    ^    ^    ^       every 8/6, from an offset that each pass draws

    Draw numbers ascend with the samples, so groups of samples are groups of draws, and any shuffle of draw numbers
    will do. All numbers are integers: a sample of weight w has ⌊L·w/Σ⌋ or ⌈L·w/Σ⌉ draws, and neighbors together
    are rounded in the same way. Where groups do not matter, samples of a class, or of a weight, are made
    neighbors: in stored order a pattern, such as classes in turn, might be in step with the draws.

    Args:
        weights: each sample's weight, int64 (n,), see `as_integers`; all 0 = nothing is ever drawn.
        shuffle: order of the samples' numbers, and of draw numbers.
        selection: which samples these are.
        size: L, draws in a pass; 0 = as many as there are samples.
        classes: each sample's class, (n,), for a global shuffle; None = samples of equal weight are a class.
        offset: number of the store's first sample in a joined store.

    Attributes:
        weight: sum over all samples.
    """

    def __init__(
        self,
        weights: np.ndarray,
        shuffle: Shuffle,
        selection: Selection,
        size: int = 0,
        classes: np.ndarray | None = None,
        offset: int = 0,
    ) -> None:
        self.shuffle = shuffle
        self.selection = selection
        self._offset = offset
        self.size = self.per_pass = size or selection.size
        self._arranged: np.ndarray | None = None
        if shuffle.kind == "global":
            arranged = np.argsort(
                weights if classes is None else classes, kind="stable"
            )
            self._arranged = arranged.astype(np.min_scalar_type(len(weights)))
            weights = weights[arranged]
        self.cumulative = np.append(0, np.cumsum(weights))
        self.weight = int(self.cumulative[-1])
        self._pass_shuffle: tuple[int, Shuffle] | None = None

    def draw_pass(self, pass_number: int, positions: np.ndarray) -> Draws:
        """See `PassSampler.draw_pass`."""
        draws = self._shuffle_of(pass_number).numbers(pass_number, positions)
        start = self._start(pass_number)
        zeros = 0 * positions
        # In Python's integers: products of two such numbers have more than 64 bits.
        exact = draws.astype(object) * self.weight + start
        points = (exact // self.size).astype(np.int64)
        rows = np.searchsorted(self.cumulative, points, side="right") - 1
        numbers = rows
        if self._arranged is not None:
            numbers = self._arranged[rows].astype(np.int64)
        indices = self.selection.indices(numbers) + self._offset
        return Draws(
            indices,
            zeros + pass_number,
            draws - self._first_draws(pass_number, rows),
            zeros,
        )

    def sample_of(self, key: int, epoch: int) -> int:
        """Return a sample chosen by a key, of any epoch, in proportion to the weights."""
        return int(self.draw_pass(0, np.array([key % self.size])).indices[0])

    def resized(self, size: int) -> Weighted:
        """Return this sampler with a different number of draws in a pass."""
        resized = copy.copy(self)
        resized.size = resized.per_pass = size
        return resized

    def signature(self) -> str:
        """A hash of the weights and of what it draws from."""
        content = hashlib.blake2b(self.cumulative.tobytes(), digest_size=16)
        if self._arranged is not None:
            content.update(self._arranged.astype(np.int64).tobytes())
        return f"{content.hexdigest()} {self.selection.signature()}"

    def _first_draws(self, pass_number: int, rows: np.ndarray) -> np.ndarray:
        """The first draw of a pass, int64 (n,), of the sample in each row of the table, or of a later one."""
        start = self._start(pass_number)
        exact = self.cumulative[rows].astype(object) * self.size - start
        return np.maximum(0, -(-exact // self.weight)).astype(np.int64)

    def _start(self, pass_number: int) -> int:
        """Return where the first draw of a pass falls, in [0, Σ)."""
        return (
            int(derive_keys(1, self.shuffle.seed, Domain.WEIGHTED, pass_number)[0])
            * self.weight
            >> 64
        )

    def _shuffle_of(self, pass_number: int) -> Shuffle:
        """The order of a pass's draw numbers; the groups begin at different draws from pass to pass."""
        if self.shuffle.groups is None:
            return replace(self.shuffle, size=self.size)
        # read once, since threads share a plan, and may be in different passes
        kept = self._pass_shuffle
        if kept is None or kept[0] != pass_number:
            groups = self._first_draws(pass_number, self.shuffle.groups)
            shuffle = replace(self.shuffle, size=self.size, groups=groups)
            kept = self._pass_shuffle = (pass_number, shuffle)
        return kept[1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pass_shuffle": None}


@dataclass
class Repeated(RunSampler):
    """Repeats each draw k times, numbered, so that each copy is augmented differently.

        stride 4, k = 2   a b c d | a b c d     copies are in the same row of neighboring micro-batches of 4

    Attributes:
        inner: sampler to repeat.
        times: k.
        stride: draws between two copies.
    """

    inner: RunSampler
    times: int
    stride: int

    def draw(self, positions: np.ndarray) -> Draws:
        """See `RunSampler.draw`."""
        runs, places = np.divmod(positions, self.stride)
        runs, copies = np.divmod(runs, self.times)
        draws = self.inner.draw(runs * self.stride + places)
        return draws._replace(repeats=draws.repeats * self.times + copies)


@dataclass
class WithRest(RunSampler):
    """Sampler of epochs whose last step has fewer samples: the rest, in equal numbers for each micro-batch.

        10 draws, M = 2, B = 4      0 1 2 3 | 4 5 6 7     8 . . . | 9 . . .
        11 draws                    0 1 2 3 | 4 5 6 7     8 9 . . | 10 0 . .     one is drawn again

    Attributes:
        inner: sampler to continue from epoch to epoch.
        size: draws in an epoch.
        per_step: M.
        unit: B.
    """

    inner: RunSampler
    size: int
    per_step: int
    unit: int

    def draw(self, positions: np.ndarray) -> Draws:
        """See `RunSampler.draw`; rows without a sample have the index PADDING."""
        step = self.per_step * self.unit
        whole = self.size // step * step
        share = -(-(self.size - whole) // self.per_step)
        epochs, rows = np.divmod(positions, -(-self.size // step) * step)
        micro, row = np.divmod(rows - whole, self.unit)
        is_rest = micro >= 0
        numbers = np.where(is_rest, whole + micro * share + row, rows)
        # a second draw of a sample has a repeat that no first one has
        again, numbers = np.divmod(numbers, self.size)
        draws = self.inner.draw(epochs * self.size + numbers)
        return draws._replace(
            indices=np.where(is_rest & (row >= share), PADDING, draws.indices),
            repeats=draws.repeats + again * self.size,
        )


class Sequential(RunSampler):
    """Sampler that draws each sample once, bucket after bucket, in stored order; padding fills each last place.

    Args:
        buckets: the samples of each, or all samples as one.
        unit: rows in a place.

    Attributes:
        size: rows, those of padding included.
        counts: places of each bucket.
    """

    def __init__(self, buckets: Sequence[Selection], unit: int) -> None:
        self.buckets = list(buckets)
        self._unit = unit
        self.counts = [-(-bucket.size // unit) for bucket in buckets]
        self._ends = np.cumsum(self.counts)
        self.size = int(self._ends[-1]) * unit

    def draw(self, positions: np.ndarray) -> Draws:
        """See `RunSampler.draw`; padding has the index PADDING, and at the end the bucket of the last sample."""
        places = np.minimum(positions, self.size - 1) // self._unit
        numbers = np.searchsorted(self._ends, places, side="right")
        rows = positions - (self._ends - self.counts)[numbers] * self._unit
        zeros = 0 * positions

        def draw(number: int, where: np.ndarray) -> Draws:
            bucket = self.buckets[number]
            inside = rows[where]
            indices = bucket.indices(np.minimum(inside, bucket.size - 1))
            return Draws(
                np.where(inside < bucket.size, indices, PADDING), *[zeros[where]] * 3
            )

        return draw_parts(numbers, draw)._replace(buckets=numbers)


def as_integers(weights: np.ndarray) -> np.ndarray:
    """Weights (n,) as int64 in the same proportions; whole numbers stay as they are, if their sum allows."""
    exact = np.asarray(weights, np.float64)
    with np.errstate(over="ignore"):
        total = float(exact.sum())
    if total == np.inf:  # nothing is lost: these become integers of 61 bits
        exact = np.ldexp(exact, -64)
        total = float(exact.sum())
    if (exact == np.rint(exact)).all() and total < 2.0**_MAX_TOTAL_BITS:
        return exact.astype(np.int64)
    # By a power of 2, so that no weight is rounded but where its last bits are dropped.
    return np.rint(
        np.ldexp(exact, _MAX_TOTAL_BITS - 1 - int(np.ceil(np.log2(total))))
    ).astype(np.int64)
