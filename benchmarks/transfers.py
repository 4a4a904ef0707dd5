"""What Ray's object manager moves between two nodes: the measurements of benchmarks/hops.py."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_STORE_BYTES = 2_500_000_000
_OBJECTS = 6  # of a block each, in one measurement
IN_FLIGHT = (1, 2, 4)
SETTINGS: list[dict[str, str]] = [
    {"rpc_threads_num": "1"},
    {"rpc_threads_num": "2"},
    {"default_chunk_size": str(1 << 20)},
    {"default_chunk_size": str(20 << 20)},
    {"default_chunk_size": str(64 << 20)},
    {"max_bytes_in_flight": str(256 << 20)},
    {"client_connection_num": "1"},
    {"client_connection_num": "4"},
    {},
]
"""Ray's RAY_object_manager_* (src/ray/common/ray_config_def.h), each by itself, and none of them.

Ray's own values: a thread for each four CPUs of the node, from 2 to 8, of each of three kinds; chunks of 5 MiB;
2 GiB in flight; 2 connections.
"""


@dataclass(frozen=True)
class Transfer:
    """Objects on their way from one node to another; medians.

    Attributes:
        gb_per_s: that arrive.
        put_gb_per_s, put_cpu_s: into the object store; CPU seconds of the process for each GB.
        source_cpu_s, sink_cpu_s: CPU seconds of the raylets for each GB; nan where they are on other machines.
        thread_cpu_s: of the thread of a raylet that is busiest, for each GB.
        thread: its name.
    """

    gb_per_s: float
    put_gb_per_s: float
    put_cpu_s: float
    source_cpu_s: float
    sink_cpu_s: float
    thread_cpu_s: float
    thread: str


@contextlib.contextmanager
def two_nodes(address: str) -> Iterator[tuple[list[str], list[int]]]:
    """Ids of two nodes of a cluster, and their raylets: of one that runs, whose raylets are elsewhere, or our own.

    Each of our own has the threads of a machine of 32 CPUs or more.
    """
    options: dict[str, Any] = {"num_cpus": 32, "object_store_memory": _STORE_BYTES}
    options |= {"include_dashboard": False, "dashboard_agent_listen_port": 0}
    if address:
        cluster = None
    else:
        cluster = Cluster(initialize_head=True, head_node_args=options)
    nodes: list[Any] = []
    raylets: list[int] = []
    try:
        if cluster:
            nodes = [cluster.head_node, cluster.add_node(**options)]
            raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
        ray.init(
            address=cluster.address if cluster else address, logging_level=logging.ERROR
        )
        ids = [node.node_id for node in nodes] or [
            node["NodeID"] for node in ray.nodes() if node["Alive"]
        ]
        if len(ids) < 2:
            raise SystemExit("a cluster of one node: there is nothing between two")
        yield ids[:2], raylets
    finally:
        ray.shutdown()
        if cluster:
            cluster.shutdown()


class Node:
    """A process on one of the nodes."""

    def put(self, num_bytes: int) -> tuple[list[Any], float, float]:
        """Objects of noise; seconds, and those of CPU, that it took to put them."""
        data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        began = time.perf_counter()
        cpu = time.process_time()
        refs = [ray.put(data) for _ in range(_OBJECTS)]
        return refs, time.perf_counter() - began, time.process_time() - cpu

    def fetch(self, refs: list[Any], in_flight: int) -> float:
        """Seconds until all are on this node, of which it asks for so many at a time."""
        began = time.perf_counter()
        asked = refs[:in_flight]
        waiting = refs[in_flight:]
        while asked:
            _, asked = ray.wait(asked, num_returns=1, fetch_local=True)
            asked, waiting = asked + waiting[:1], waiting[1:]
        return time.perf_counter() - began


def _threads(pid: int) -> dict[str, float]:
    """CPU seconds of each thread of a process, by its name and number."""
    names = {}
    for thread in psutil.Process(pid).threads():
        with contextlib.suppress(FileNotFoundError):
            name = Path(f"/proc/{pid}/task/{thread.id}/comm").read_text().strip()
            names[f"{name} {thread.id}"] = thread.user_time + thread.system_time
    return names


def _once(
    source: Any, sink: Any, raylets: list[int], num_bytes: int, in_flight: int
) -> Transfer:
    total = num_bytes * _OBJECTS / 1e9
    refs, put_s, put_cpu_s = ray.get(source.put.remote(num_bytes))
    before = [_threads(pid) for pid in raylets]
    seconds = ray.get(sink.fetch.remote(refs, in_flight))
    used = [
        {
            name: (cpu_s - earlier.get(name, 0.0)) / total
            for name, cpu_s in _threads(pid).items()
        }
        for pid, earlier in zip(raylets, before, strict=True)
    ]
    sink_cpu_s, source_cpu_s = [sum(threads.values()) for threads in used] or [
        math.nan
    ] * 2
    busiest = max(
        (item for threads in used for item in threads.items()),
        key=lambda item: item[1],
        default=("", math.nan),
    )
    del refs
    time.sleep(1.5)  # Ray frees in rounds
    return Transfer(
        total / seconds,
        total / put_s,
        put_cpu_s / total,
        source_cpu_s,
        sink_cpu_s,
        busiest[1],
        busiest[0].rpartition(" ")[0],
    )


def measure(
    cases: list[tuple[int, int]],
    repeats: int,
    address: str = "",
    settings: dict[str, str] | None = None,
) -> list[Transfer]:
    """Move objects, for each pair of an object's bytes and the number in flight, between two nodes.

    Args:
        address: of a cluster that runs; empty = two raylets on this machine.
        settings: of Ray's object manager, by their names without the prefix.
    """
    names = {
        f"RAY_object_manager_{name}": value for name, value in (settings or {}).items()
    }
    os.environ |= names
    try:
        with two_nodes(address) as (ids, raylets):
            sink, source = (
                ray.remote(Node)
                .options(
                    num_cpus=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(
                        node, soft=False
                    ),
                )
                .remote()
                for node in ids
            )
            # memory is new, and connections are made
            _once(source, sink, raylets, *cases[0])
            runs = [
                [_once(source, sink, raylets, *case) for case in cases]
                for _ in range(repeats)
            ]
    finally:
        for name in names:
            del os.environ[name]
    return [
        _median([of_repeat[number] for of_repeat in runs])
        for number in range(len(cases))
    ]


def _median(runs: list[Transfer]) -> Transfer:
    values = {
        name: statistics.median(getattr(run, name) for run in runs)
        for name in vars(runs[0])
        if name != "thread"
    }
    return Transfer(**values, thread=statistics.mode(run.thread for run in runs))
