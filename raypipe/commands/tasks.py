"""A command's work on a store as Ray tasks: one error where there is no CPU, progress, and an end on an error."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raypipe.errors import ResourceError
from raypipe.failures import get

# CPUs of a run that has just ended come back within seconds; anything longer is another job's.
_SETTLE_S = 10.0
# A task that is told to stop does so within a chunk.
_STOP_S = 30.0


class Cpus:
    """The CPUs that a command's tasks may use, one each.

    Args:
        what: the work, for errors.
        here: of this node alone, for tasks on local files, which other nodes may not have; else of any.
    """

    def __init__(self, what: str, here: bool) -> None:
        import ray

        self._what = what
        self._node = ray.get_runtime_context().get_node_id() if here else None

    def number(self) -> int:
        """How many there are, free or not.

        Raises:
            ResourceError: none.
        """
        import ray

        found = sum(
            int(node["Resources"].get("CPU", 0))
            for node in ray.nodes()
            if node["Alive"] and self._node in (None, node["NodeID"])
        )
        if not found:
            where = "the cluster" if self._node is None else "this node"
            raise ResourceError(f"{where} offers Ray no CPUs (num-cpus: 0): run {self._what} where there are some")
        return found

    def wait_for_one(self) -> None:
        """Ray alone would wait for a CPU for ever, and say nothing.

        Raises:
            ResourceError: other jobs keep all.
        """
        deadline = time.monotonic() + _SETTLE_S
        while self._most_free() < 1:
            if time.monotonic() > deadline:
                where = "the cluster" if self._node is None else "this node"
                raise ResourceError(
                    f"{self._what} needs 1 CPU, other jobs hold all {self.number()} of {where}. "
                    "Wait for them, or stop them (`ray job list`)"
                )
            time.sleep(0.2)

    def _most_free(self) -> float:
        import ray

        nodes = ray._private.state.available_resources_per_node()
        return max((nodes[n].get("CPU", 0.0) for n in nodes if self._node in (None, n)), default=0.0)

    def task_options(self) -> dict[str, Any]:
        """Options of a task that takes one, and is not tried again."""
        import ray

        strategy: Any = "SPREAD"
        if self._node is not None:
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self._node, soft=False)
        return {"num_cpus": 1, "scheduling_strategy": strategy, "max_retries": 0}


def follow(
    streams: list[Any],
    what: str,
    total: int,
    num_done: Callable[[Any], int],
    progress: bool,
) -> Iterator[Any]:
    """What the tasks yield, as it comes, with a progress bar on standard error.

    Args:
        streams: of tasks with `num_returns="streaming"`.
        what: the work, in one word.
        total: samples in all.
        num_done: of what a task yields: how many samples it stands for.
        progress: show the bar.
    """
    import ray
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
        task = bar.add_task(what, total=total)
        pending = list(streams)
        while pending:
            ready: list[Any] = ray.wait(pending, num_returns=1, timeout=10, fetch_local=False)[0]
            for stream in ready:
                try:
                    part = get(next(stream))
                except StopIteration:
                    pending.remove(stream)
                    continue
                bar.advance(task, num_done(part))
                yield part


@contextlib.contextmanager
def stopped_on_error() -> Iterator[tuple[list[Any], Path]]:
    """A list of tasks, which an error or Ctrl-C ends: none shall work on while its work is being undone.

    Beside it a file, which is there as long as the tasks' work is wanted: they look, see `check_wanted`. With
    Ray 2.60, ray.cancel aborts this process at times, where a task is cancelled while it is being dispatched
    ("Check failed: Tried to complete task that was not pending").
    """
    import ray

    tasks: list[Any] = []
    descriptor, name = tempfile.mkstemp(prefix="raypipe-tasks-")
    os.close(descriptor)
    wanted = Path(name)
    try:
        yield tasks, wanted
    except BaseException:
        wanted.unlink()
        ends = [task.completed() if isinstance(task, ray.ObjectRefGenerator) else task for task in tasks]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=_STOP_S, fetch_local=False)
        raise
    wanted.unlink()


def check_wanted(wanted: Path) -> None:
    """Called in a task: raise InterruptedError as soon as its work is not wanted any more."""
    if not wanted.exists():
        raise InterruptedError("the work was given up")
