"""A rank's split of an execution that several ranks share, and the moment at which the execution begins."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any


class _Begun:
    """Ray Data's coordinator of splits, as one split sees it, for which an execution has begun.

    Args:
        coordinator: handle of the actor.
        split: number of the split.
    """

    def __init__(self, coordinator: Any, split: int) -> None:
        self._coordinator, self._begun = coordinator, [coordinator.start_epoch.remote(split)]
        self.start_epoch = SimpleNamespace(remote=self._epoch)

    def _epoch(self, split: int) -> Any:
        return self._begun.pop() if self._begun else self._coordinator.start_epoch.remote(split)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is unpickled, which has no attributes yet
            raise AttributeError(name)
        return getattr(self._coordinator, name)


def begun(iterator: Any) -> Any:
    """The same split; its execution begins once all ranks have called this.

    Left alone, Ray Data begins when the last rank asks for its first row, and the pool's processes start while all
    wait. That is after each has built its model, which takes seconds for the imports alone.

    Args:
        iterator: a rank's DataIterator. One of an execution in this process begins when it is asked for a row.
    """
    coordinator = getattr(iterator, "_coord_actor", None)
    if coordinator is None:
        return iterator
    iterator = copy.copy(iterator)  # the others have the handle, by which the actor is ended
    iterator._coord_actor = _Begun(coordinator, iterator._output_split_idx)
    return iterator
