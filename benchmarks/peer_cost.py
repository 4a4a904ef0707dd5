"""What a command and all its descendants cost: CPU time and memory, by looking at them several times a second."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass, field

import numpy as np
import psutil
from memory import private_bytes

_PERIOD_S = 0.25


@dataclass
class Cost:
    """Samples of one process tree.

    Attributes:
        at: time.perf_counter() of each look, s; it is one clock for all processes of the machine.
        cpu_s: CPU time spent by then, s.
        memory: bytes at each look: the private pages of all processes, and what shared memory has grown by.
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
    shared_before = _shared_bytes()
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
                cost.memory.append(
                    private_bytes(process.pid) + max(0, _shared_bytes() - shared_before)
                )
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


def _shared_bytes() -> int:
    usage = os.statvfs("/dev/shm")
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize
