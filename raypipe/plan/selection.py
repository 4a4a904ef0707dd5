"""Which samples of a store a plan draws from, and their numbers, 0 to n - 1. Numpy only.

    index     0 1 2 3 4 5 6
    left out    x   x x
    number    0   1       2 3 …

Held in memory are the indices of those that are left out (`Kept`) or of those that are not (`Chosen`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np


class Kept:
    """The samples of a store that remain when some are excluded, whose indices alone are stored.

    Args:
        left_out: indices of samples, integers (k,), in any order.
    """

    def __init__(self, left_out: np.ndarray) -> None:
        self.left_out = _compact(np.unique(np.asarray(left_out, np.int64)))
        self._kept_before = (self.left_out - np.arange(len(self.left_out))).astype(self.left_out.dtype)

    @property
    def num_left_out(self) -> int:
        return len(self.left_out)

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """The indices, int64, of the kept samples with these numbers."""
        return numbers + np.searchsorted(self._kept_before, _like(self.left_out, numbers), side="right")

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """How many kept samples stand before each index, int64: the number of a sample that is kept itself."""
        return indices - np.searchsorted(self.left_out, _like(self.left_out, indices), side="left")

    def signature(self) -> str:
        """A hash of what is left out; empty if nothing is."""
        return _hash(self.left_out) if len(self.left_out) else ""


class Chosen:
    """The samples of a store that remain when most are left out.

    Args:
        chosen: indices of the samples that remain, integers (n,), ascending.
        num_samples: of the store.
    """

    def __init__(self, chosen: np.ndarray, num_samples: int) -> None:
        self.chosen, self.num_left_out = _compact(chosen), num_samples - len(chosen)

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """See `Kept.indices`."""
        return self.chosen[numbers].astype(np.int64)

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """See `Kept.numbers`."""
        return np.searchsorted(self.chosen, _like(self.chosen, indices), side="left")

    def signature(self) -> str:
        return f"chosen {_hash(self.chosen)}"


class JoinedSelection:
    """The samples of several stores as one, each with a selection of its own.

    Args:
        parts: the selection of each store.
        offsets: int64 (parts + 1,), of the stores' samples.

    Attributes:
        bounds: int64 (parts + 1,), of the numbers of each store's samples.
    """

    def __init__(self, parts: Sequence[Selection], offsets: np.ndarray) -> None:
        self.parts, self.offsets = list(parts), offsets
        self.num_left_out: int = sum(part.num_left_out for part in parts)
        left_out = np.array([part.num_left_out for part in parts])
        self.bounds = np.append(0, np.cumsum(np.diff(offsets) - left_out))

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """See `Kept.indices`."""
        return self._by_part(numbers, self.bounds, self.offsets, lambda part, of_part: part.indices(of_part))

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """See `Kept.numbers`."""
        return self._by_part(indices, self.offsets, self.bounds, lambda part, of_part: part.numbers(of_part))

    def _by_part(
        self,
        given: np.ndarray,
        begins: np.ndarray,
        others: np.ndarray,
        asked: Callable[[Selection, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """What each part is asked for; `begins` and `others` are where it begins before and after."""
        found = np.empty(len(given), np.int64)
        sources = np.searchsorted(begins[1:-1], given, side="right")
        for source in np.unique(sources).tolist():
            inside = sources == source
            found[inside] = others[source] + asked(self.parts[source], given[inside] - begins[source])
        return found

    def signature(self) -> str:
        signatures = [part.signature() for part in self.parts]
        return "; ".join(signatures) if any(signatures) else ""


Selection = Kept | Chosen | JoinedSelection


def selected(keep: np.ndarray) -> Kept | Chosen:
    """What bool (N,) says to keep, as whichever takes less memory."""
    num_kept = int(np.count_nonzero(keep))
    if num_kept < len(keep) - num_kept:
        return Chosen(np.flatnonzero(keep), len(keep))
    return Kept(np.flatnonzero(~keep))


def _compact(indices: np.ndarray) -> np.ndarray:
    """Ascending indices as the smallest unsigned integers that hold the largest of them, and one more."""
    return indices.astype(np.min_scalar_type(int(indices[-1]) + 1 if len(indices) else 0))


def _like(held: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """What is searched for, as the type that is searched, which else would be copied whole."""
    return np.minimum(wanted, np.iinfo(held.dtype).max).astype(held.dtype)


def _hash(indices: np.ndarray) -> str:
    return hashlib.blake2b(indices.astype(np.int64).tobytes()).hexdigest()
