"""Where transform actors run, on a cluster of several (pretended) nodes of its own, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from local_head import RAY_ON_THIS_MACHINE

# As cluster.yaml has it, small: a head without CPUs; a GPU host that offers 2 CPUs, of which the trainer takes
# one; a CPU node. Two streams then ask for as many actors as the CPU node has CPUs, and for one more.
PROGRAM = """
import json, sys, threading, time
import ray
from ray.cluster_utils import Cluster
import raypipe
from raypipe.streaming.pipeline import block_dataset

head = {"num_cpus": 0, "include_dashboard": False, "dashboard_agent_listen_port": 0}
cluster = Cluster(initialize_head=True, head_node_args=head)
gpu = cluster.add_node(num_cpus=2, num_gpus=1, wait=False)
cpu = cluster.add_node(num_cpus=2, labels={"raypipe": "transform"}, wait=False)
cluster.wait_for_nodes()
names = {gpu.node_id: "gpu host", cpu.node_id: "cpu node"}
ray.init(address=cluster.address, logging_level="WARNING")
trainer = ray.util.placement_group([{"CPU": 1, "GPU": 1}])
ray.get(trainer.ready())

def homes():
    actors = [actor for actor in ray._private.state.actors().values() if "MapWorker" in actor["ActorClassName"]]
    return [names.get(actor["Address"]["NodeID"], "head") for actor in actors if actor["State"] == "ALIVE"]


plan = raypipe.PlanConfig(epochs=50, micro_batch_size=2, global_batch_size=2)
running = []
for num_actors in (2, 1):
    pool = raypipe.PoolConfig(min_actors=num_actors, max_actors=num_actors)
    spec = raypipe.open_stream(sys.argv[1], plan=plan, pool=pool, train_transform=None)
    rows = iter(block_dataset(spec, spec.plan.start(), max_actors=num_actors).iter_batches(batch_size=None))
    next(rows)
    running.append(rows)
    while len(homes()) < len(running) + 1:  # the second of two actors may still be on its way
        time.sleep(0.2)
    print(json.dumps(sorted(homes())), flush=True)
del rows
running.clear()
while any(thread.name == "iter_threaded" for thread in threading.enumerate()):
    time.sleep(0.1)  # Ray Data's; in a call to Ray after its shutdown it would end this process, exit code 1
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.cluster
def test_actors_take_cpu_nodes_then_the_gpu_host_and_never_the_head(
    stores: dict[str, Path],
) -> None:
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets want short paths
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(stores["train"])],
            env={**env, "RAY_TMPDIR": folder, **RAY_ON_THIS_MACHINE},
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')
    )
    assert first == ["cpu node", "cpu node"]
    assert second == ["cpu node", "cpu node", "gpu host"]
