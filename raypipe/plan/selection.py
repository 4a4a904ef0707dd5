"""Selections: the samples of a store that a plan draws from, numbered 0 to n - 1. Numpy only.

index     0 1 2 3 4 5 6
excluded    x   x x
number    0   1       2 3 …
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


class Selection:
    """The samples of a store that a plan draws from; only the excluded indices, or the included ones, are stored.

    Args:
        listed: indices of samples to exclude, integers (k,), in any order.
        num_samples: number of samples in the store.
        includes: whether these are the samples to draw from instead; in ascending order.

    Attributes:
        size: samples to draw from.
        num_left_out: those that are excluded.
        num_samples: all of the store.
    """

    def __init__(
        self,
        listed: np.ndarray | Sequence[int],
        num_samples: int,
        *,
        includes: bool = False,
    ) -> None:
        self.includes = includes
        self.num_samples = num_samples
        # Many are included, as a rule, and sorting them would take most of the time that a plan takes.
        indices = np.asarray(listed, np.int64)
        if not includes:
            indices = np.unique(indices)
        # the smallest unsigned integers that hold the largest of them, and one more
        largest = int(indices[-1]) + 1 if len(indices) else 0
        self.listed = indices.astype(np.min_scalar_type(largest))
        if includes:
            self.size = len(self.listed)
        else:
            self.size = num_samples - len(self.listed)
        self.num_left_out = num_samples - self.size
        if not includes:  # number of samples to draw from before each excluded one
            self._before = (self.listed - np.arange(len(self.listed))).astype(
                self.listed.dtype
            )

    @staticmethod
    def where(keep: np.ndarray) -> Selection:
        """The samples for which bool (N,) is true, held as the shorter of the two lists."""
        includes = 2 * int(np.count_nonzero(keep)) < len(keep)
        return Selection(
            np.flatnonzero(keep if includes else ~keep), len(keep), includes=includes
        )

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """The indices, int64, of the samples with these numbers."""
        if self.includes:
            return self.listed[numbers].astype(np.int64)
        return numbers + np.searchsorted(
            self._before, _like(self.listed, numbers), side="right"
        )

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of samples to draw from before each index, int64."""
        before = np.searchsorted(self.listed, _like(self.listed, indices), side="left")
        return before if self.includes else indices - before

    def signature(self) -> str:
        """A hash of the list; empty if nothing is excluded."""
        if not self.includes and not len(self.listed):
            return ""
        content = hashlib.blake2b(self.listed.astype(np.int64).tobytes()).hexdigest()
        return f"chosen {content}" if self.includes else content


class JoinedSelection:
    """Joins the selections of several stores.

    Args:
        parts: the selection of each store; their samples are numbered one after the other.

    Attributes:
        offsets: first sample of each store, and the end, int64 (parts + 1,).
        size, num_left_out, num_samples: sums over the stores, see `Selection`.
    """

    def __init__(self, parts: Sequence[Selection]) -> None:
        self.parts = list(parts)
        counts = [selection.num_samples for selection in parts]
        self.offsets = np.append(0, np.cumsum(counts))
        self._bounds = np.append(
            0, np.cumsum([selection.size for selection in parts])
        ).astype(np.int64)
        self.size = int(self._bounds[-1])
        self.num_samples = int(self.offsets[-1])
        self.num_left_out = self.num_samples - self.size

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """See `Selection.indices`."""
        indices = np.empty(len(numbers), np.int64)
        part_of = np.searchsorted(self._bounds[1:-1], numbers, side="right")
        for number in np.unique(part_of).tolist():
            inside = part_of == number
            of_part = self.parts[number].indices(numbers[inside] - self._bounds[number])
            indices[inside] = self.offsets[number] + of_part
        return indices


def _like(listed: np.ndarray, searched: np.ndarray) -> np.ndarray:
    """Searched values in the type of the list, which would be copied whole otherwise."""
    return np.minimum(searched.astype(np.uint64), np.iinfo(listed.dtype).max).astype(
        listed.dtype
    )
