"""A cluster that starts without CPU nodes: what becomes of it around streams that starve, and that do not.

    python tests/autoscale_bench.py 3      with so many CPU nodes at most; the last line is a timeline, as JSON

Nodes are processes on this machine, added and removed by Ray's own autoscaler. It may also add GPU nodes, and no
actor should make it do so, though the pool wants one actor more than the CPU nodes hold. The transform sleeps, so
that they may be more than its CPUs. The trainer takes micro-batches as fast as they come, then slowly.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent / "support"))
from local_head import LocalHead

NODE_CPUS = 2
B, SLEEP_S = 4, 0.05  # an actor makes 5 micro-batches a second
SLOW_S = 1.0  # a trainer that one actor serves with ease


def sleepy(image: np.ndarray) -> np.ndarray:
    time.sleep(SLEEP_S)
    return image


class Watcher(threading.Thread):
    """Writes down the nodes of the cluster and the actors of the pool twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.phase = ""
        self.timeline: list[dict[str, Any]] = []
        self._since = time.monotonic()
        self._over = threading.Event()

    def run(self) -> None:
        import ray

        while not self._over.wait(0.5):
            nodes = [
                node
                for node in ray.nodes()
                if node["Alive"] and node["Resources"].get("CPU")
            ]
            used = ray.cluster_resources().get(
                "CPU", 0.0
            ) - ray.available_resources().get("CPU", 0.0)
            self.timeline.append(
                {
                    "s": round(time.monotonic() - self._since, 1),
                    "phase": self.phase,
                    "nodes": len(nodes),
                    "actors": round(used),
                    "gpus": round(ray.cluster_resources().get("GPU", 0.0)),
                }
            )

    def stop(self) -> None:
        self._over.set()
        self.join()

    def until(self, phase: str, reached: Any, patience_s: float) -> bool:
        """Wait for a moment of the timeline that `reached` says yes to."""
        self.phase = phase
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self.timeline and reached(self.timeline[-1]):
                return True
            time.sleep(0.2)
        return False


def observe(store: Path, max_nodes: int) -> dict[str, Any]:
    """Run the phases of a stream on the connected cluster."""
    import ray

    from raypipe.config import PlanConfig, PoolConfig
    from raypipe.streaming.opening import open_stream
    from raypipe.streaming.pipeline import splits
    from raypipe.streaming.row import host_batches
    from raypipe.streaming.supervisor import start_supervisor

    spec = open_stream(
        str(store),
        plan=PlanConfig(epochs=1000, micro_batch_size=B),
        pool=PoolConfig(max_actors=NODE_CPUS * max_nodes + 1, grow_after_s=1.0),
        train_transform=sleepy,
    )
    from raypipe.rayext.allocation import preflight

    allocation = preflight(spec.pool)
    watcher = Watcher()
    watcher.start()

    def consume(phase: str, seconds: float, pause_s: float, batches: Any) -> None:
        """For so long, but no longer than until the pool has grown or shrunk to its end, and some seconds."""
        watcher.phase = phase
        deadline, over = time.monotonic() + seconds, False
        end = 1 if pause_s else NODE_CPUS * max_nodes
        while time.monotonic() < deadline:
            next(batches)
            time.sleep(pause_s)
            seen = watcher.timeline[-1]
            if not over and seen["phase"] == phase and seen["actors"] == end:
                deadline, over = (
                    min(deadline, time.monotonic() + (4 if pause_s else 10)),
                    True,
                )

    def is_empty(seen: dict[str, Any]) -> bool:
        return seen["nodes"] == 0

    reached = {"no nodes before": watcher.until("no stream", is_empty, 90)}
    supervisor = start_supervisor()
    (iterator,) = splits(
        spec,
        spec.plan.start(),
        max_actors=allocation.max_actors,
        supervisor=supervisor,
    )
    batches = host_batches(iterator)
    watcher.phase = "the pool starts"
    next(batches)
    consume("the trainer takes all", 60.0, 0.0, batches)
    consume("the trainer is slow", 120.0, SLOW_S, batches)
    watcher.phase = "no stream"  # from here on its actors go
    events = [text for _, text in ray.get(supervisor.events.remote(0))]
    batches.close()
    del batches, iterator
    reached["no nodes after"] = watcher.until("no stream", is_empty, 90)
    watcher.stop()
    return {
        "max_actors": allocation.max_actors,
        "reached": reached,
        "events": events,
        "timeline": watcher.timeline,
    }


def main() -> None:
    max_nodes = int(sys.argv[1])
    resources = {"CPU": NODE_CPUS, "object_store_memory": 100 << 20}
    cpu_node = {
        "resources": resources,
        "node_config": {},
        "labels": {"raypipe": "transform"},
        "min_workers": 0,
        "max_workers": max_nodes,
    }
    gpu_node = {
        "resources": {**resources, "GPU": 1},
        "node_config": {},
        "min_workers": 0,
        "max_workers": 1,
    }
    node_types = {"cpu": cpu_node, "gpu": gpu_node}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalHead(0, node_types=node_types, idle_timeout_s=5) as head,
    ):
        # Ray reads these, the token among them, when it is imported.
        os.environ.update(
            {
                name: value
                for name, value in head.environment.items()
                if name.startswith("RAY")
            }
        )
        import ray
        from pictures import samples

        from raypipe.stores.destination import write_atomically

        store = Path(folder, "train.lmdb")
        write_atomically(str(store), samples(40), tuple("abcde"))
        ray.init(address=head.gcs_address, log_to_driver=False)
        try:
            found = observe(store, max_nodes)
        finally:
            ray.shutdown()  # before the head goes: Ray waits a minute for one that has gone
    print(json.dumps(found))


if __name__ == "__main__":
    main()
