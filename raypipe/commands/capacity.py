"""How large a cluster a target needs, from the report of `raypipe bench`; docs/costs.md has the formulas.

All of it grows in proportion to the images/s of a GPU, but for what is bounded elsewhere: one execution's
micro-batches/s, a GPU host's network, the store, and how many CPU nodes there may be. These are the limits.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from raypipe.config import PoolConfig
from raypipe.errors import ConfigError
from raypipe.logs import table
from raypipe.metrics.records import METRICS, read_records, told
from raypipe.storage.filesystem import as_uri
from raypipe.storage.whole_file import read_json

_OBJECT_STORE_SHARE = 0.3  # of a node's memory (ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION)
_FREED_AFTER_S = 1.0  # what was let go stays in the object store for about so long: Ray frees in rounds
_PER_RANK_ON_HOST = 3  # micro-batches: one on the device's way, one ready, one that is being fetched
_READ_AHEAD = 2  # a reader's rows, in multiples of what is in flight, see docs/memory.md
_MAX_WAIT = 0.95  # a run that waits for more of its time does not tell how fast its trainers are
_GBIT = 1e9 / 8


def plan_capacity(
    report: str,
    *,
    target_images_per_s: NonNegativeFloat = 0.0,
    gpus: NonNegativeInt = 0,
    run: str = "",
    headroom: NonNegativeFloat = 0.15,
    cpus_per_node: PositiveInt = 16,
    cpus_per_actor: PositiveFloat = 1.0,
    memory_gib_per_node: PositiveFloat = 32.0,
    gbps_per_node: PositiveFloat = 10.0,
    gpus_per_host: PositiveInt = 8,
    gbps_per_gpu_host: PositiveFloat = 25.0,
    max_nodes: NonNegativeInt = 0,
    store_mb_per_s: NonNegativeFloat = 0.0,
    execution_limit: PositiveFloat = 60.0,
) -> dict[str, Any]:
    """Print the CPU nodes, memory and network that a target needs, and the limit that is hit first.

    Example: raypipe plan-capacity report.json --target-images-per-s 2500 --gpus 8

    Args:
        report: from `raypipe bench STORE --output FILE`, measured on a CPU like those of the nodes.
        target_images_per_s: that one GPU takes when it never waits; 0 = from --run.
        gpus: in all; 0 = 1, or with --run as many as its trainers.
        run: folder or URI of a run, whose trainers' images/s are the target.
        headroom: actors to spare, as a share.
        cpus_per_node: of a CPU node.
        cpus_per_actor: as pool.cpus_per_actor.
        memory_gib_per_node: of a CPU node, GiB; Ray takes 30 % of it for the object store.
        gbps_per_node: network of a CPU node, Gbit/s each way.
        gpus_per_host: GPUs in a GPU host.
        gbps_per_gpu_host: network of a GPU host, Gbit/s each way.
        max_nodes: CPU nodes that there may be; 0 = any number.
        store_mb_per_s: what the store can be read at, MB/s in all; 0 = not known.
        execution_limit: micro-batches/s that one Ray Data execution passes on (docs/scale.md).
    """
    measured = _report(report)
    if run:
        rate, trainers = trainer_images_per_s(run)
        target_images_per_s, gpus = target_images_per_s or rate, gpus or trainers
    if not target_images_per_s:
        raise ConfigError("no target: give --target-images-per-s, of one GPU, or --run, of a run that has trained")
    gpus, actors_per_node = gpus or 1, math.floor(cpus_per_node / cpus_per_actor + 1e-9)
    if not actors_per_node:
        raise ConfigError(f"a node of {cpus_per_node} CPUs holds no actor of {cpus_per_actor:g} (cpus_per_actor)")
    micro_batch, micro_batch_bytes = measured["micro_batch"], measured["micro_batch_bytes"]
    pixel_bytes, encoded_bytes = micro_batch_bytes / micro_batch, measured["encoded_bytes_per_image"]
    per_s = target_images_per_s * gpus
    encoded_per_s, on_host = per_s * encoded_bytes, min(gpus_per_host, gpus)
    actors_per_gpu = per_s * (1 + headroom) / (measured["stream_images_per_s"] / measured["actors"]) / gpus
    actors = math.ceil(per_s * (1 + headroom) / (measured["stream_images_per_s"] / measured["actors"]))
    fixed, per_actor = PoolConfig().in_flight_for(gpus)
    in_flight = fixed + per_actor * actors
    store_bytes = (in_flight + per_s / micro_batch * _FREED_AFTER_S) * micro_batch_bytes
    if measured["read"] == "stage":
        store_bytes += _READ_AHEAD * in_flight * micro_batch * encoded_bytes
    nodes = {
        "CPUs": actors / actors_per_node,
        "network": max(per_s * pixel_bytes, encoded_per_s) / (gbps_per_node * _GBIT),
        "object store": store_bytes / (memory_gib_per_node * 2**30 * _OBJECT_STORE_SHARE),
    }
    sized_by = max(nodes, key=lambda name: nodes[name])
    cpu_nodes = math.ceil(nodes[sized_by])
    host_in = on_host * target_images_per_s * pixel_bytes
    on_host_bytes = on_host * _PER_RANK_ON_HOST * micro_batch_bytes + host_in * _FREED_AFTER_S
    found: dict[str, Any] = {
        "images_per_s": per_s,
        "micro_batches_per_s": per_s / micro_batch,
        "actors": actors,
        "actors_per_gpu": actors_per_gpu,
        "cpu_nodes": cpu_nodes,
        "cpu_nodes_per_gpu": nodes[sized_by] / gpus,
        "sized_by": sized_by,
        "gpu_hosts": math.ceil(gpus / gpus_per_host),
        "in_flight": in_flight,
        "object_store_bytes": store_bytes,
        "object_store_bytes_per_node": store_bytes / cpu_nodes,
        "object_store_bytes_per_gpu_host": on_host_bytes,
        "gpu_host_in_bytes_per_s": host_in,
        "node_out_bytes_per_s": per_s * pixel_bytes / cpu_nodes,
        "node_in_bytes_per_s": encoded_per_s / cpu_nodes,
        "store_read_bytes_per_s": encoded_per_s,
    }
    passed = per_s / micro_batch / execution_limit
    larger = math.ceil(micro_batch * passed) if passed > 1 else 2 * micro_batch
    groups = math.floor(gpus / passed)
    apart = f", or give every {groups} GPUs an execution of their own" if 1 <= groups < gpus else ""
    limits = {
        "execution": (passed, f"raise plan.micro_batch (to {larger:,}, say){apart}"),
        "gpu_host_network": (
            host_in / (gbps_per_gpu_host * _GBIT),
            "send fewer bytes (transform.size, transform.decode=gpu), or take hosts with fewer GPUs",
        ),
    }
    if store_mb_per_s:
        advice = "ingest with --short-side, or spread the store over more disks"
        limits["store"] = (encoded_per_s / (store_mb_per_s * 1e6), advice)
    if max_nodes:
        advice = "allow more, ingest with --short-side, or transform less on CPUs"
        limits["cpu_nodes"] = (nodes[sized_by] / max_nodes, advice)
    limits = dict(sorted(limits.items(), key=lambda limit: -limit[1][0]))
    first, (used, advice) = next(iter(limits.items()))
    found |= {"limits": {name: limit[0] for name, limit in limits.items()}, "first_limit": first}
    found["first_limit_images_per_s_per_gpu"] = most = target_images_per_s / used
    found["verdict"] = (
        f"{'Out of reach' if used > 1 else 'Nothing is exceeded'}: the first limit, {first.replace('_', ' ')}, is "
        f"hit at {most:,.0f} images/s per GPU; the target takes {used:.0%} of it. Before that, {advice}."
    )
    rows = [(name.replace("_", " "), _readable(name, value)) for name, value in found.items() if name != "limits"]
    rows[-3:] = [(f"limit: {name.replace('_', ' ')}", f"{limit[0]:.0%} used") for name, limit in limits.items()]
    table(f"{report}: {gpus} GPUs x {target_images_per_s:,.0f} images/s", rows)
    print(found["verdict"])
    return found


def _readable(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("_bytes_per_s"):
        return f"{value * 8 / 1e9:,.2f} Gbit/s"
    return f"{value / 2**30:,.2f} GiB" if "bytes" in name else f"{value:,.1f}".removesuffix(".0")


def _report(address: str) -> dict[str, Any]:
    """What `raypipe bench` wrote; ConfigError where a figure is missing or not positive."""
    content = read_json(address)
    for name in (
        *("stream_images_per_s", "actors", "micro_batch", "micro_batch_bytes"),
        *("encoded_bytes_per_image", "read"),
    ):
        value = content.get(name) if isinstance(content, dict) else None
        if name == "read" and value in ("actor", "stage"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(
                f"{address}: {name} is {value!r}, which bench never writes: make it anew by `raypipe bench STORE "
                "--output FILE`"
            )
    return content


def trainer_images_per_s(run: str) -> tuple[float, int]:
    """Images/s of one trainer of a run if it never waited, the median since the last start; and their number.

    Raises:
        ConfigError: the run has made no progress, or it waits for data most of its time.
    """
    records = read_records(as_uri(run))
    if records is None:
        raise ConfigError(f"{run} has no {METRICS}: give the folder of a run that has begun to train")
    if records.unreadable:
        print(f"{run}: {told(records.unreadable)}", flush=True)
    starts: list[tuple[int, list[tuple[float, float]]]] = [(1, [])]
    for record in records.kept:
        if record.get("kind") == "start":
            starts.append((record["workers"], []))
        elif record.get("kind") == "train" and record.get("images_per_s"):
            starts[-1][1].append((record["images_per_s"], record["wait_fraction"]))
    workers, lines = next((start for start in reversed(starts) if start[1]), (1, []))
    steady = lines[1:] or lines  # the first waits for the start of processes
    if not steady or statistics.median(wait for _, wait in steady) > _MAX_WAIT:
        raise ConfigError(
            f"{run} has recorded no training, or waits for data nearly all of its time, which hides how fast its "
            "trainers are: give --target-images-per-s"
        )
    return statistics.median(per_s / (1 - wait) for per_s, wait in steady if wait <= _MAX_WAIT) / workers, workers
