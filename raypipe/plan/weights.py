"""Weighted sampling: a pass draws each sample as often as its weight says, rounded down or up. Numpy only.

    sample          0     1           2   3
    weight          2     4           1   1            of 8 in all, L = 6 draws in a pass
    cumulative      |-----|-----------|---|---|
    draws             ^    ^    ^    ^    ^    ^       every 8/6, from a place on that differs from pass to pass

This is systematic sampling. Draw numbers ascend with the samples, so groups of samples are groups of draws, and
any shuffle of draw numbers will do. All numbers are integers: a sample of weight w has ⌊L·w/Σ⌋ or ⌈L·w/Σ⌉ draws,
and so have neighbours as a whole. Where groups do not matter, samples of a class, or of a weight, are made
neighbours: in stored order a pattern, such as classes in turn, might be in step with the draws.
"""

from __future__ import annotations

import copy
import hashlib

import numpy as np

from raypipe.errors import ConfigError
from raypipe.plan.draws import Drawn, Leaf
from raypipe.plan.order import Domain, GlobalOrder, StoredOrder, WindowOrder, default_window_groups, derive_keys
from raypipe.plan.selection import Selection

# Weights become integers whose sum is below this, as exact as it allows.
_MAX_TOTAL_BITS = 61


class Weighted(Leaf):
    """A leaf that draws by weights, see `raypipe.plan.draws.Leaf`.

    Args:
        weights: of the samples that are kept, by number, finite and ≥ 0, (n,).
        size: L, draws in a pass.
        seed: of the leaf.
        kept: which samples these are.
        shuffle: "global", "window" or "off".
        groups: offsets of the groups in numbers of samples, int64, of shuffle "window".
        window_groups: of shuffle "window"; 0 = as many as are usual.
        classes: of the samples, (n,), for shuffle "global"; None = those of a weight are a class.

    Attributes:
        total: of the weights, as integers.

    Raises:
        ValueError: these are no weights, or no sample has any.
    """

    def __init__(
        self,
        weights: np.ndarray,
        size: int,
        seed: int,
        kept: Selection,
        shuffle: str = "global",
        groups: np.ndarray | None = None,
        window_groups: int = 0,
        classes: np.ndarray | None = None,
    ) -> None:
        self.size, self._seed, self._kept, self._shuffle = size, seed, kept, shuffle
        exact = as_integers(weights)
        self._arranged: np.ndarray | None = None
        if shuffle == "global":
            arranged = np.argsort(exact if classes is None else classes, kind="stable")
            self._arranged = arranged.astype(np.min_scalar_type(len(exact)))
            exact = exact[arranged]
        self.cumulative = np.append(0, np.cumsum(exact))
        self.total = int(self.cumulative[-1])
        self._heaviest = int(np.diff(self.cumulative).max())
        self.copies = self._copies()
        self._groups, self.window_groups = groups, window_groups
        self._layout: tuple[int, GlobalOrder | StoredOrder | WindowOrder] | None = None
        if shuffle == "window":
            assert groups is not None
            self.window_groups = window_groups or default_window_groups(self.first_draws(0, groups))

    def draws(self, number: int, positions: np.ndarray) -> Drawn:
        """See `Leaf.draws`."""
        draws = self._order(number).indices(number, positions)
        offset = self._offset(number)
        # In Python's integers: products of two such numbers have more than 64 bits.
        points = np.array([(draw * self.total + offset) // self.size for draw in draws.tolist()], np.int64)
        places = np.searchsorted(self.cumulative, points, side="right") - 1
        samples = places if self._arranged is None else self._arranged[places].astype(np.int64)
        return self._kept.indices(samples), draws - self.first_draws(number, places)

    def resized(self, size: int) -> Weighted:
        """The same with so many draws in a pass."""
        other = copy.copy(self)
        other.size = size
        other.copies = other._copies()
        return other

    def counts(self, number: int) -> np.ndarray:
        """How often a pass draws each sample that is kept, int64 (n,), by its number."""
        found = np.diff(self.first_draws(number, np.arange(len(self.cumulative))))
        if self._arranged is None:
            return found
        counts = np.empty_like(found)
        counts[self._arranged] = found
        return counts

    def first_draws(self, number: int, samples: np.ndarray) -> np.ndarray:
        """The first draw of a pass, int64 (n,), of each sample or a later one; by their places in the table."""
        offset, before = self._offset(number), self.cumulative[samples].tolist()
        return np.array([max(0, -(-(each * self.size - offset) // self.total)) for each in before], np.int64)

    def signature(self) -> str:
        """A hash of the weights."""
        digest = hashlib.blake2b(self.cumulative.tobytes(), digest_size=16)
        if self._arranged is not None:
            digest.update(self._arranged.astype(np.int64).tobytes())
        return digest.hexdigest()

    def _copies(self) -> int:
        return -(-self._heaviest * self.size // self.total)

    def _offset(self, number: int) -> int:
        """Where the first draw of a pass falls, in [0, Σ)."""
        return int(derive_keys(1, self._seed, Domain.WEIGHTED, number)[0]) * self.total >> 64

    def _order(self, number: int) -> GlobalOrder | StoredOrder | WindowOrder:
        """The order of a pass's draw numbers; where groups begin differs from pass to pass."""
        if self._shuffle == "global":
            return GlobalOrder(self.size, self._seed)
        if self._groups is None:
            return StoredOrder(self.size)
        if self._layout is None or self._layout[0] != number:
            groups = self.first_draws(number, self._groups)
            self._layout = number, WindowOrder(groups, self._seed, self.window_groups)
        return self._layout[1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_layout": None}


def as_integers(weights: np.ndarray) -> np.ndarray:
    """Weights (n,) as int64 in the same proportions; whole numbers stay as they are, if their sum allows.

    Raises:
        ValueError: one is negative or not finite, or all are 0.
    """
    wanted = np.asarray(weights, np.float64)
    if wanted.ndim != 1 or not np.isfinite(wanted).all() or (wanted < 0).any() or not wanted.any():
        raise ValueError("weights are finite numbers of at least 0, one for each sample, and not all 0")
    with np.errstate(over="ignore"):
        total = float(wanted.sum())
    if total == np.inf:  # nothing is lost: these become integers of 61 bits
        wanted = np.ldexp(wanted, -64)
        total = float(wanted.sum())
    if (wanted == np.rint(wanted)).all() and total < 2.0**_MAX_TOTAL_BITS:
        return wanted.astype(np.int64)
    # By a power of 2, so that no weight is rounded but where its last bits are dropped.
    return np.rint(np.ldexp(wanted, _MAX_TOTAL_BITS - 1 - int(np.ceil(np.log2(total))))).astype(np.int64)


def balanced(labels: np.ndarray, exponent: float) -> np.ndarray:
    """Weights float64 (n,) by class: a sample of a class of m samples has the weight m^-exponent.

    So a class is drawn in proportion to m^(1-exponent): 1 = all classes equally often, 0 = as it is.
    """
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return (counts.astype(np.float64) ** -exponent)[inverse]


def check_weights(weights: np.ndarray, num_samples: int, setting: str) -> np.ndarray:
    """The weights of a store's samples, float64 (N,); raises ConfigError where they are none."""
    found = np.asarray(weights)
    if found.shape != (num_samples,) or found.dtype.kind not in "iufb":
        raise ConfigError(
            f"{setting} has {found.dtype} of {found.shape}: expected is one number for each of the store's "
            f"{num_samples} samples"
        )
    found = found.astype(np.float64)
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise ConfigError(f"{setting} has a weight that is negative or no finite number: weights are at least 0")
    return found
