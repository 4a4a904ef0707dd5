"""A local cluster of real nodes in this process's hands, and the killing of its nodes and processes.

Import it before anything that imports Ray.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A cluster of its own, that no other process of this machine finds and takes for its own.
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rp-")
# It looks after its nodes as the clusters do that we ship.
os.environ |= re.findall(
    r"--env (RAY_health_check_\w+)=(\d+)",
    (Path(__file__).parents[2] / "cluster.yaml").read_text(),
)

import raypipe  # noqa: F401  # isort: skip  it sets what Ray and Albumentations read at import
import psutil
import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from raypipe.rayext.cluster import connect

OBJECT_STORE_BYTES = 100 << 20


class Nodes:
    """A head without CPUs for actors, where the consumer is, and two CPU nodes; or a local run's node."""

    def __init__(self, local: bool = False) -> None:
        self._num_nodes = 0 if local else 2
        self.nodes: list[Any] = []
        self._frozen: list[Any] = []
        self._draining: list[Any] = []
        if local:
            connect(num_cpus=4, object_store_bytes=OBJECT_STORE_BYTES)
            return
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "dashboard_agent_listen_port": 0,  # else each Ray of this machine tries for 3 s to have the same
                "object_store_memory": OBJECT_STORE_BYTES,
                "resources": {"head": 100},
            },
        )
        self.nodes += [self._add() for _ in range(self._num_nodes)]
        ray.init(address=self.cluster.address, logging_level="ERROR")

    def _add(self) -> Any:
        return self.cluster.add_node(
            num_cpus=2, object_store_memory=OBJECT_STORE_BYTES, resources={"trainer": 2}
        )

    def lose(self, choose: random.Random) -> None:
        """A CPU node and all that runs on it, at once."""
        node = self.nodes.pop(choose.randrange(len(self.nodes)))
        _signal(node, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)

    def freeze(self, choose: random.Random) -> None:
        """Stop a CPU node and all that runs on it: it is silent, and its connections stay."""
        self._frozen.append(self.nodes.pop(choose.randrange(len(self.nodes))))
        _signal(self._frozen[-1], signal.SIGSTOP)

    def drain(self, choose: random.Random, seconds: float, hosting: str = "") -> None:
        """Give a CPU node notice, as `ray drain-node` does: it will be gone after so many seconds.

        Args:
            hosting: part of the title of a process; a node is taken that has one. Empty = whichever.
        """
        nodes = [
            node
            for node in self.nodes
            if not hosting or workers(hosting, _raylet(node))
        ]
        self._draining.append(choose.choice(nodes))
        client: Any = ray._raylet
        accepted, reason = client.GcsClient(address=self.cluster.address).drain_node(
            self._draining[-1].node_id,
            autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
            "the fault bench takes it away",
            int((time.time() + seconds) * 1000),
        )
        assert accepted, reason

    def mend(self) -> None:
        """Frozen nodes and those that had notice are gone, and others come."""
        self.nodes = [node for node in self.nodes if node not in self._draining]
        for node in self._frozen + self._draining:
            _signal(node, signal.SIGKILL)
            self.cluster.remove_node(node, allow_graceful=False)
        self._frozen, self._draining = [], []
        while len(self.nodes) < self._num_nodes:
            self.nodes.append(self._add())

    def close(self) -> None:
        ray.shutdown()
        if self._num_nodes:
            self.cluster.shutdown()


def _raylet(node: Any) -> psutil.Process:
    return psutil.Process(node.all_processes["raylet"][0].process.pid)


def _signal(node: Any, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        # a node that had notice ends by itself once it is idle
        raylet = _raylet(node)
        for process in [*raylet.children(recursive=True), raylet]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def workers(name: str, below: psutil.Process | None = None) -> list[psutil.Process]:
    """Ray's worker processes of this script's cluster, or of one raylet, that have `name` in their title."""
    found = []
    for process in (below or psutil.Process()).children(recursive=True):
        with contextlib.suppress(
            psutil.NoSuchProcess, psutil.ZombieProcess, IndexError
        ):
            title = process.cmdline()[0]
            if title.startswith("ray::") and name in title:
                found.append(process)
    return found


def kill(
    name: str,
    choose: random.Random,
    all_of_them: bool = False,
    number: int = signal.SIGKILL,
) -> None:
    deadline = time.monotonic() + 300
    while not (found := sorted(workers(name), key=lambda p: p.pid)):
        assert time.monotonic() < deadline, f"there is no {name} to kill"
        time.sleep(0.05)
    for process in found if all_of_them else [choose.choice(found)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextlib.contextmanager
def cluster(local: bool = False) -> Iterator[Nodes]:
    nodes = Nodes(local)
    try:
        yield nodes
    finally:
        nodes.close()
