"""How large a cluster a target needs, from a measured report. Knows neither Ray nor torch.

    Report    what `raypipe bench` measured   images/s of an actor, bytes of an image and of a micro-batch
    Target    what is wanted                  GPUs, and the images/s that each takes
    Nodes     what the machines are like      CPUs, memory, network
    plan      all three → Capacity            actors, nodes, memory, bandwidth, and the limit that is hit first

All of it grows in proportion to the images/s of a GPU, but for what is bounded elsewhere: one execution's
micro-batches/s, a GPU host's network, the store, and how many CPU nodes there may be. These are the limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from raypipe.config import PoolConfig
from raypipe.errors import ConfigError
from raypipe.metrics.measured import Report

EXECUTION_MICRO_BATCHES_PER_S = 60.0
"""Micro-batches/s that one Ray Data execution passes on: 17 ms of CPU time each with the pixels of 128 images at
224 px, on one core. Small ones take 9 to 13 ms (docs/scale.md)."""

# Ray gives its object store this share of a node's memory (ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION).
_OBJECT_STORE_SHARE = 0.3
# What was let go stays in the object store for about so long, seconds: Ray frees in rounds.
_FREED_AFTER_S = 1.0
# Micro-batches of a rank on its own host: one on the device's way, one ready, one that is being fetched.
_PER_RANK_ON_HOST = 3
# A reader's rows, in multiples of what is in flight, see "What is bounded" in the README.
_READ_AHEAD = 2
_GBIT = 1e9 / 8
_GIB = 2**30


@dataclass(frozen=True)
class Target:
    """What is wanted.

    Attributes:
        images_per_s_per_gpu: that a GPU takes when it never waits.
        gpus: W.
        headroom: actors to spare, as a share of those that would just do.
    """

    images_per_s_per_gpu: float
    gpus: int = 1
    headroom: float = 0.15

    def __post_init__(self) -> None:
        _require_positive(self, "images_per_s_per_gpu", "gpus")
        if not 0 <= self.headroom < math.inf:
            raise ConfigError(f"headroom must be at least 0, got {self.headroom!r}")

    @property
    def images_per_s(self) -> float:
        """Of all GPUs."""
        return self.images_per_s_per_gpu * self.gpus


@dataclass(frozen=True)
class Nodes:
    """What the machines, the store and one execution can do.

    Attributes:
        cpus_per_node: of a CPU node.
        cpus_per_actor: as `pool.cpus_per_actor`.
        memory_gib_per_node: of a CPU node, GiB; Ray takes 30 % of it for the object store.
        gbps_per_node: network of a CPU node, Gbit/s each way.
        gpus_per_host: GPUs in a GPU host.
        gbps_per_gpu_host: network of a GPU host, Gbit/s each way.
        max_nodes: CPU nodes that there may be; 0 = any number.
        store_mb_per_s: what the store can be read at, MB/s in all; 0 = not known.
        execution_limit: micro-batches/s that one Ray Data execution passes on.
    """

    cpus_per_node: int = 16
    cpus_per_actor: float = 1.0
    memory_gib_per_node: float = 32.0
    gbps_per_node: float = 10.0
    gpus_per_host: int = 8
    gbps_per_gpu_host: float = 25.0
    max_nodes: int = 0
    store_mb_per_s: float = 0.0
    execution_limit: float = EXECUTION_MICRO_BATCHES_PER_S

    def __post_init__(self) -> None:
        _require_positive(
            self,
            *("cpus_per_node", "cpus_per_actor", "memory_gib_per_node", "gbps_per_node"),
            *("gpus_per_host", "gbps_per_gpu_host", "execution_limit"),
        )
        for name in ("max_nodes", "store_mb_per_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)!r}")
        if not self.actors_per_node:
            raise ConfigError(
                f"a node of {self.cpus_per_node} CPUs holds no actor of {self.cpus_per_actor:g}: raise "
                "cpus_per_node, or lower cpus_per_actor"
            )

    @property
    def actors_per_node(self) -> int:
        """Transform actors that a CPU node has room for."""
        return math.floor(self.cpus_per_node / self.cpus_per_actor + 1e-9)


def _require_positive(values: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(values, name) < math.inf:
            raise ConfigError(f"{name} must be positive, got {getattr(values, name)!r}")


@dataclass(frozen=True)
class Limit:
    """Something of which there is only so much.

    Attributes:
        name: of it.
        used: what the target takes of it, as a share; above 1 it is exceeded.
        what: it takes, in words.
        advice: what to change.
    """

    name: str
    used: float
    what: str
    advice: str


@dataclass(frozen=True)
class Capacity:
    """What a target needs.

    Attributes:
        images_per_s, micro_batches_per_s: in all.
        actors, actors_per_gpu: transform actors, headroom included; per GPU not rounded.
        cpu_nodes, cpu_nodes_per_gpu: as many as any of their CPUs, network and object stores ask for.
        sized_by: which of these asks for most: "CPUs", "network" or "object store".
        gpu_hosts: machines that hold the GPUs.
        in_flight: micro-batches in flight, as `pool.in_flight` has it.
        object_store_bytes: in all CPU nodes, at most at one time.
        object_store_bytes_per_node, object_store_bytes_per_gpu_host: of this, and beside it.
        gpu_host_in_bytes_per_s: pixels that arrive at a GPU host.
        node_out_bytes_per_s, node_in_bytes_per_s: pixels that leave, and encoded images that reach, a CPU node.
        store_read_bytes_per_s: encoded images that leave the store, in all.
        limits: the one that is hit first comes first.
    """

    images_per_s: float
    micro_batches_per_s: float
    actors: int
    actors_per_gpu: float
    cpu_nodes: int
    cpu_nodes_per_gpu: float
    sized_by: str
    gpu_hosts: int
    in_flight: int
    object_store_bytes: float
    object_store_bytes_per_node: float
    object_store_bytes_per_gpu_host: float
    gpu_host_in_bytes_per_s: float
    node_out_bytes_per_s: float
    node_in_bytes_per_s: float
    store_read_bytes_per_s: float
    limits: tuple[Limit, ...]


def plan(report: Report, target: Target, nodes: Nodes) -> Capacity:
    """What a target needs, where actors work as fast as they were measured to."""
    per_s = target.images_per_s
    actors = math.ceil(per_s * (1 + target.headroom) / report.images_per_s_per_actor)
    micro_batches_per_s = per_s / report.micro_batch
    fixed, per_actor = PoolConfig().in_flight_for(target.gpus)
    in_flight = fixed + per_actor * actors
    store_bytes = (in_flight + micro_batches_per_s * _FREED_AFTER_S) * report.micro_batch_bytes
    if report.read == "stage":
        store_bytes += _READ_AHEAD * in_flight * report.micro_batch * report.encoded_bytes_per_image
    pixels_per_s = per_s * report.pixel_bytes_per_image
    encoded_per_s = per_s * report.encoded_bytes_per_image
    asked = {
        "CPUs": actors / nodes.actors_per_node,
        "network": max(pixels_per_s, encoded_per_s) / (nodes.gbps_per_node * _GBIT),
        "object store": store_bytes / (nodes.memory_gib_per_node * _GIB * _OBJECT_STORE_SHARE),
    }
    sized_by = max(asked, key=lambda name: asked[name])
    cpu_nodes = math.ceil(asked[sized_by])
    on_host = min(nodes.gpus_per_host, target.gpus)
    host_in = on_host * target.images_per_s_per_gpu * report.pixel_bytes_per_image
    return Capacity(
        images_per_s=per_s,
        micro_batches_per_s=micro_batches_per_s,
        actors=actors,
        actors_per_gpu=per_s * (1 + target.headroom) / report.images_per_s_per_actor / target.gpus,
        cpu_nodes=cpu_nodes,
        cpu_nodes_per_gpu=asked[sized_by] / target.gpus,
        sized_by=sized_by,
        gpu_hosts=math.ceil(target.gpus / nodes.gpus_per_host),
        in_flight=in_flight,
        object_store_bytes=store_bytes,
        object_store_bytes_per_node=store_bytes / cpu_nodes,
        object_store_bytes_per_gpu_host=on_host * _PER_RANK_ON_HOST * report.micro_batch_bytes
        + host_in * _FREED_AFTER_S,
        gpu_host_in_bytes_per_s=host_in,
        node_out_bytes_per_s=pixels_per_s / cpu_nodes,
        node_in_bytes_per_s=encoded_per_s / cpu_nodes,
        store_read_bytes_per_s=encoded_per_s,
        limits=_limits(report, target, nodes, micro_batches_per_s, host_in, encoded_per_s, asked[sized_by]),
    )


def _limits(
    report: Report,
    target: Target,
    nodes: Nodes,
    micro_batches_per_s: float,
    host_in: float,
    encoded_per_s: float,
    cpu_nodes: float,
) -> tuple[Limit, ...]:
    passed = micro_batches_per_s / nodes.execution_limit
    groups = math.floor(target.gpus / passed)
    larger = math.ceil(report.micro_batch * passed) if passed > 1 else 2 * report.micro_batch
    limits = [
        Limit(
            "execution",
            passed,
            f"{micro_batches_per_s:,.1f} of the {nodes.execution_limit:g} micro-batches/s that one Ray Data "
            "execution passes on",
            f"raise plan.micro_batch (to {larger:,}, say)"
            + (f", or give every {groups} GPUs an execution of their own" if 1 <= groups < target.gpus else ""),
        ),
        Limit(
            "gpu host network",
            host_in / (nodes.gbps_per_gpu_host * _GBIT),
            f"{host_in / _GBIT:,.1f} of the {nodes.gbps_per_gpu_host:g} Gbit/s of a GPU host",
            "send fewer bytes (a smaller transform.size; transform.decode=gpu sends encoded images), or take "
            "hosts with fewer GPUs or a faster network",
        ),
    ]
    if nodes.store_mb_per_s:
        used = encoded_per_s / (nodes.store_mb_per_s * 1e6)
        what = f"{encoded_per_s / 1e6:,.0f} of the {nodes.store_mb_per_s:g} MB/s that the store can be read at"
        limits.append(Limit("store", used, what, "ingest with --short-side, or spread the store over more disks"))
    if nodes.max_nodes:
        what = f"{cpu_nodes:,.1f} of the {nodes.max_nodes} CPU nodes"
        advice = "allow more, ingest with --short-side, set transform.decode_min_side, or transform less on CPUs"
        limits.append(Limit("cpu nodes", cpu_nodes / nodes.max_nodes, what, advice))
    return tuple(sorted(limits, key=lambda limit: -limit.used))


def verdict(capacity: Capacity, target: Target) -> str:
    """The limit that is hit first, where, and what to change, in words."""
    first, *others = capacity.limits
    most = f"{target.images_per_s_per_gpu / first.used:,.0f} images/s per GPU"
    if first.used <= 1:
        return (
            f"Nothing is exceeded. The first limit to be hit, at {most} ({1 / first.used:.1f} times the target), "
            f"is the {first.name}: the target takes {first.what}. Before that, {first.advice}."
        )
    also = [limit.name for limit in others if limit.used > 1]
    return (
        f"The target is out of reach by its {first.name}: it takes {first.what}, {first.used:.1f} times what "
        f"there is; {most} are the most. To get there, {first.advice}."
        + (f" Exceeded as well: {', '.join(also)}." if also else "")
    )
