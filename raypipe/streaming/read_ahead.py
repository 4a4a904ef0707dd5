"""Reading ahead in an actor: the next window's groups are fetched while it makes micro-batches of this one.

actor    | make m … m + 3         | make m + 8 … m + 11        | …
thread   | read m + 32, and drop it |      the node's cache keeps its groups
"""

from __future__ import annotations

import functools
from concurrent.futures import Future

import numpy as np

from raypipe.background import in_background
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.plan.schedule import Plan
from raypipe.stores.base import Store, is_at_hand, keeps_groups

# Half of the smallest window that a plan has by itself, see `plan.order.default_window_groups`. A micro-batch
# mixes the groups of its window, so one that far ahead has most of those that the next window needs.
_NUM_SAMPLES = 2048
# samples between two looks, each of which draws a micro-batch
_LOOK_SAMPLES = 256


class ReadAhead:
    """Fetches what micro-batches of a later window need into the node's cache, in a thread of this process.

    Args:
        plan: the stream's.
        stores: by split; only those whose groups the node's cache keeps are read ahead.
        names: the columns that are read of samples.
    """

    def __init__(
        self, plan: Plan, stores: dict[Split, Store], names: tuple[str, ...]
    ) -> None:
        self._plan = plan
        self._stores = {
            split: store
            for split, store in stores.items()
            if store.groups is not None and keeps_groups(store)
        }
        self._names = names
        num_samples = plan.config.micro_batch_size
        self._num = max(1, _NUM_SAMPLES // num_samples)
        self._look_every = max(1, _LOOK_SAMPLES // num_samples)
        self._num_reads = 0
        self._fetching: Future[None] | None = None

    def begin(self, position: MicroBatchId) -> None:
        """Begin to fetch what is needed half a window after a micro-batch, unless the last is under way."""
        if position.split not in self._stores or self.is_busy:
            return
        self._num_reads += 1
        if self._num_reads % self._look_every:
            return
        ahead = self._plan.micro_batches(position, position.micro + self._num)
        later = next(ahead, None)
        if later is None or later.split not in self._stores:
            return
        store = self._stores[later.split]
        indices = self._plan.indices(later)
        indices = indices[indices != PADDING]
        if is_at_hand(store, indices, self._names):
            return
        fetch = functools.partial(self._fetch, store, indices)
        self._fetching = in_background("raypipe-read-ahead", fetch)

    @property
    def is_busy(self) -> bool:
        """True while the thread is fetching."""
        return self._fetching is not None and not self._fetching.done()

    def _fetch(self, store: Store, indices: np.ndarray) -> None:
        # The block that needs the samples reads them again, and says what is wrong.
        store.read(indices, self._names)
