"""A command's work on a store as Ray tasks: one error where there is no CPU, progress, and an end on an error."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from raypipe.errors import ResourceError
from raypipe.failures import get

# CPUs of a run that has just ended come back within seconds; anything longer is another job's.
_SETTLE_S = 10.0
# A task that is told to stop does so within a chunk.
_STOP_S = 30.0


class Tasks:
    """Tasks of one CPU each, which are not tried again. An error or Ctrl-C within the `with` ends them all: none
    shall work on while its work is being undone.

    Each task's function gets, before its own arguments, a file that is there as long as the work is wanted, see
    `check_wanted`. With Ray 2.60, ray.cancel aborts this process at times, where a task is cancelled while it is
    being dispatched ("Check failed: Tried to complete task that was not pending").

    Args:
        what: the work, for errors.
        here: on this node alone, for tasks on local files, which other nodes may not have; else on any.
    """

    def __init__(self, what: str, here: bool) -> None:
        import ray

        self._what, self._where = what, "this node" if here else "the cluster"
        self._node = ray.get_runtime_context().get_node_id() if here else None
        self._tasks: list[Any] = []

    def num_cpus(self) -> int:
        """How many CPUs there are, free or not.

        Raises:
            ResourceError: none.
        """
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"] and self._node in (None, node["NodeID"])]
        found = sum(int(node["Resources"].get("CPU", 0)) for node in nodes)
        if not found:
            raise ResourceError(
                f"{self._where} offers Ray no CPUs (num-cpus: 0): run {self._what} where there are some"
            )
        return found

    def __enter__(self) -> Self:
        """Raises ResourceError where other jobs keep all CPUs: Ray alone would wait for ever, and say nothing."""
        deadline = time.monotonic() + _SETTLE_S
        while self._most_free() < 1:
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"{self._what} needs 1 CPU, other jobs hold all {self.num_cpus()} of {self._where}. "
                    "Wait for them, or stop them (`ray job list`)"
                )
            time.sleep(0.2)
        descriptor, name = tempfile.mkstemp(prefix="raypipe-tasks-")
        os.close(descriptor)
        self._wanted = Path(name)
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        import ray

        self._wanted.unlink()
        if kind is not None and self._tasks:
            ends = [task.completed() if isinstance(task, ray.ObjectRefGenerator) else task for task in self._tasks]
            ray.wait(ends, num_returns=len(ends), timeout=_STOP_S, fetch_local=False)

    def stream(
        self,
        function: Callable[..., Iterator[Any]],
        calls: Iterable[tuple[Any, ...]],
        total: int,
        num_done: Callable[[Any], int],
        progress: bool,
    ) -> Iterator[Any]:
        """Yield what a function yields for each of its calls, one task each, as it comes.

        Args:
            function: of the file `wanted`, and of one of the calls.
            calls: arguments of each task.
            total: samples in all.
            num_done: of what a task yields: how many samples it stands for.
            progress: show a bar on standard error.

        Raises:
            ResourceError: a task's process died; else what a task raised.
        """
        import ray
        from rich.console import Console
        from rich.progress import Progress

        self._start(function, calls, num_returns="streaming")
        with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
            shown = bar.add_task(self._what, total=total)
            pending = list(self._tasks)
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

    def results(self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> list[Any]:
        """What a function returns for each of its calls, one task each; otherwise as `stream`."""
        self._start(function, calls)
        return get(list(self._tasks))

    def _start(self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], **options: Any) -> None:
        import ray

        strategy: Any = "SPREAD"
        if self._node is not None:
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self._node, soft=False)
        task = ray.remote(num_cpus=1, scheduling_strategy=strategy, max_retries=0, **options)(function)
        self._tasks = []
        for arguments in calls:
            self._tasks.append(task.remote(self._wanted, *arguments))

    def _most_free(self) -> float:
        import ray

        nodes = ray._private.state.available_resources_per_node()
        return max((nodes[n].get("CPU", 0.0) for n in nodes if self._node in (None, n)), default=0.0)


def check_wanted(wanted: Path) -> None:
    """Called in a task: raise InterruptedError as soon as its work is not wanted any more."""
    if not wanted.exists():
        raise InterruptedError("the work was given up")
