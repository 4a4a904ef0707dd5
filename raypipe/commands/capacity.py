"""How large a cluster a target needs, and which limit it meets first; docs/costs.md has the formulas."""

from __future__ import annotations

import math
from typing import Any

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from raypipe.config import PoolConfig
from raypipe.errors import ConfigError
from raypipe.logs import table
from raypipe.storage.files import read_json
from raypipe.streaming.blocks import MAX_BYTES, fitting

_OBJECT_STORE_SHARE = 0.3  # of a node's memory (ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION)
_FREED_AFTER_S = 1.0  # what was let go stays in the object store for about so long: Ray frees in rounds
_PER_RANK_ON_HOST = 3  # micro-batches: one on the device's way, one ready, one that is being fetched
_READ_AHEAD = 2  # a reader's rows, in multiples of what is in flight, see docs/memory.md
_GBIT = 1e9 / 8


def plan_capacity(
    report: str,
    *,
    images_per_s_per_gpu: PositiveFloat,
    gpus: PositiveInt = 1,
    headroom: NonNegativeFloat = 0.15,
    cpus_per_node: PositiveInt = 16,
    cpus_per_actor: PositiveFloat = 1.0,
    memory_gib_per_node: PositiveFloat = 32.0,
    gbps_per_node: PositiveFloat = 10.0,
    gpus_per_host: PositiveInt = 8,
    gbps_per_gpu_host: PositiveFloat = 25.0,
    max_nodes: NonNegativeInt = 0,
    store_mb_per_s: NonNegativeFloat = 0.0,
    object_manager_mb_per_s: NonNegativeFloat = 790.0,
    execution_limit: PositiveFloat = 60.0,
) -> dict[str, Any]:
    """Print the CPU nodes, memory and network that a target needs, and the limit that is hit first.

    Example: raypipe plan-capacity report.json --images-per-s-per-gpu 2500 --gpus 8

    Args:
        report: from `raypipe bench STORE --output FILE`, measured on a CPU like those of the nodes.
        images_per_s_per_gpu: that one GPU takes when it never waits; docs/tuning.md has it from a run's report.
        gpus: in all.
        headroom: actors to spare, as a share.
        cpus_per_node: of a CPU node.
        cpus_per_actor: as pool.cpus_per_actor.
        memory_gib_per_node: of a CPU node, GiB; Ray takes 30 % of it for the object store.
        gbps_per_node: network of a CPU node, Gbit/s each way.
        gpus_per_host: GPUs in a GPU host.
        gbps_per_gpu_host: network of a GPU host, Gbit/s each way.
        max_nodes: CPU nodes that there may be; 0 = any number.
        store_mb_per_s: what the store can be read at, MB/s in all; 0 = not known.
        object_manager_mb_per_s: what Ray brings into a GPU host from other nodes, MB/s; by default what it does
            between two nodes on the same two cores, a lower bound (docs/scale.md); 0 = not known.
        execution_limit: blocks/s that one Ray Data execution passes on (docs/scale.md).
    """
    measured = _report(report)
    actors_per_node = math.floor(cpus_per_node / cpus_per_actor + 1e-9)
    if not actors_per_node:
        raise ConfigError(f"a node of {cpus_per_node} CPUs holds no actor of {cpus_per_actor:g} (cpus_per_actor)")
    micro_batch, micro_batch_bytes = measured["micro_batch"], measured["micro_batch_bytes"]
    pixel_bytes, encoded_bytes = micro_batch_bytes / micro_batch, measured["encoded_bytes_per_image"]
    per_s = images_per_s_per_gpu * gpus
    encoded_per_s, on_host = per_s * encoded_bytes, min(gpus_per_host, gpus)
    wanted = per_s * (1 + headroom) / (measured["stream_images_per_s"] / measured["actors"])
    actors = math.ceil(wanted)
    fixed, per_actor, _ = PoolConfig().blocks_for(gpus, actors)
    work_s = micro_batch * measured["actors"] / measured["stream_images_per_s"]
    block = fitting([work_s], [micro_batch_bytes], MAX_BYTES)
    in_flight = (fixed + per_actor * actors) * block
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
    host_in = on_host * images_per_s_per_gpu * pixel_bytes
    on_host_bytes = on_host * _PER_RANK_ON_HOST * micro_batch_bytes + host_in * _FREED_AFTER_S
    found: dict[str, Any] = {
        "images_per_s": per_s,
        "micro_batches_per_s": per_s / micro_batch,
        "micro_batches_of_a_block": block,
        "blocks_per_s": per_s / micro_batch / block,
        "actors": actors,
        "actors_per_gpu": wanted / gpus,
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
    passed = per_s / micro_batch / block / execution_limit
    larger = math.ceil(block * passed) if passed > 1 else 2 * block
    group = math.floor(gpus / passed)
    apart = f"raise pool.executions, so that each serves at most {group} GPUs, or " if 1 <= group < gpus else ""
    advice = {
        "execution": f"{apart}raise pool.block (to {larger:,}, say)",
        "gpu_host_network": "send fewer bytes (transform.size, transform.decode=gpu), or fewer GPUs to a host",
        "object_manager": "measure it on your machines (`python benchmarks/hops.py --address auto`, then "
        "--object-manager-mb-per-s), run actors on the GPU hosts' own CPUs, or send fewer bytes (transform.size, "
        "transform.decode=gpu)",
        "store": "convert the store with --short-side, or spread the store over more disks",
        "cpu_nodes": "allow more, convert the store with --short-side, or transform less on CPUs",
    }
    shares = {
        "execution": passed,
        "gpu_host_network": host_in / (gbps_per_gpu_host * _GBIT),
        "object_manager": host_in / (object_manager_mb_per_s * 1e6 or math.inf),
        "store": encoded_per_s / (store_mb_per_s * 1e6 or math.inf),
        "cpu_nodes": nodes[sized_by] / (max_nodes or math.inf),
    }
    limits = dict(sorted(((name, share) for name, share in shares.items() if share), key=lambda limit: -limit[1]))
    first, used = next(iter(limits.items()))
    found |= {"limits": limits, "first_limit": first}
    found["first_limit_images_per_s_per_gpu"] = most = images_per_s_per_gpu / used
    # What Ray brings into a host is a lower bound until it is measured.
    beyond = "Perhaps out of reach" if first == "object_manager" else "Out of reach"
    found["verdict"] = (
        f"{beyond if used > 1 else 'Nothing is exceeded'}: the first limit, {first.replace('_', ' ')}, is "
        f"hit at {most:,.0f} images/s per GPU; the target takes {used:.0%} of it. Before that, {advice[first]}."
    )
    rows = [(name.replace("_", " "), _readable(name, value)) for name, value in found.items() if name != "limits"]
    rows[-3:] = [(f"limit: {name.replace('_', ' ')}", f"{share:.0%} used") for name, share in limits.items()]
    table(f"{report}: {gpus} GPUs x {images_per_s_per_gpu:,.0f} images/s", rows)
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
    figures = ("stream_images_per_s", "actors", "micro_batch", "micro_batch_bytes", "encoded_bytes_per_image")
    for name in (*figures, "read"):
        value = content.get(name) if isinstance(content, dict) else None
        is_figure = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        if not (value in ("actor", "stage") if name == "read" else is_figure):
            raise ConfigError(
                f"{address}: {name} is {value!r}, which bench never writes: make it anew by `raypipe bench STORE "
                "--output FILE`"
            )
    return content
