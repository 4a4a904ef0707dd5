"""An execution as one rank has it: it begins early, and the end of an iteration leaves nothing of it behind.

Ray Data, left in the middle, keeps a thread that waits forever, and a ring of references that keeps actors alive.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from raypipe.rayext.failures import cause_of
from raypipe.rayext.ours import ours

if TYPE_CHECKING:
    from ray.data import DataIterator

_RAY_DATA_THREAD = "iter_threaded"
_MAKES_BATCHES = "_create_batch_iterator"
_THREAD_S = 5.0  # for a call to Ray that it is in

Row = dict[str, np.ndarray]


class Ended:
    """A rank's split of a stream that has ended; Ray Data would run an execution for it, and log that."""

    def iter_batches(self, **options: Any) -> Iterator[Row]:
        """Nothing."""
        return iter(())


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


def rows(iterator: DataIterator) -> Generator[Row, None, None]:
    """The rows of a rank's split, zero-copy and read-only; let go of one before the next.

    Raises:
        RaypipeError: the error that an actor raised, without the layers around it.
    """
    failure: BaseException | None = None
    before, threads = set(threading.enumerate()), list[threading.Thread]()
    batch_iterators = _record_batch_iterators(iterator)
    try:
        with ours():
            blocks = iter(
                iterator.iter_batches(
                    batch_size=None,  # type: ignore[arg-type]
                    batch_format="numpy",
                    prefetch_batches=1,
                )
            )
        while True:
            with ours():
                row: Any = next(blocks, None)
            if row is None:
                break
            if not threads:
                threads = [t for t in threading.enumerate() if t.name == _RAY_DATA_THREAD and t not in before]
            yield row
            del row  # or its block would be held until the next one has come
    except Exception as error:
        failure = cause_of(error)
    finally:
        blocks = None  # type: ignore[assignment]
        vars(iterator).pop(_MAKES_BATCHES, None)
        del iterator
        for batch_iterator in batch_iterators:
            # Ray Data stops its prefetcher's thread only at the end: left before, the thread waits forever.
            getattr(getattr(batch_iterator, "_prefetcher", None), "stop", lambda: None)()
        batch_iterators.clear()
        # An execution is a ring of references. As long as it is not collected, actors that it has let go of may
        # keep their CPUs, and a cluster that is in use no more looks busy to the next run.
        gc.collect()
        # Nobody waits for these. One that calls Ray after `ray.shutdown()` ends the process: exit code 1, no word.
        for thread in threads:
            thread.join(_THREAD_S)
    # Here, and not above: the error would hold on to the frames of the execution.
    if failure is not None:
        raise failure


def _record_batch_iterators(iterator: Any) -> list[Any]:
    """A list that gets what Ray Data will make to iterate this iterator's batches."""
    batch_iterators = list[Any]()
    if make := getattr(iterator, _MAKES_BATCHES, None):

        def create(*args: Any, **options: Any) -> Any:
            batch_iterators.append(make(*args, **options))
            return batch_iterators[-1]

        setattr(iterator, _MAKES_BATCHES, create)
    return batch_iterators
