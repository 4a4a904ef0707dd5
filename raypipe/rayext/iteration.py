"""Iteration over one rank's part of an execution, with an early start and a complete cleanup.

After an iteration that ends early, Ray Data would leave a thread that waits forever, and a reference cycle that
keeps actors alive.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from raypipe.rayext.cluster_state import is_local
from raypipe.rayext.data_context import ours, stream_settings
from raypipe.rayext.failures import cause_of
from raypipe.rayext.lost_blocks import with_copies

if TYPE_CHECKING:
    from ray.data import DataIterator

_RAY_DATA_THREAD = "iter_threaded"
_MAKES_BATCHES = "_create_batch_iterator"
_THREAD_S = 5.0  # time for a thread to finish its current call to Ray

Row = dict[str, np.ndarray]


class Ended:
    """An empty split, for a finished stream; Ray Data would run an execution for it, with log lines."""

    def iter_batches(self, **options: Any) -> Iterator[Row]:
        """Return an empty iterator."""
        return iter(())


class _Begun:
    """Proxy of Ray Data's coordinator of splits, for one split whose execution has already begun.

    Args:
        coordinator: handle of the actor.
        split: number of the split.
    """

    def __init__(self, coordinator: Any, split: int) -> None:
        self.actor = coordinator
        self._begun = [coordinator.start_epoch.remote(split)]
        self.start_epoch = SimpleNamespace(remote=self._epoch)

    def _epoch(self, split: int) -> Any:
        if self._begun:
            return self._begun.pop()
        return self.actor.start_epoch.remote(split)

    def __getattr__(self, name: str) -> Any:
        # during unpickling, before `actor` is set
        if name.startswith("_") or name == "actor":
            raise AttributeError(name)
        return getattr(self.actor, name)


def coordinator_of(iterator: Any) -> Any:
    """Return the handle of the actor that runs an iterator's execution; None = this process runs it."""
    coordinator = getattr(iterator, "_coord_actor", None)
    if isinstance(coordinator, _Begun):
        return coordinator.actor
    return coordinator


def stop_execution(supervisor: Any) -> None:
    """End a stream's execution in this process, if it still runs: another thread waits in `rows`, which then ends.

    Args:
        supervisor: handle of the stream's Supervisor.
    """
    for thread in threading.enumerate():
        settings = stream_settings(getattr(thread, "_data_context", None))
        if settings and settings.supervisor is supervisor:
            cast(Any, thread).shutdown(force=True)


def begun(iterator: Any) -> Any:
    """Return the same split, with an execution that begins once all ranks have called this.

    Otherwise Ray Data begins when the last rank asks for its first row, after all have built their models, which
    takes seconds for the imports. Then all ranks would wait while the pool's processes start.

    Args:
        iterator: a rank's DataIterator. An execution in this process begins at its first row regardless.
    """
    coordinator = coordinator_of(iterator)
    if coordinator is None:
        return iterator
    iterator = copy.copy(iterator)  # the original keeps the handle that ends the actor
    iterator._coord_actor = _Begun(coordinator, iterator._output_split_idx)
    return iterator


def rows(iterator: DataIterator) -> Generator[Row, None, None]:
    """Yield the rows of a rank's split, zero-copy and read-only; drop each row before the next.

    Raises:
        RaypipeError: the error that an actor raised, without Ray's wrappers.
    """
    failure: BaseException | None = None
    before = set(threading.enumerate())
    threads = list[threading.Thread]()
    batch_iterators = _record_batch_iterators(iterator)
    # On one machine a finished block is at hand, and Ray Data would hold three more in memory to take one ahead.
    num_ahead = 0 if is_local() and coordinator_of(iterator) is None else 1
    try:
        with ours():
            blocks = iter(
                iterator.iter_batches(
                    batch_size=None,  # type: ignore[arg-type]
                    batch_format="numpy",
                    prefetch_batches=num_ahead,
                )
            )
        while True:
            with ours():
                row: Any = next(blocks, None)
            if row is None:
                break
            if not threads:
                threads = [
                    t
                    for t in threading.enumerate()
                    if t.name == _RAY_DATA_THREAD and t not in before
                ]
            yield row
            # otherwise its block would stay in memory until the next row arrives
            del row
    except Exception as error:
        failure = cause_of(error)
    finally:
        # their end tells Ray Data's statistics
        with ours():
            blocks = None  # type: ignore[assignment]
        vars(iterator).pop(_MAKES_BATCHES, None)
        del iterator
        for batch_iterator in batch_iterators:
            # Ray Data stops its prefetcher's thread only at the end; after an early exit it would wait forever.
            getattr(
                getattr(batch_iterator, "_prefetcher", None), "stop", lambda: None
            )()
        batch_iterators.clear()
        # An execution is a reference cycle. Until it is collected, its released actors may keep their CPUs, and an
        # idle cluster looks busy to the next run.
        gc.collect()
        # A thread that calls Ray after `ray.shutdown()` would end the process with exit code 1 and no message.
        for thread in threads:
            thread.join(_THREAD_S)
    # The error is raised only here, since inside it would keep the frames of the execution alive.
    if failure is not None:
        raise failure


def _record_batch_iterators(iterator: Any) -> list[Any]:
    """Return a list to which Ray Data's batch iterators of this iterator will be appended."""
    batch_iterators = list[Any]()
    if make := getattr(iterator, _MAKES_BATCHES, None):
        coordinator = coordinator_of(iterator)

        def create(*args: Any, **options: Any) -> Any:
            made = make(*args, **options)
            made._resolve_block_refs = with_copies(
                made._resolve_block_refs, coordinator
            )
            batch_iterators.append(made)
            return made

        setattr(iterator, _MAKES_BATCHES, create)
    return batch_iterators
