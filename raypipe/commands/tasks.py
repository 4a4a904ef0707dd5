"""Runs a command's work on a store as Ray tasks: shows progress, ends on an error, fails if there is no CPU."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import ResourceError
from raypipe.rayext.cluster import connect
from raypipe.rayext.failures import get
from raypipe.stores.base import Store

# CPUs of a run that has just ended come back within seconds; anything longer is another job's.
_SETTLE_S = 10.0
# A task stops within a chunk once its file is gone.
_STOP_S = 30.0
# Several ranges per CPU even out their costs; each opens the store again, which scans a folder.
_PER_CPU = 2
# Samples per report of a task: a driver gets those of hundreds of tasks.
PART = 256


def run_over(
    what: str,
    store: Store,
    function: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
    num_done: Callable[[Any], int],
    progress: bool = True,
) -> Iterator[Any]:
    """`run_tasks` over ranges that make up a store: one on a local path by this node, one at a URI by all nodes.

    Args:
        function: called with the file, the store, the ends of a range, and the arguments.
    """
    from raypipe.stores.parquet import ParquetStore

    connect()
    here = "://" not in store.address
    reader = store.forwards() if isinstance(store, ParquetStore) else store
    bounds = task_bounds(store, count_cpus(what, here) * _PER_CPU).tolist()
    calls = [(reader, *ends, *arguments) for ends in itertools.pairwise(bounds)]
    yield from run_tasks(what, here, function, calls, len(store), num_done, progress)


def task_bounds(store: Store, num_tasks: int) -> np.ndarray:
    """Bounds of the tasks' ranges, int64 (n + 1,); no group is cut, so no group is read twice."""
    num_tasks = max(1, min(num_tasks, len(store) // PART))
    bounds = np.linspace(0, len(store), num_tasks + 1).astype(np.int64)
    if store.groups is not None and len(store):
        bounds = store.groups[np.searchsorted(store.groups, bounds)]
    return np.unique(bounds)


def run_tasks(
    what: str,
    here: bool,
    function: Callable[..., Iterator[Any]],
    calls: Iterable[tuple[Any, ...]],
    total: int,
    num_done: Callable[[Any], int],
    progress: bool = True,
) -> Iterator[Any]:
    """Yield what a function yields for each of its calls, as it comes; a call is a task of one CPU, tried once.

    On an error, on Ctrl-C, or when it is closed, this generator ends after its tasks have ended, so no task works
    while its work is being undone.

    Args:
        what: the work, for errors and the bar.
        here: only on this node, for tasks on local files, which other nodes may not have; else on any.
        function: its first argument is a file that exists as long as the work is wanted, see `check_wanted`.
        calls: the other arguments, of each task.
        total: samples in all.
        num_done: counts the samples of a value that a task yields.
        progress: show a bar on standard error.

    Raises:
        ResourceError: a task's process died, or there is no CPU; else what a task raised.
    """
    import ray
    from rich.console import Console
    from rich.progress import Progress

    _wait_for_cpu(what, here)
    strategy: Any = "SPREAD"
    if here:
        own = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(own, soft=False)
    options = {"num_cpus": 1, "max_retries": 0, "scheduling_strategy": strategy, "num_returns": "streaming"}
    task = ray.remote(**options)(function)
    pending: list[Any] = []
    # A file tells tasks to stop: ray.cancel of Ray 2.60 aborts this process at times, where a task is being
    # dispatched meanwhile ("Check failed: Tried to complete task that was not pending").
    try:
        with (
            tempfile.NamedTemporaryFile(prefix="raypipe-tasks-") as wanted,
            Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar,
        ):
            shown = bar.add_task(what, total=total)
            for arguments in calls:
                # Other nodes do not have the file, so a task there works to its end.
                pending.append(task.remote(Path(wanted.name if here else "/"), *arguments))
            while pending:
                ready: list[Any] = ray.wait(pending, num_returns=1, timeout=10, fetch_local=False)[0]
                for stream in ready:
                    try:
                        part = get(next(stream))
                    except StopIteration:
                        pending.remove(stream)
                        continue
                    bar.advance(shown, num_done(part))
                    yield part
    finally:
        if pending:
            ends = [stream.completed() for stream in pending]
            ray.wait(ends, num_returns=len(ends), timeout=_STOP_S, fetch_local=False)


def count_cpus(what: str, here: bool) -> int:
    """Count the CPUs that the tasks may have, free or not.

    Raises:
        ResourceError: they may have none.
    """
    num_cpus = sum(int(node["Resources"].get("CPU", 0)) for node in _nodes(here))
    if not num_cpus:
        raise ResourceError(f"{_where(here)} offers Ray no CPUs (num-cpus: 0): run {what} where there are some")
    return num_cpus


def check_wanted(wanted: Path) -> None:
    """Raise InterruptedError, in a task, once its work is no longer wanted."""
    if not wanted.exists():
        raise InterruptedError("the work was given up")


def _wait_for_cpu(what: str, here: bool) -> None:
    """Raise ResourceError if other jobs keep all CPUs: Ray itself would wait forever, silently."""
    from raypipe.rayext.limits import free_cpus

    deadline = time.monotonic() + _SETTLE_S
    nodes = {node["NodeID"] for node in _nodes(here)}
    while True:
        if any(cpus >= 1 for node, cpus in free_cpus().items() if node in nodes):
            return
        if time.monotonic() > deadline:
            raise ResourceError(
                f"{what} needs 1 CPU, other jobs hold all {count_cpus(what, here)} of {_where(here)}. "
                "Wait for them, or stop them (`ray job list`)"
            )
        time.sleep(0.2)


def _nodes(here: bool) -> list[dict[str, Any]]:
    import ray

    own = ray.get_runtime_context().get_node_id()
    return [node for node in ray.nodes() if node["Alive"] and (not here or node["NodeID"] == own)]


def _where(here: bool) -> str:
    return "this node" if here else "the cluster"
