"""Processes of a stream or a run on their nodes: which they are, and whether they are stopped (SIGSTOP)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.background import process_state

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
    _, started = process_state(os.getpid())
    node = ray.get_runtime_context().get_node_id()
    return Process(role, os.getpid(), started, ray.util.get_node_ip_address(), node)


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Return the strategy for the caller's node; if `soft`, Ray 2.60 would place every second actor elsewhere."""
    return NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )


def is_ray_worker() -> bool:
    """Return whether Ray started the calling process; users may stop other processes with Ctrl-Z."""
    if not ray.is_initialized():  # the next call would start it
        return False
    worker: Any = ray.get_runtime_context().worker
    return bool(worker.mode == ray.WORKER_MODE)


def is_stopped(process: Process) -> bool:
    """Return whether a process of this node is stopped."""
    state, started = process_state(process.pid)
    return state == "T" and started == process.started


def kill_stopped(processes: list[Process]) -> list[Process]:
    """Kill those of this node's processes that are stopped, now and a moment later; return them."""
    suspects = list(filter(is_stopped, processes))
    if suspects:
        time.sleep(_SURE_S)
    ended = list(filter(is_stopped, suspects))
    for process in ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return ended
