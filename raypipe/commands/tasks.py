"""Runs a command's work on a store as Ray tasks: shows progress, ends on an error, fails if there is no CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.progress import Progress

from raypipe.errors import RaypipeError, ResourceError
from raypipe.rayext.cluster_state import free_cpus, nodes
from raypipe.rayext.failures import get
from raypipe.rayext.startup import Wait

# Twice the longest start of a task's process. Ray's state of free CPUs may be old: a task that has not begun after
# this time, on a cluster without a free CPU, waits for one.
_BEGIN_S = 120.0
_LOOK_S = 10.0
# A task stops at its next part once its file is gone.
_STOP_S = 30.0
# Of a task whose process died; Ray Data tries its tasks as often.
_RETRIES = 3


def run_tasks(
    work: str,
    here: bool,
    function: Callable[..., Iterator[tuple[Any, ...]]],
    calls: Iterable[tuple[Any, ...]],
    total: int | None,
    num_most: int = 0,
) -> Iterator[Any]:
    """Yield what a function yields for each of its calls, as it comes; a call is a task of one CPU.

    On an error, on Ctrl-C, or when it is closed, this generator ends after its tasks have ended, so no task works
    while its work is being undone.

    Args:
        work: the work, for errors and the bar.
        here: only on this node, for tasks on local files, which other nodes may not have; else on any.
        function: yields parts of its work, every few seconds at least; each begins with its number of samples.
        calls: the arguments of each task.
        total: samples in all; None = unknown.
        num_most: so many tasks wait or run at a time, and only their calls are taken; 0 = all.

    Raises:
        ResourceError: a task's process died, or there is no CPU; else what a task raised.
    """
    task = _task(here)
    pending: list[Any] = []
    has_begun = False
    calls = iter(calls)
    begin = Wait(_BEGIN_S)
    # A file tells tasks to stop: ray.cancel of Ray 2.60 aborts this process at times, where a task is being
    # dispatched meanwhile ("Check failed: Tried to complete task that was not pending").
    try:
        with (
            tempfile.NamedTemporaryFile(prefix="raypipe-tasks-") as marker,
            Progress(console=Console(stderr=True), transient=True) as bar,
        ):
            shown = bar.add_task(work, total=total)
            # Other nodes do not have the file, so a task there works to its end.
            path = Path(marker.name if here else "/")
            while True:
                is_full = 0 < num_most <= len(pending)
                arguments = None if is_full else next(calls, None)
                if arguments is not None:
                    pending.append(task.remote(path, function, *arguments))
                elif not pending:
                    break
                ready: list[Any] = ray.wait(
                    pending,
                    num_returns=1,
                    timeout=_LOOK_S if arguments is None else 0,
                    fetch_local=False,
                )[0]
                has_begun = has_begun or bool(ready)
                if not has_begun and arguments is None:
                    _wait_for_cpu(begin, work, here)
                for stream in ready:
                    try:
                        report = get(next(stream))
                    except StopIteration:
                        pending.remove(stream)
                        continue
                    if isinstance(report, RaypipeError):
                        raise report
                    if report is not None:  # it has begun
                        bar.advance(shown, report[0])
                        yield report
    finally:
        if pending and has_begun:
            ends = [stream.completed() for stream in pending]
            ray.wait(ends, num_returns=len(ends), timeout=_STOP_S, fetch_local=False)


def _task(here: bool) -> Any:
    """Return `_while_wanted` as a task of Ray; for arguments see `run_tasks`."""
    strategy: Any = "SPREAD"
    if here:
        own_node = ray.get_runtime_context().get_node_id()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            own_node, soft=False
        )
    return ray.remote(
        num_cpus=1,
        max_retries=_RETRIES,
        scheduling_strategy=strategy,
        num_returns="streaming",
    )(_while_wanted)


def count_cpus(work: str, here: bool) -> int:
    """Count the CPUs that the tasks may have; raise ResourceError if they may have none."""
    num_cpus = sum(_cpus_of_nodes(here).values())
    if not num_cpus:
        raise ResourceError(
            f"{_where(here)} offers Ray no CPUs (num-cpus: 0): run {work} where there are some"
        )
    return num_cpus


def _cpus_of_nodes(here: bool) -> dict[str, int]:
    """Return the CPUs of each node where tasks may run."""
    own_node = ray.get_runtime_context().get_node_id()
    return {
        node["NodeID"]: int(node["Resources"].get("CPU", 0))
        for node in nodes()
        if not here or node["NodeID"] == own_node
    }


def _wait_for_cpu(wait: Wait, work: str, here: bool) -> None:
    """Wait a little longer if no CPU is free: Ray itself would wait forever, silently."""
    cpus = _cpus_of_nodes(here)
    free = free_cpus()
    if all(free.get(node, 0) < 1 for node in cpus):
        wait.turn(
            f"1 CPU for {work}, since other jobs hold all {sum(cpus.values())} of {_where(here)}. Wait for "
            "them, or stop them (`ray job list`)"
        )


def _where(here: bool) -> str:
    return "this node" if here else "the cluster"


def _while_wanted(
    marker: Path, function: Callable[..., Iterator[Any]], *arguments: Any
) -> Iterator[Any]:
    """A task: yields None when it begins, the parts of the function as long as a file exists, and its error."""
    yield None
    parts = function(*arguments)
    try:
        while marker.exists() and (report := next(parts, None)) is not None:
            yield report
    except RaypipeError as error:
        # if it were raised, Ray would print the errors of all other tasks
        yield error
