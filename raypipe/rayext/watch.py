"""The watch over a stream's processes: a process that was stopped is ended, so it is replaced as one that died.

Ray takes a process that is stopped (SIGSTOP, a debugger) for a busy one, and waits. The time limit of a transform
cannot help: its watchdog stands in the same process. So while no rank takes a block, a task on each node reads the
states of the stream's processes there, and kills those that it finds stopped twice. It leaves a process alone that
is only slow, or holds the interpreter: that one runs. While the stream moves, nobody looks.
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
# Nobody looks before the stream has stood still for so long; then again after twice the time, to this limit.
_STILL_S = 2.0
_MOST_S = 30.0
# Between two looks at a process that seems stopped: a profiler stops one for a moment.
_SURE_S = 0.5
# A node that has not run its task after so long is told of, if another one has: a process starts slowly on a
# busy machine. After twice the time it is told of in any case.
_ANSWER_S = 4.0


class Process(NamedTuple):
    """A process of a stream.

    Attributes:
        role: what it is, for people: "transform actor", "reader", "trainer 1".
        pid: its number on its node.
        started: when it was started, which tells it from a later process of that number; "" = not known.
        address: of its node.
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
    """The calling process, which is connected to Ray."""
    _, started = _stat(os.getpid())
    node = ray.get_runtime_context().get_node_id()
    return Process(role, os.getpid(), started, ray.util.get_node_ip_address(), node)


def here() -> NodeAffinitySchedulingStrategy:
    """On the calling process's node, and nowhere else: with `soft`, Ray 2.60 puts every second actor elsewhere."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def in_worker() -> bool:
    """Whether Ray has started the calling process: others may be stopped by their users, with Ctrl-Z."""
    worker: Any = ray.get_runtime_context().worker
    return bool(worker.mode == ray.WORKER_MODE)


def _stat(pid: int) -> tuple[str, str]:
    """State and time of start, as Linux has them; both empty where there is no such process, or no Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def end_stopped(processes: list[tuple[int, str]]) -> list[int]:
    """Kill those of this node's processes that are stopped, now and a moment later; returns their numbers.

    Args:
        processes: number and time of start of each.
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
    """Looks at a stream's processes while it stands still; see above.

    Args:
        note: told of each process that was ended, and of each node that does not answer: text and kind of fault.
        work_of: says what a process is at, by its key; "" = nothing is known.
        node: id of this process's node, where it looks itself.
    """

    def __init__(
        self, note: Callable[[str, str], None], work_of: Callable[[str], str] = lambda key: "", node: str = ""
    ) -> None:
        self._note, self._work_of, self._node = note, work_of, node
        self._processes: dict[str, Process] = {}  # by actor, task, rank or execution
        self._still: dict[str, float] = {}  # execution → since when no rank has taken a block from it
        self._look_after = _STILL_S
        self._looks: dict[str, tuple[Any, float]] = {}  # node → its look, and when it was asked
        self._answered_at = 0.0  # when a node last did
        self._silent: set[str] = set()

    def start(self) -> None:
        """Watch from now on, in a thread that ends with this process."""
        threading.Thread(target=self._run, name="raypipe-watch", daemon=True).start()

    def add(self, key: str, process: Process) -> None:
        """A process of the stream is there."""
        self._processes[key] = process

    def remove(self, key: str) -> None:
        """A process, or an execution, has ended."""
        self._processes.pop(key, None)
        self._still.pop(key, None)

    def moves(self, execution: str, still_s: float) -> None:
        """An execution runs; no rank has taken a block from it for so long. Its silence counts as well."""
        self._still[execution] = time.monotonic() - still_s

    def _run(self) -> None:
        while True:
            time.sleep(_PERIOD_S)
            try:
                self.turn(time.monotonic())
            except Exception:
                logger.debug("a stream's processes could not be looked at", exc_info=True)

    def turn(self, now: float) -> None:
        """Look, if it is time; say what earlier looks have found."""
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
                        f"{self._described(self._on(node))}; once Ray calls the node dead, its work is done "
                        "elsewhere",
                        "silent_node",
                    )
                continue
            del self._looks[node]
            self._silent.discard(node)
            try:
                ended: list[int] = ray.get(look)
            except ray.exceptions.RayError:  # the node has gone, and its processes with it
                for key in self._on(node):
                    self._processes.pop(key, None)
                continue
            self._answered_at = now
            self._tell(node, ended)

    def _tell(self, node: str, ended: list[int]) -> None:
        for key, process in self._on(node).items():
            if process.pid in ended:
                self._processes.pop(key, None)
                what = self._described({key: process})
                self._note(f"a stopped process (SIGSTOP) held up the stream, and was killed: {what}", "stopped")

    def _described(self, processes: dict[str, Process]) -> str:
        by_role: dict[str, list[str]] = defaultdict(list)
        for key, process in processes.items():
            work = self._work_of(key)
            by_role[process.role].append(f"{process}{work and f', {work}'}")
        return "; ".join(f"{role} ({'; '.join(texts)})" for role, texts in by_role.items())
