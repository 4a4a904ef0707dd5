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
from collections import defaultdict
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
# A node whose task has not run after so long is reported, if another node's has: a process starts slowly on a busy
# machine. After twice the time it is reported in any case.
_ANSWER_S = 4.0


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
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


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


def end_stopped(processes: list[tuple[int, str]]) -> list[int]:
    """Kill those of this node's processes that are stopped, now and a moment later; return their ids.

    Args:
        processes: id and start time of each.
    """

    def stopped() -> list[int]:
        return [pid for pid, started in processes if started and _stat(pid) == ("T", started)]

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
        note: called for each killed process, and each node that does not answer, with text and kind of fault.
        work_of: key of a process → description of its work; "" = unknown.
        node: id of this process's node, whose processes it checks directly.
    """

    def __init__(
        self, note: Callable[[str, str], None], work_of: Callable[[str], str] = lambda key: "", node: str = ""
    ) -> None:
        self._note, self._work_of, self._node = note, work_of, node
        self._processes: dict[str, Process] = {}  # actor, task, rank or execution → its process
        self._still: dict[str, float] = {}  # execution → time since which no rank has taken a block from it
        self._look_after = _STILL_S
        self._looks: dict[str, tuple[Any, float]] = {}  # node → its task, and the time of the request
        self._answered_at = 0.0  # time of a node's last answer
        self._silent: set[str] = set()

    def start(self) -> None:
        """Start to watch, in a thread that ends with this process."""
        threading.Thread(target=self._run, name="raypipe-watch", daemon=True).start()

    def add(self, key: str, process: Process) -> None:
        """Add a process of the stream."""
        self._processes[key] = process

    def remove(self, key: str) -> None:
        """Remove a process or an execution that has ended."""
        self._processes.pop(key, None)
        self._still.pop(key, None)

    def moves(self, execution: str, still_s: float) -> None:
        """Record for how long no rank has taken a block from an execution; missing calls count as a stall."""
        self._still[execution] = time.monotonic() - still_s

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
            self._look(now)
        self._answer(now)

    def _on(self, node: str) -> dict[str, Process]:
        return {key: process for key, process in list(self._processes.items()) if process.node == node}

    def _look(self, now: float) -> None:
        for node in {process.node for process in list(self._processes.values())} - self._looks.keys():
            known = [(process.pid, process.started) for process in self._on(node).values()]
            if node == self._node:
                self._tell(node, end_stopped(known))
                continue
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(end_stopped).options(num_cpus=0, max_retries=0, scheduling_strategy=on_node)
            self._looks[node] = task.remote(known), now

    def _answer(self, now: float) -> None:
        for node, (look, asked) in list(self._looks.items()):
            if not ray.wait([look], timeout=0)[0]:
                late_s = (now - asked) * (1 if self._answered_at > asked else 0.5)
                if late_s >= _ANSWER_S and node not in self._silent:
                    self._silent.add(node)
                    self._note(
                        f"node {node[:8]} has not answered for {now - asked:.0f} s: "
                        f"{self._described(self._on(node))}; once Ray declares the node dead, other nodes do its "
                        "work",
                        "silent_node",
                    )
                continue
            del self._looks[node]
            self._silent.discard(node)
            try:
                ended: list[int] = ray.get(look)
            except ray.exceptions.RayError:  # the node is gone, with its processes
                for key in self._on(node):
                    self._processes.pop(key, None)
                continue
            self._answered_at = now
            self._tell(node, ended)

    def _tell(self, node: str, ended: list[int]) -> None:
        for key, process in self._on(node).items():
            if process.pid in ended:
                self._processes.pop(key, None)
                description = self._described({key: process})
                self._note(f"killed a stopped process (SIGSTOP) that blocked the stream: {description}", "stopped")

    def _described(self, processes: dict[str, Process]) -> str:
        by_role: dict[str, list[str]] = defaultdict(list)
        for key, process in processes.items():
            work = self._work_of(key)
            by_role[process.role].append(f"{process}{work and f', {work}'}")
        return "; ".join(f"{role} ({'; '.join(texts)})" for role, texts in by_role.items())
