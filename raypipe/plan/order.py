"""Keyed permutations of [0, N): the number at each position of a pass. Numpy only.

A keyed bijection maps a position to a number, so a pass can start at any position at the same cost, and a store
of 10^9 samples costs as much as one of 10^4. Only the order of groups, and of a short pass that is asked for
whole, is an array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, Literal

import numpy as np

# Rounds of the Feistel network. Four suffice for a pseudo-random permutation when the round function is
# good (Luby & Rackoff 1988); the networks here are narrow and unbalanced for small N, so twice that.
NUM_ROUNDS = 8
# Below this width a Feistel network has too few round-function outputs to reach all permutations evenly.
MIN_BITS = 6

ShuffleKind = Literal["global", "window", "off"]
_U64 = np.uint64
_NO_PASS = (-1, None, None)


class Domain(IntEnum):
    """Use of a key. It is part of every hash, so keys of different uses never coincide.

    Attributes:
        num_parts: number of parts of such a key besides the seed, see `key_words`; None = `derive_keys` does
            not make it.
    """

    num_parts: int | None

    def __new__(cls, value: int, num_parts: int | None = None) -> Domain:
        member = int.__new__(cls, value)
        member._value_ = value
        member.num_parts = num_parts
        return member

    ORDER = 1, 1  # pass
    WINDOW = 2, 2  # pass, window
    SAMPLE = 3, 2  # split, pass
    MICRO_BATCH = 4, 4  # split, epoch, step, micro-batch
    SUBSTITUTE = 5, 3  # epoch, index, attempt
    WEIGHTS = 6, 0
    SOURCE = 7, 1  # source
    MIXTURE = 8, 1  # batch
    WEIGHTED = 9, 1  # pass
    COLUMNS = 10  # place in the sample's own Philox stream where columns are drawn
    STEPS = 11  # draws of a program of steps, see `raypipe.kernel.draws`
    VIEW = 12
    VIEW_ON_DEVICE = 13
    BUCKET = 14, 1  # pass
    BUCKET_ORDER = 15, 1  # bucket
    BUCKET_MIXTURE = 16, 1  # bucket
    QUOTAS = 17, 1  # batch
    TORCH_SAMPLER = 19, 1  # epoch, or the sampler's own seed
    TAKE = 18, 0
    AUGMENT = 0x4155474D454E5453  # draws of a preset on the device: the second word of a Philox key
    MIXING = 0x4D49584D49584D49  # MixUp and CutMix, also a second word


def mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of MurmurHash3 (Appleby): a bijection of uint64 that flips half of the bits."""
    x = x ^ (x >> _U64(33))
    x = x * _U64(0xFF51AFD7ED558CCD)
    x = x ^ (x >> _U64(33))
    x = x * _U64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> _U64(33))


def derive_keys(num: int, seed: int, domain: Domain, *parts: int) -> np.ndarray:
    """Hash a seed, a use and its parts into `num` uint64 keys, shape (num,). They are hashed, never added."""
    return np.random.SeedSequence(key_words(seed, domain, *parts)).generate_state(
        num, np.uint64
    )


def key_words(seed: int, domain: Domain, *parts: int) -> list[int]:
    """The 32-bit words that a key is the hash of; no other input has the same, zeros at the end aside.

        seed | domain | parts …                            where all of them fit 32 bits
        0 | 0 | low, high of the seed | of the domain | …  else; no domain is 0

    Uses have a fixed number of parts, so that none is the start of another.
    """
    assert len(parts) == domain.num_parts, f"{domain.name} has {domain.num_parts} parts"
    values = [seed, int(domain), *parts]
    if max(values) < 1 << 32:
        return values
    assert max(values) < 1 << 64
    return [
        0,
        0,
        *(word for value in values for word in (value & 0xFFFFFFFF, value >> 32)),
    ]


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Map positions of [0, size) to indices of [0, size) by a keyed bijection.

    An unbalanced Feistel network over the smallest power of two ≥ size, cycle-walked back into range
    (Black & Rogaway 2002): on average fewer than two passes, vectorised.

    Args:
        positions: int64, any shape, each in [0, size).
        size: N ≥ 1.
        keys: uint64 (NUM_ROUNDS,), see `derive_keys`.

    Returns:
        int64 of the shape of `positions`.
    """
    bits = max(MIN_BITS, (size - 1).bit_length())
    right_bits = _U64(bits - bits // 2)
    masks = [(_U64(1) << width) - _U64(1) for width in (_U64(bits // 2), right_bits)]
    out = positions.astype(np.uint64).ravel()
    pending = np.arange(out.size)
    while pending.size:
        x = out[pending]
        halves = [x >> right_bits, x & masks[1]]
        for i in range(NUM_ROUNDS):
            # even ones change the left half by the right one, odd ones the right half
            changed = i % 2
            unchanged = 1 - i % 2
            halves[changed] = halves[changed] ^ (
                mix64(halves[unchanged] ^ keys[i]) & masks[changed]
            )
        x = (halves[0] << right_bits) | halves[1]
        out[pending] = x
        pending = pending[x >= _U64(size)]
    return out.astype(np.int64).reshape(positions.shape)


def shuffled(size: int, key: np.uint64) -> np.ndarray:
    """A keyed permutation of [0, size), int64 (size,), whole: the numbers, sorted by their hashes.

    For few numbers it is many times faster than `permute`, which walks cycles of at least 2^MIN_BITS.
    """
    return np.argsort(mix64(np.arange(size, dtype=np.uint64) ^ key), kind="stable")


@dataclass(eq=False)
class Shuffle:
    """The order of [0, N) in each pass.

        off      none: the number at a position is the position
        global   every number may be anywhere: for stores with cheap random access
        window   groups are permuted, then numbers within windows of k consecutive permuted groups: for stores that
                 are read in groups, each of which is read once a pass, and at most k at a time are held

        stored groups      | 0 | 1 | 2 | 3 | 4 | 5 |
        permuted           | 4 | 0 | 3 | 5 | 2 | 1 |
        windows of k = 3   |  4 0 3    |  5 2 1    |     numbers permuted within each

    Attributes:
        kind: "off", "global" or "window".
        size: N.
        seed: the seed of the keys.
        groups: offsets, int64 (num_groups + 1,), from 0 to N; for windows.
        window_groups: k; 0 = as many as `default_window_groups` says.
    """

    kind: ShuffleKind
    size: int
    seed: int
    groups: np.ndarray | None = None
    window_groups: int = 0
    _pass: tuple[int, Any, Any] = field(default_factory=lambda: _NO_PASS, init=False)

    def numbers(self, pass_number: int, positions: np.ndarray) -> np.ndarray:
        """The numbers, int64 (n,), at int64 positions (n,) of a pass."""
        if self.kind == "off":
            return positions
        if self.kind == "global":
            return permute(positions, self.size, _order_keys(self.seed, pass_number))
        groups, order, offsets = self.layout(pass_number)
        window_groups = self.window_groups or default_window_groups(offsets)
        starts = np.append(offsets[:-1:window_groups], self.size)
        windows = np.searchsorted(starts, positions, side="right") - 1
        rows = np.empty(len(positions), np.int64)  # rows of the permuted groups
        for window in np.unique(windows).tolist():
            inside = windows == window
            start = int(starts[window])
            size = int(starts[window + 1]) - start
            keys = derive_keys(
                NUM_ROUNDS, self.seed, Domain.WINDOW, pass_number, window
            )
            rows[inside] = start + permute(positions[inside] - start, size, keys)
        group = np.searchsorted(offsets, rows, side="right") - 1
        return groups[order[group]] + rows - offsets[group]

    def layout(self, pass_number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Offsets of the groups (G + 1,); their order in a pass (G,), and their offsets by position (G + 1,)."""
        assert self.groups is not None, "windows are of groups"
        # read once, since threads share a plan, and may be in different passes
        kept = self._pass
        if kept[0] != pass_number:
            num_groups = len(self.groups) - 1
            order = permute(
                np.arange(num_groups), num_groups, _order_keys(self.seed, pass_number)
            )
            kept = self._pass = (
                pass_number,
                order,
                np.append(0, np.cumsum(np.diff(self.groups)[order])),
            )
        return self.groups, *kept[1:]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pass": _NO_PASS}


@lru_cache(maxsize=64)
def _order_keys(seed: int, pass_number: int) -> np.ndarray:
    return derive_keys(NUM_ROUNDS, seed, Domain.ORDER, pass_number)


def default_window_groups(groups: np.ndarray) -> int:
    """Groups per window: at least 10, and at least 4096 numbers, so that a micro-batch mixes many groups."""
    mean_rows = max(1.0, float(groups[-1]) / max(1, len(groups) - 1))
    return max(10, int(np.ceil(4096 / mean_rows)))
