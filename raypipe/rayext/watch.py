"""Watch over a stream's processes: a stopped process is killed, so that it is replaced like one that died.

To Ray, a stopped process (SIGSTOP, a debugger) looks busy, so Ray waits. The time limit of a transform cannot
help, since its watchdog is stopped with the process. So while no rank takes a block, a task on each node reads the
states of the stream's processes there, and kills those that it finds stopped twice. A process that is only slow,
or holds the interpreter, is running, and is not killed. While the stream moves, no process is checked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5
# Processes are checked after the stream has stalled for so long; the interval then doubles, up to the limit below.
_STILL_S = 2.0
_MOST_S = 30.0
# Time between two checks of a process that seems stopped, since a profiler stops a process for a moment.
_SURE_S = 0.5


class Process(NamedTuple):
    """A process of a stream.

    Attributes:
        role: role for messages: "transform actor", "reader", "trainer 1".
        pid: process id on its node.
        started: start time, which distinguishes it from a later process of the same id; "" = unknown.
        address: address of its node.
        node: id of its node.
    """

    role: str
    pid: int
    started: str
    address: str
    node: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.address}, node {self.node[:8]}"


def this_process(role: str) -> Process:
    """Return the calling process, which is connected to Ray."""
    _, started = _stat(os.getpid())
    node = ray.get_runtime_context().get_node_id()
    return Process(role, os.getpid(), started, ray.util.get_node_ip_address(), node)


def here() -> NodeAffinitySchedulingStrategy:
    """Return the strategy for the caller's node; if `soft`, Ray 2.60 would place every second actor elsewhere."""
    return NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )


def in_worker() -> bool:
    """Return whether Ray started the calling process; users may stop other processes with Ctrl-Z."""
    worker: Any = ray.get_runtime_context().worker
    return bool(worker.mode == ray.WORKER_MODE)


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's state and start time from Linux; both empty for a dead process or another system."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def is_stopped(process: Process) -> bool:
    """Return whether a process of this node is stopped."""
    return bool(process.started) and _stat(process.pid) == ("T", process.started)


def end_stopped(processes: list[tuple[int, str]]) -> list[int]:
    """Kill those of this node's processes that are stopped, now and a moment later; return their ids.

    Args:
        processes: id and start time of each.
    """

    def stopped() -> list[int]:
        return [
            pid
            for pid, started in processes
            if started and _stat(pid) == ("T", started)
        ]

    suspects = stopped()
    if suspects:
        time.sleep(_SURE_S)
    ended = [pid for pid in stopped() if pid in suspects]
    for pid in ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return ended


class Watch:
    """Checks a stream's processes while the stream has stalled; see above.

    Args:
        note: called for each killed process, with text and kind of fault.
        work_of: key of a process → description of its work; "" = unknown.
    """

    def __init__(
        self,
        note: Callable[[str, str], None],
        work_of: Callable[[str], str] = lambda key: "",
    ) -> None:
        self._note = note
        self._work_of = work_of
        self._processes: dict[
            str, Process
        ] = {}  # actor, task, rank or execution → its process
        self._still: dict[
            str, float
        ] = {}  # execution → time since which no rank has taken a block from it
        self._look_after = _STILL_S
        self._looks: dict[str, Any] = {}  # node → its task

    def start(self) -> None:
        """Start to watch, in a thread that ends with this process."""
        threading.Thread(target=self._run, name="raypipe-watch", daemon=True).start()

    def add(self, key: str, process: Process) -> bool:
        """Add a process of the stream; return whether it is new."""
        is_new = self._processes.get(key) != process
        self._processes[key] = process
        return is_new

    def state(self) -> tuple[dict[str, Process], list[str]]:
        """Return the processes and the executions that are watched."""
        return dict(self._processes), list(self._still)

    def restore(self, state: tuple[dict[str, Process], list[str]]) -> None:
        """Watch the processes of an earlier `state`. Its executions have stalled from now on, until they move."""
        processes, executions = state
        self._processes |= processes
        self._still |= dict.fromkeys(executions, time.monotonic())

    def remove(self, key: str) -> None:
        """Remove a process or an execution that has ended."""
        self._processes.pop(key, None)
        self._still.pop(key, None)

    def execution_progress(
        self, execution: str, still_s: float, process: Process | None = None
    ) -> bool:
        """Record for how long no rank has taken a block from an execution; missing calls count as a stall.

        Args:
            process: process of the execution, if it is one of Ray's.

        Returns:
            Whether the execution or its process is new.
        """
        is_new = execution not in self._still
        self._still[execution] = time.monotonic() - still_s
        return (process is not None and self.add(execution, process)) or is_new

    def _run(self) -> None:
        while True:
            time.sleep(_PERIOD_S)
            try:
                self.turn(time.monotonic())
            except Exception:
                logger.debug("cannot check a stream's processes", exc_info=True)

    def turn(self, now: float) -> None:
        """Check the processes, if it is time; report the results of earlier checks."""
        still_s = now - min(list(self._still.values()), default=now)
        if still_s < _STILL_S:
            self._look_after = _STILL_S
        elif still_s >= self._look_after:
            self._look_after = still_s + min(still_s, _MOST_S)
            self._look()
        self._answer()

    def _on(self, node: str) -> dict[str, Process]:
        return {
            key: process
            for key, process in list(self._processes.items())
            if process.node == node
        }

    def _look(self) -> None:
        for node in {
            process.node for process in list(self._processes.values())
        } - self._looks.keys():
            known = [
                (process.pid, process.started) for process in self._on(node).values()
            ]
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(end_stopped).options(
                num_cpus=0, max_retries=0, scheduling_strategy=on_node
            )
            self._looks[node] = task.remote(known)

    def _answer(self) -> None:
        for node, look in list(self._looks.items()):
            if not ray.wait([look], timeout=0)[0]:
                continue
            del self._looks[node]
            processes = self._on(node)
            try:
                ended: list[int] = ray.get(look)
            except ray.exceptions.RayError:  # the node is gone, with its processes
                for key in processes:
                    self._processes.pop(key, None)
                continue
            for key, process in processes.items():
                if process.pid in ended:
                    self._processes.pop(key, None)
                    work = self._work_of(key)
                    self._note(
                        "killed a stopped process (SIGSTOP) that blocked the stream: "
                        f"{process.role} ({process}{work and f', {work}'})",
                        "stopped",
                    )
