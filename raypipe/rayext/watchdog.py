"""Watch over a stream's processes: a stopped process is killed, so that it is replaced like one that died.

To Ray, a stopped process (SIGSTOP, a debugger) looks busy, so Ray waits. The time limit of a transform cannot
help, since its watchdog is stopped with the process. So while ranks wait and none takes a block, or a rank no
longer calls, the states of the stream's processes are read, on the Supervisor's node by itself and on others by a
task, and those that are found stopped twice are killed. A process that is only slow, or holds the interpreter, is
running, and is not killed. While the stream moves, or all ranks compute, no process is checked.

A stream's Supervisor runs this watch. Each rank watches the Supervisor in turn: it asks for a sign of life, and
kills one that is stopped. Ray restarts it at once, and it remembers its processes, see `kv_store`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.rayext.processes import Process, kill_stopped
from raypipe.rayext.ray_thread import RayThread

_PERIOD_S = 0.5
# Processes are checked after an execution or a rank has been still for so long, which ranks that call each second
# do not reach, and again after a quarter of that time, within the limit below, since a start is a long stall, too.
_STILL_S = 1.5
_AGAIN = 0.25
_MOST_S = 30.0
_RANK = "rank "  # begins the keys of ranks

# The period in which a rank asks the Supervisor.
_SUPERVISOR_PERIOD_S = 1.0
# Time without an answer, after which the Supervisor's process is checked. A busy one answers within milliseconds.
_SUPERVISOR_ANSWER_S = 3.0


class StreamWatchdog:
    """Checks a stream's processes while the stream has stalled; see above.

    Args:
        note: called for each killed process, with text and kind of fault.
        work_of: key of a process → description of its work; "" = unknown.
        newcomers: returns the trainers that have joined since its last call, by rank.
        is_awaited: whether a rank waits for a batch, as far as it is known.
    """

    def __init__(
        self,
        note: Callable[[str, str], None],
        work_of: Callable[[str], str] = lambda key: "",
        newcomers: Callable[[], dict[int, Process]] = dict,
        is_awaited: Callable[[], bool] = lambda: True,
    ) -> None:
        self._note = note
        self._work_of = work_of
        self._newcomers = newcomers
        self._is_awaited = is_awaited
        # actor, task, rank or execution → its process
        self._processes: dict[str, Process] = {}
        # execution → time since which no rank has taken a block from it; rank → time of its last call
        self._still: dict[str, float] = {}
        # execution or rank → the seconds after which processes are checked again
        self._look_after: dict[str, float] = {}
        self._looks: dict[str, Any] = {}  # node → its task

    def start(self) -> None:
        """Start to watch, in a thread that ends before this process."""
        watch = RayThread(
            lambda: self.turn(time.monotonic()), _PERIOD_S, "raypipe-watch"
        )
        watch.start()

    def add(self, key: str, process: Process) -> bool:
        """Add a process of the stream, which may have had another key before; return whether it is new."""
        is_new = self._processes.get(key) != process
        for other, known in list(self._processes.items()):
            if known == process:
                del self._processes[other]
        self._processes[key] = process
        return is_new

    def state(self) -> tuple[dict[str, Process], list[str]]:
        """Return the processes, and the executions and ranks, that are watched."""
        return dict(self._processes), list(self._still)

    def restore(self, state: tuple[dict[str, Process], list[str]]) -> None:
        """Watch what an earlier `state` names. Its executions and ranks stall from now on, until they move."""
        processes, still = state
        self._processes |= processes
        self._still |= dict.fromkeys(still, time.monotonic())

    def remove(self, key: str) -> None:
        """Remove a process or an execution that has ended."""
        self._processes.pop(key, None)
        self._still.pop(key, None)
        self._look_after.pop(key, None)

    def rank_called(self, rank: int) -> None:
        """Record a call of a rank, which comes each second; missing calls count as a stall."""
        self._still[f"{_RANK}{rank}"] = time.monotonic()

    def execution_progress(
        self, execution: str, still_s: float, process: Process | None = None
    ) -> bool:
        """Record for how long no rank has taken a block from an execution; missing calls count as a stall.

        Args:
            still_s: see above; negative = its first block is not due yet.
            process: process of the execution, if it is one of Ray's.

        Returns:
            Whether the execution or its process is new.
        """
        is_new = execution not in self._still
        self._still[execution] = time.monotonic() - max(0.0, still_s)
        return (process is not None and self.add(execution, process)) or is_new

    def turn(self, now: float) -> None:
        """Check the processes, if it is time; report the results of earlier checks."""
        for rank, process in self._newcomers().items():
            self.add(process.role, process)
            self._still.setdefault(f"{_RANK}{rank}", now)
        is_awaited = self._is_awaited()
        due = []
        for key, since in list(self._still.items()):
            counts = is_awaited or key.startswith(_RANK)
            if self._is_time(key, now - since if counts else 0.0):
                due.append(key)
        if due:
            self._look()
        self._answer()

    def _is_time(self, key: str, still_s: float) -> bool:
        """Return whether processes are to be checked for an execution or a rank that is still."""
        if still_s < _STILL_S:
            self._look_after.pop(key, None)
            return False
        if still_s < self._look_after.get(key, _STILL_S):
            return False
        self._look_after[key] = still_s + min(_AGAIN * still_s, _MOST_S)
        return True

    def _on(self, node: str) -> list[Process]:
        return [each for each in list(self._processes.values()) if each.node == node]

    def _look(self) -> None:
        """Look at the processes of this node, and unless one was stopped, at those of others: a task may start a
        process there, which takes as long as what the stream waits for."""
        here = ray.get_runtime_context().get_node_id()
        if ended := kill_stopped(self._on(here)):
            self._ended(ended)
            return
        watched = {process.node for process in list(self._processes.values())}
        for node in watched - self._looks.keys() - {here}:
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(kill_stopped).options(
                num_cpus=0, max_retries=0, scheduling_strategy=on_node
            )
            self._looks[node] = task.remote(self._on(node))

    def _answer(self) -> None:
        for node, look in list(self._looks.items()):
            if not ray.wait([look], timeout=0)[0]:
                continue
            del self._looks[node]
            try:
                self._ended(ray.get(look))
            except ray.exceptions.RayError:  # the node is gone, with its processes
                for key, process in list(self._processes.items()):
                    if process.node == node:
                        self._processes.pop(key, None)

    def _ended(self, processes: list[Process]) -> None:
        """Record that processes were stopped, and were killed."""
        for key, process in list(self._processes.items()):
            if process not in processes:
                continue
            self._processes.pop(key, None)
            work = self._work_of(key)
            self._note(
                "killed a stopped process (SIGSTOP) that blocked the stream: "
                f"{process.role} ({process}{work and f', {work}'})",
                "stopped",
            )


class SupervisorWatchdog:
    """Shows a stream's Supervisor that a rank lives, and watches the Supervisor, in a thread.

    Args:
        supervisor: handle of the stream's Supervisor.
        rank: number of the rank.
        waited_s: returns the seconds for which the rank has waited for a batch; 0 = it does not wait.
        on_lack: called if the Supervisor says that the stream's pool finds no CPUs.
    """

    def __init__(
        self,
        supervisor: Any,
        rank: int,
        waited_s: Callable[[], float],
        on_lack: Callable[[], None],
    ) -> None:
        self._supervisor = supervisor
        self._rank = rank
        self._waited_s = waited_s
        self._on_lack = on_lack
        self._process: Process | None = None  # where the Supervisor has answered from
        self._asked: Any = None
        self._asked_at = 0.0
        self._thread = RayThread(
            lambda: self.turn(time.monotonic()),
            _SUPERVISOR_PERIOD_S,
            "raypipe-supervisor-watchdog",
        )

    def start(self) -> None:
        """Start to watch. The Supervisor knows of the rank from now on."""
        self._ask(time.monotonic())
        self._thread.start()

    def stop(self) -> None:
        """Stop to watch."""
        self._thread.stop()

    def turn(self, now: float) -> None:
        """Ask the Supervisor for an answer, or take it; check the process of one that gives none."""
        if self._asked is None:
            self._ask(now)
        if ray.wait([self._asked], timeout=_SUPERVISOR_PERIOD_S)[0]:
            asked, self._asked = self._asked, None
            heard = ray.get(asked)
            self._process = heard.process
            if heard.lacks_room:
                self._on_lack()
        elif now - self._asked_at >= _SUPERVISOR_ANSWER_S and self._process:
            self._check(self._process)

    def _ask(self, now: float) -> None:
        waited_s = self._waited_s()
        self._asked = self._supervisor.rank_waits.remote(self._rank, waited_s)
        self._asked_at = now

    def _check(self, process: Process) -> None:
        if process.node != ray.get_runtime_context().get_node_id():
            # rank 0 is on its node
            return
        if kill_stopped([process]):
            self._process = self._asked = None
            # The restarted one records it.
            self._supervisor.note.remote(
                f"killed a stopped process (SIGSTOP) that watched the stream: {process.role} ({process})",
                "stopped",
            )
