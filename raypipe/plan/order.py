"""Keyed permutations of [0, N): which sample stands at which position of an epoch. Numpy only.

Nothing here holds an array of N: a keyed bijection maps a position to an index, so an epoch can start at any
position at the same cost, and a store of 10^9 samples costs as much as one of 10^4.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from raypipe.plan.selection import Selection

# Rounds of the Feistel network. Four suffice for a pseudo-random permutation when the round function is
# good (Luby & Rackoff 1988); the networks here are narrow and unbalanced for small N, so twice that.
NUM_ROUNDS = 8
# Below this width a Feistel network has too few round-function outputs to reach all permutations evenly.
MIN_BITS = 6

_U64 = np.uint64


class Domain(IntEnum):
    """What a key is for. It is part of every hash, so keys of different uses never coincide."""

    ORDER = 1
    WINDOW = 2
    SAMPLE = 3
    MICRO_BATCH = 4
    SUBSTITUTE = 5
    WEIGHTS = 6
    SOURCE = 7
    MIXTURE = 8
    WEIGHTED = 9
    COLUMNS = 10  # a place in the sample's own Philox stream: what makes columns draws there
    VIEW = 12
    VIEW_ON_DEVICE = 13
    BUCKET = 14
    BUCKET_ORDER = 15
    BUCKET_SEATS = 16
    AUGMENT = 0x4155474D454E5453  # what a preset draws on the device: the second word of a Philox key
    MIXING = 0x4D49584D49584D49  # MixUp and CutMix, likewise


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of MurmurHash3 (Appleby): a bijection of uint64 that flips half of the bits."""
    x = x ^ (x >> _U64(33))
    x = x * _U64(0xFF51AFD7ED558CCD)
    x = x ^ (x >> _U64(33))
    x = x * _U64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> _U64(33))


def derive_keys(num: int, *parts: int) -> np.ndarray:
    """Hash integer parts into `num` uint64 keys, shape (num,). Parts are hashed, never added."""
    return np.random.SeedSequence(parts).generate_state(num, np.uint64)


def permute(positions: np.ndarray, size: int, keys: np.ndarray, inverse: bool = False) -> np.ndarray:
    """Map positions of [0, size) to indices of [0, size) by a keyed bijection, or back.

    An unbalanced Feistel network over the smallest power of two ≥ size, cycle-walked back into range
    (Black & Rogaway 2002): on average fewer than two passes, vectorised.

    Args:
        positions: int64, any shape, each in [0, size).
        size: N ≥ 1.
        keys: uint64 (NUM_ROUNDS,), see `derive_keys`.
        inverse: map indices to positions: the same network, its rounds backwards.

    Returns:
        int64 of the shape of `positions`.
    """
    bits = max(MIN_BITS, (size - 1).bit_length())
    right_bits = _U64(bits - bits // 2)
    masks = [(_U64(1) << width) - _U64(1) for width in (_U64(bits // 2), right_bits)]
    rounds = range(NUM_ROUNDS)[::-1] if inverse else range(NUM_ROUNDS)
    out = positions.astype(np.uint64).ravel()
    pending = np.arange(out.size)
    while pending.size:
        x = out[pending]
        halves = [x >> right_bits, x & masks[1]]
        for i in rounds:  # even ones change the left half by the right one, odd ones the other way round
            own, other = i % 2, 1 - i % 2
            halves[own] = halves[own] ^ (mix64(halves[other] ^ keys[i]) & masks[own])
        x = (halves[0] << right_bits) | halves[1]
        out[pending] = x
        pending = pending[x >= _U64(size)]
    return out.astype(np.int64).reshape(positions.shape)


def shuffled(size: int, key: np.uint64) -> np.ndarray:
    """A keyed permutation of [0, size), int64 (size,), whole: the numbers, sorted by their hashes.

    Of few numbers it is many times faster than `permute`, which walks cycles of at least 2^MIN_BITS.
    """
    return np.argsort(mix64(np.arange(size, dtype=np.uint64) ^ key), kind="stable")


@dataclass(frozen=True)
class GlobalOrder:
    """Every sample may stand anywhere: for stores with cheap random access."""

    size: int
    seed: int

    def indices(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Sample indices, int64, at int64 positions of an epoch."""
        return permute(positions, self.size, _epoch_keys(self.seed, epoch))

    def positions(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """The inverse of `indices`, as of every order."""
        return permute(indices, self.size, _epoch_keys(self.seed, epoch), inverse=True)


@dataclass(frozen=True)
class StoredOrder:
    """No shuffle: position = index."""

    size: int

    def indices(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        return positions.astype(np.int64)

    positions = indices


class WindowOrder:
    """Groups are permuted, then rows within windows of k consecutive permuted groups.

    For stores that are read in groups: each group is read once an epoch, and at most k at a time are held.

        stored groups      | 0 | 1 | 2 | 3 | 4 | 5 |
        permuted           | 4 | 0 | 3 | 5 | 2 | 1 |
        windows of k = 3   |  4 0 3    |  5 2 1    |     rows permuted within each

    Args:
        groups: offsets, int64 (num_groups + 1,), from 0 to N.
        seed: the run's seed.
        window_groups: k ≥ 1.
    """

    def __init__(self, groups: np.ndarray, seed: int, window_groups: int) -> None:
        self.groups = np.asarray(groups, np.int64)
        self.size = int(self.groups[-1])
        self.seed = seed
        self.window_groups = window_groups
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def _layout(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's group order (G,) and the offsets of its groups by position (G + 1,)."""
        if self._epoch is None or self._epoch[0] != epoch:
            num_groups = len(self.groups) - 1
            order = permute(np.arange(num_groups), num_groups, _epoch_keys(self.seed, epoch))
            offsets = np.concatenate([[0], np.cumsum(np.diff(self.groups)[order])])
            self._epoch = (epoch, order, offsets)
        return self._epoch[1], self._epoch[2]

    def indices(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Sample indices, int64, at int64 positions of an epoch."""
        order, offsets = self._layout(epoch)
        starts = offsets[:: self.window_groups]
        if starts[-1] != self.size:
            starts = np.append(starts, self.size)
        windows = np.searchsorted(starts, positions, side="right") - 1
        shuffled = np.empty(len(positions), np.int64)
        for window in np.unique(windows):
            inside = windows == window
            start, size = int(starts[window]), int(starts[window + 1] - starts[window])
            keys = derive_keys(NUM_ROUNDS, self.seed, Domain.WINDOW, epoch, int(window))
            shuffled[inside] = start + permute(positions[inside] - start, size, keys)
        place = np.searchsorted(offsets, shuffled, side="right") - 1
        return self.groups[order[place]] + shuffled - offsets[place]

    def positions(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        order, offsets = self._layout(epoch)
        group = np.searchsorted(self.groups, indices, side="right") - 1
        place = np.argsort(order)[group]
        shuffled = offsets[place] + indices - self.groups[group]
        result = np.empty(len(indices), np.int64)
        for i, window in enumerate((place // self.window_groups).tolist()):
            start = int(offsets[window * self.window_groups])
            end = int(offsets[min((window + 1) * self.window_groups, len(order))])
            keys = derive_keys(NUM_ROUNDS, self.seed, Domain.WINDOW, epoch, window)
            result[i] = start + permute(shuffled[i : i + 1] - start, end - start, keys, inverse=True)[0]
        return result

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_epoch": None}


class KeptOrder:
    """An order of the kept samples of a store: an order of their numbers, and which samples these are."""

    def __init__(self, order: Order, kept: Selection) -> None:
        self.order, self.kept = order, kept
        self.size: int = order.size

    def indices(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Sample indices in the store, int64, at int64 positions of an epoch."""
        return self.kept.indices(self.order.indices(epoch, positions))

    def positions(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        numbers = self.kept.numbers(indices)
        is_kept = self.kept.indices(np.minimum(numbers, self.size - 1)) == indices
        assert is_kept.all(), "a sample that is left out has no position"
        return self.order.positions(epoch, numbers)


Order = GlobalOrder | StoredOrder | WindowOrder | KeptOrder


@lru_cache(maxsize=8)
def _epoch_keys(seed: int, epoch: int) -> np.ndarray:
    return derive_keys(NUM_ROUNDS, seed, Domain.ORDER, epoch)


def default_window_groups(groups: np.ndarray) -> int:
    """Groups per window: at least 10, and at least 4096 rows, so that a micro-batch mixes many groups."""
    mean_rows = max(1.0, float(groups[-1]) / max(1, len(groups) - 1))
    return max(10, int(np.ceil(4096 / mean_rows)))
