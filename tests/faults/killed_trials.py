"""Equal streams on a cluster of nodes, while each part is killed: python tests/faults/killed_trials.py STORE

Two streams share their micro-batches, and a third in a driver of its own. Killed with SIGKILL are, in turn: that
driver, a transform actor, the memory, a keeper, and a node. Another stream starts late. Each must have the
digests of a run alone. The last line is JSON: what was remembered soon after each kill, in micro-batches. Ray
2.60 may abort the driver after the node was killed ("Check failed: stream_it != object_ref_streams_"), which
fails the test.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import local_nodes  # isort: skip  first, as it sets what Ray reads at import
import ray

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.rayext.iteration import begun
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import end_actors, start_supervisor
from raypipe.transform.fields import MicroBatch

sys.path.append(str(Path(__file__).parents[1] / "support"))
import without_ray

KILLS = ("MapWorker", "ClusterLedger", "Keeper", "node")
SHARED_S = 60.0


def spec_of(store: str, step: int) -> StreamSpec:
    return open_stream(
        store,
        plan=PlanConfig(epochs=400, micro_batch_size=8, global_batch_size=step, seed=5),
        transform=TransformConfig(train="light", size=24),
        pool=PoolConfig(cpus_per_actor=0.5, micro_batches_per_block=2, max_actors=1),
    )


class Stream:
    """A stream, which this driver reads as fast as it wants."""

    def __init__(self, store: str, step: int = 8) -> None:
        self.spec = spec_of(store, step)
        self.supervisor = start_supervisor("run")
        self.iterators = splits(
            self.spec,
            self.spec.plan.start(),
            max_actors=1,
            supervisor=self.supervisor,
        )
        self.batches: Iterator[MicroBatch] = host_batches(begun(self.iterators[0]))
        self.digests: list[bytes] = []
        self.num_remembered = 0

    def take(self, num: int) -> None:
        for batch in islice(self.batches, num):
            self.digests.append(batch_hash(batch))
            self.num_remembered += batch.num_remembered

    def end(self) -> None:
        end_actors(self.supervisor, self.iterators, 0, 1)


def share(streams: list[Stream]) -> int:
    """Read all streams until they share; return how many micro-batches were remembered."""
    before = sum(stream.num_remembered for stream in streams)
    end = time.monotonic() + SHARED_S
    while time.monotonic() < end:
        for stream in streams:
            stream.take(4)
        remembered = sum(stream.num_remembered for stream in streams) - before
        if remembered >= 8:
            return remembered
    raise SystemExit("the streams do not share")


def lose_another_node(nodes: local_nodes.Nodes, choose: random.Random) -> None:
    """Kill a node that this driver is not connected to."""
    own = ray.get_runtime_context().get_node_id()
    spared = [node for node in nodes.nodes if node.node_id == own]
    nodes.nodes = [node for node in nodes.nodes if node.node_id != own]
    nodes.lose(choose)
    nodes.nodes += spared
    nodes.mend()


def main(store: str) -> None:
    choose = random.Random(1)
    remembered = {}
    with local_nodes.cluster() as nodes:
        address = ray.get_runtime_context().gcs_address
        killed = subprocess.Popen([sys.executable, __file__, store, address])
        streams = [Stream(store), Stream(store, 16)]
        remembered["nothing"] = share(streams)
        killed.send_signal(signal.SIGKILL)
        remembered["a trial"] = share(streams)
        for name in KILLS:
            if name == "node":
                lose_another_node(nodes, choose)
            else:
                local_nodes.kill(name, choose)
            if name == "ClusterLedger":
                streams.append(Stream(store))  # a late one
            remembered[name] = share(streams)
        for stream in streams:
            expected = without_ray.host_batches(stream.spec)
            digests = map(batch_hash, islice(expected, len(stream.digests)))
            assert stream.digests == list(digests)
            stream.end()
        killed.wait()
    print(json.dumps(remembered))


def trial(store: str, address: str) -> None:
    """Read a stream until this driver is killed."""
    ray.init(address=address, logging_level=logging.ERROR)
    stream = Stream(store)
    while True:
        stream.take(1)


if __name__ == "__main__":
    (trial if len(sys.argv) > 2 else main)(*sys.argv[1:])
