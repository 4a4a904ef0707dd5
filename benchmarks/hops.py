"""What each image costs on its way to the GPUs, hop by hop, and which hop a target fills first.

    python benchmarks/hops.py [--images-per-s 24000 --gpus 8 --micro-batch-size 256 --size 224 --repeats 3]
    python benchmarks/hops.py --address auto     # the object store between two nodes of a cluster that runs

Measured here: into the object store; from one raylet to another on this machine, which is a lower bound of what
two machines do (these have one machine's cores, and the loopback for a network); and the host's copy into what
pinned memory would be, which it is with a CUDA device, whose PCIe is measured, too. Also how long training stands
still for a checkpoint of ResNet-50. Figures of other pages, and published ones, stand in `Known`. Prints a table;
the last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rp-")  # a cluster that no other process takes for its own

import raypipe  # noqa: F401  # isort: skip
import numpy as np
import psutil
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.plan.places import Cursor
from raypipe.streaming.blocks import MAX_BYTES
from raypipe.streaming.checkpoints import write_checkpoint
from raypipe.train.background import CheckpointWriter

_STORE_BYTES = 2 << 30
_OBJECTS = 12  # of a block each, on their way at one time


@dataclass(frozen=True)
class Known:
    """What this script does not measure.

    Attributes:
        per_actor: images/s that an actor decodes and transforms: 15 made 12,070 (results/gpu.md).
        encoded_bytes: of an image of ImageNet (docs/clusters.md).
        block_ms: CPU time of an execution for a block, the consumer's share included (results/scale.md).
        rank_ms: time of a rank's interpreter for a micro-batch: 6.3 ms to take it (results/scale.md), 4.3 to
            augment it by `standard` and 4.4 for the BatchNorm layers of ResNet-50 (results/gpu.md).
        pcie_gb_per_s: of 16 lanes of PCIe 5.0, 63 GB/s each way by its standard, less a fifth for packets.
        network_gbit_per_s: into the GPUs' host: an A3's first card has 200, a P5's has 100.
        host_cpus: of a P5.
    """

    per_actor: float = 805.0
    encoded_bytes: float = 110_000.0
    block_ms: float = 17.0
    rank_ms: float = 15.0
    pcie_gb_per_s: float = 50.0
    network_gbit_per_s: float = 100.0
    host_cpus: int = 192


KNOWN = Known()


@dataclass(frozen=True)
class Hop:
    """A hop at the target.

    Attributes:
        name: of it.
        cost: bytes, or CPU time, of an image.
        needs, has: what the target asks of it, and what there is, in `unit`.
        moves: what gives it more room.
        where: "host" for actors on the GPUs' host, "nodes" for actors on CPU nodes, "both".
    """

    name: str
    cost: str
    needs: float
    has: float
    unit: str
    moves: str
    where: str = "both"


def hops(
    measured: dict[str, float], per_s: float, gpus: int, rows: int, size: int, known: Known = KNOWN
) -> list[Hop]:
    """The hops of a stream of `per_s` images/s to all GPUs, in micro-batches of `rows` images of `size` pixels."""
    pixels = size * size * 3
    gb_per_s, of_rank = per_s * pixels / 1e9, per_s * pixels / 1e9 / gpus
    block = max(1, MAX_BYTES // (rows * pixels))
    blocks, micro_batches = per_s / rows / block, per_s / rows / gpus
    kilobytes, cores = f"{pixels / 1e3:,.0f} KB", per_s / known.per_actor
    cpu_put, cpu_arrives = (1e6 * pixels / 1e9 * measured[f"{name}_cpu_s_per_gb"] for name in ("put", "arrival"))
    fewer = "actors on the host; transform.size; transform.wire: yuv420"
    return [
        Hop(
            "read and transform",
            f"{1e6 / known.per_actor:,.0f} µs",
            cores,
            known.host_cpus - 8 * gpus,
            "cores",
            "CPU nodes; --short-side",
            "host",
        ),
        Hop(
            "into the object store",
            f"{kilobytes}, {cpu_put:,.0f} µs",
            gb_per_s / cores,
            measured["put_gb_per_s"],
            "GB/s an actor",
            "more actors",
        ),
        Hop("network into the host", kilobytes, gb_per_s, known.network_gbit_per_s / 8, "GB/s", fewer, "nodes"),
        Hop(
            "Ray's object manager, into the host",
            f"{cpu_arrives:,.0f} µs",
            gb_per_s,
            measured["transfer_gb_per_s"],
            "GB/s",
            fewer,
            "nodes",
        ),
        Hop(
            "execution",
            f"{1e3 * known.block_ms / block / rows:,.0f} µs",
            blocks,
            1000 / known.block_ms,
            "blocks/s",
            "pool.micro_batches_per_block",
        ),
        Hop(
            "copy to pinned memory",
            kilobytes,
            of_rank,
            measured["copy_gb_per_s"],
            "GB/s a rank",
            "nothing has to",
        ),
        Hop(
            "PCIe",
            kilobytes,
            of_rank,
            measured.get("pcie_gb_per_s", known.pcie_gb_per_s),
            "GB/s a GPU",
            "nothing has to",
        ),
        Hop(
            "interpreter of a rank",
            f"{1e3 * known.rank_ms / rows:,.0f} µs",
            micro_batches,
            1000 / known.rank_ms,
            "micro-batches/s",
            "larger micro-batches; a lighter preset",
        ),
    ]


def show(found: list[Hop]) -> None:
    """One table, in Markdown, the fullest first."""
    print("| hop | actors on | an image costs | the target needs | there is | used | what moves it |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    where = {"host": "the host", "nodes": "CPU nodes", "both": "either"}
    for hop in sorted(found, key=lambda hop: -hop.needs / hop.has):
        amounts = f"{hop.needs:,.2f} {hop.unit} | {hop.has:,.2f} | {hop.needs / hop.has:.0%}"
        print(f"| {hop.name} | {where[hop.where]} | {hop.cost} | {amounts} | {hop.moves} |")


def rate(repeats: int, num_bytes: int, action: Callable[[], object]) -> float:
    """GB/s, the median, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        action()
        found.append(num_bytes / 1e9 / (time.perf_counter() - began))
    return statistics.median(found[1:])


def copies(num_bytes: int, repeats: int) -> dict[str, float]:
    """Host memory to host memory by one thread; with a CUDA device, to pinned memory, and on to the device."""
    source, cuda = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8), torch.cuda.is_available()
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=cuda)
    found = {"copy_gb_per_s": rate(repeats, num_bytes, lambda: np.copyto(pinned.numpy(), source))}
    if cuda:
        device = torch.empty_like(pinned, device="cuda")

        def copy() -> None:
            device.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()

        found["pcie_gb_per_s"] = rate(repeats, num_bytes, copy)
    return found


def checkpoint(repeats: int) -> dict[str, float]:
    """Seconds that training stands still for a checkpoint of ResNet-50, and until that is on the disk."""
    from torchvision.models import resnet50

    model = resnet50().to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    writer, still, whole = CheckpointWriter(), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        for step in range(repeats + 1):

            def write(state: memoryview, step: int = step) -> None:
                write_checkpoint(Path(folder).as_uri(), Cursor(0, step, "f" * 16), state, {})

            began = time.perf_counter()
            writer.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, write)
            still.append(time.perf_counter() - began)
            writer.wait()
            whole.append(time.perf_counter() - began)
    return {
        "checkpoint_still_s": statistics.median(still[1:]),
        "checkpoint_whole_s": statistics.median(whole[1:]),
    }


@contextlib.contextmanager
def two_nodes(address: str) -> Iterator[tuple[list[str], list[psutil.Process]]]:
    """Ids of two nodes of a cluster, and their raylets: of one that runs, whose raylets are elsewhere, or our own.

    Each of our own has the threads of a machine of 32 CPUs or more.
    """
    options: dict[str, Any] = {"num_cpus": 32, "object_store_memory": _STORE_BYTES}
    options |= {"include_dashboard": False, "dashboard_agent_listen_port": 0}
    cluster = None if address else Cluster(initialize_head=True, head_node_args=options)
    nodes: list[Any] = []
    raylets: list[psutil.Process] = []
    try:
        if cluster:
            nodes = [cluster.head_node, cluster.add_node(**options)]
            raylets = [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in nodes]
        ray.init(address=cluster.address if cluster else address, logging_level="ERROR")
        ids = [node.node_id for node in nodes] or [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        if len(ids) < 2:
            raise SystemExit("a cluster of one node: there is nothing between two")
        yield ids[:2], raylets
    finally:
        ray.shutdown()
        if cluster:
            cluster.shutdown()


@ray.remote(num_cpus=0)
class Node:
    """A process on one of the nodes."""

    def put(self, num_bytes: int, count: int) -> tuple[list[Any], float, float]:
        """Objects of noise; seconds, and those of CPU, that it took to put them."""
        data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        began, cpu = time.perf_counter(), time.process_time()
        refs = [ray.put(data) for _ in range(count)]
        return refs, time.perf_counter() - began, time.process_time() - cpu

    def fetch(self, refs: list[Any]) -> float:
        """Seconds until all are on this node."""
        began = time.perf_counter()
        ray.wait(refs, num_returns=len(refs), fetch_local=True)
        return time.perf_counter() - began


def object_store(num_bytes: int, repeats: int, address: str) -> dict[str, float]:
    """Into it, and from one node to another: GB/s; and CPU seconds for each GB, of each side."""
    total = num_bytes * _OBJECTS / 1e9
    found: dict[str, list[float]] = {}
    with two_nodes(address) as (ids, raylets):
        sink, source = (
            Node.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            for node in ids
        )
        for _ in range(repeats + 1):
            refs, put_s, put_cpu_s = ray.get(source.put.remote(num_bytes, _OBJECTS))
            before = [sum(raylet.cpu_times()[:2]) for raylet in raylets]
            seconds = ray.get(sink.fetch.remote(refs))
            used = [sum(raylet.cpu_times()[:2]) - cpu for raylet, cpu in zip(raylets, before, strict=True)]
            figures = {"put_gb_per_s": total / put_s, "put_cpu_s_per_gb": put_cpu_s / total}
            figures["transfer_gb_per_s"] = total / seconds
            for name, cpu_s in zip(("arrival", "departure"), used or [math.nan] * 2, strict=True):
                figures[f"{name}_cpu_s_per_gb"] = cpu_s / total
            for name, value in figures.items():
                found.setdefault(name, []).append(value)
            del refs
            time.sleep(2.0)  # Ray frees in rounds
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images-per-s", type=float, default=24_000, help="of all GPUs")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--address", default="", help="of a Ray cluster; empty = two raylets on this machine")
    args = parser.parse_args()
    pixels = args.micro_batch_size * args.size**2 * 3
    measured = object_store(pixels * max(1, MAX_BYTES // pixels), args.repeats, args.address)
    measured |= copies(pixels, args.repeats) | checkpoint(args.repeats)
    found = hops(measured, args.images_per_s, args.gpus, args.micro_batch_size, args.size)
    show(found)
    used = {hop.name: hop.needs / hop.has for hop in found}
    print(json.dumps({"settings": vars(args), "measured": measured, "used": used}))


if __name__ == "__main__":
    main()
