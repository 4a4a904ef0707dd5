"""What a command and its descendants cost: CPU time, and memory, at rare looks, as each walks all pages."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field

import numpy as np
import psutil

_PERIOD_S = 0.5
_LOOKS_FOR_EACH_AT_MEMORY = 6


@dataclass
class Cost:
    """Samples of one process tree.

    Attributes:
        at: time.perf_counter() of each look, s; it is one clock for all processes of the machine.
        cpu_s: CPU time spent by then, s.
        memory: proportional set size of all processes, bytes: a page that several share counts once.
    """

    at: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def cpu_between(self, start: float, end: float) -> float:
        """CPU seconds between two times."""
        return float(
            np.interp(end, self.at, self.cpu_s) - np.interp(start, self.at, self.cpu_s)
        )


class FailedError(Exception):
    """The command failed, or took too long; with the end of what it printed."""


def run(command: list[str], timeout_s: float, env: dict[str, str]) -> tuple[str, Cost]:
    """Run a command to its end; returns its standard output."""
    cost = Cost()
    spent = dict[int, float]()
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=env,
    ) as process:
        seen: dict[int, psutil.Process] = {}
        while True:
            try:
                out, errors = process.communicate(timeout=_PERIOD_S)
                break
            except subprocess.TimeoutExpired:
                _look(process.pid, seen, spent)
                cost.at.append(time.perf_counter())
                cost.cpu_s.append(sum(spent.values()))
                if len(cost.at) % _LOOKS_FOR_EACH_AT_MEMORY == 0:
                    cost.memory.append(sum(map(_memory_of, seen.values())))
            if time.perf_counter() - started > timeout_s:
                _end(seen)
                raise FailedError(f"took longer than {timeout_s:.0f} s")
    _end(seen)
    if process.returncode:
        raise FailedError((errors or out).strip()[-2000:])
    return out, cost


def _look(pid: int, seen: dict[int, psutil.Process], spent: dict[int, float]) -> None:
    """Update the processes of a tree and their CPU time; those that have ended keep what they had."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        seen[process.pid] = process
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent[process.pid] = times.user + times.system


def _end(seen: dict[int, psutil.Process]) -> None:
    """Kill what the command has left behind."""
    for process in seen.values():
        try:
            process.kill()  # psutil knows a process by its start too, so never another of the same number
        except psutil.NoSuchProcess:
            continue


def _memory_of(process: psutil.Process) -> int:
    """Its proportional set size, bytes; 0 = it has ended."""
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0
