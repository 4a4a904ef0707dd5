"""The command that sizes a cluster. It is part of the command line, see `raypipe.commands.cli`."""

from __future__ import annotations

from typing import Any

from raypipe.commands.capacity import EXECUTION_MICRO_BATCHES_PER_S, Capacity, Nodes, Target, plan, verdict
from raypipe.errors import ConfigError
from raypipe.logs import table
from raypipe.metrics.measured import Report, trainer_images_per_s
from raypipe.metrics.records import METRICS, read_records, told
from raypipe.storage.filesystem import as_uri
from raypipe.storage.whole_file import read_json


def plan_capacity(
    report: str,
    *,
    target_images_per_s: float = 0.0,
    gpus: int = 0,
    run: str = "",
    headroom: float = 0.15,
    cpus_per_node: int = 16,
    cpus_per_actor: float = 1.0,
    memory_gib_per_node: float = 32.0,
    gbps_per_node: float = 10.0,
    gpus_per_host: int = 8,
    gbps_per_gpu_host: float = 25.0,
    max_nodes: int = 0,
    store_mb_per_s: float = 0.0,
    execution_limit: float = EXECUTION_MICRO_BATCHES_PER_S,
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
        execution_limit: micro-batches/s that one Ray Data execution passes on.
    """
    measured = Report.of(read_json(report), report)
    trainers = 1
    if run:
        rate, trainers = trainer_images_per_s(_records(run), run)
        target_images_per_s = target_images_per_s or rate
    if not target_images_per_s:
        raise ConfigError("no target: give --target-images-per-s, of one GPU, or --run, of a run that has trained")
    target = Target(target_images_per_s, gpus or trainers, headroom)
    nodes = Nodes(
        cpus_per_node=cpus_per_node,
        cpus_per_actor=cpus_per_actor,
        memory_gib_per_node=memory_gib_per_node,
        gbps_per_node=gbps_per_node,
        gpus_per_host=gpus_per_host,
        gbps_per_gpu_host=gbps_per_gpu_host,
        max_nodes=max_nodes,
        store_mb_per_s=store_mb_per_s,
        execution_limit=execution_limit,
    )
    found = plan(measured, target, nodes)
    sentence = verdict(found, target)
    _show(report, measured, target, nodes, found)
    print(sentence)
    shown = {name: value for name, value in vars(found).items() if name != "limits"}
    used = {limit.name.replace(" ", "_"): limit.used for limit in found.limits}
    first = found.limits[0]
    return shown | {
        "limits": used,
        "first_limit": first.name.replace(" ", "_"),
        "first_limit_images_per_s_per_gpu": target.images_per_s_per_gpu / first.used,
        "verdict": sentence,
    }


def _show(report: str, measured: Report, target: Target, nodes: Nodes, found: Capacity) -> None:
    def gib(num_bytes: float) -> str:
        return f"{num_bytes / 2**30:,.2f} GiB"

    def gbps(bytes_per_s: float) -> str:
        return f"{bytes_per_s * 8 / 1e9:,.2f} Gbit/s"

    read_ms, transform_ms = measured.read_cpu_s_per_image * 1e3, measured.transform_cpu_s_per_image * 1e3
    each, host = found.object_store_bytes_per_node, found.object_store_bytes_per_gpu_host
    table(
        f"{report}: {target.gpus} GPUs x {target.images_per_s_per_gpu:,.0f} images/s\n"
        f"CPU nodes of {nodes.cpus_per_node} CPUs, {nodes.memory_gib_per_node:g} GiB, {nodes.gbps_per_node:g} "
        f"Gbit/s; GPU hosts of {nodes.gpus_per_host} GPUs, {nodes.gbps_per_gpu_host:g} Gbit/s",
        [
            ("one actor, as streamed", f"{measured.images_per_s_per_actor:,.0f} images/s"),
            ("its CPU time of an image: read + transform", f"{read_ms:.3f} + {transform_ms:.3f} ms"),
            ("images/s", f"{found.images_per_s:,.0f}"),
            ("micro-batches/s", f"{found.micro_batches_per_s:,.1f}"),
            (
                f"transform actors, {target.headroom:.0%} to spare",
                f"{found.actors:,} ({found.actors_per_gpu:.1f} per GPU)",
            ),
            (
                f"CPU nodes, by their {found.sized_by}",
                f"{found.cpu_nodes:,} ({found.cpu_nodes_per_gpu:.2f} per GPU)",
            ),
            ("GPU hosts", f"{found.gpu_hosts:,}"),
            ("micro-batches in flight", f"{found.in_flight:,}"),
            ("object store, all CPU nodes / each", f"{gib(found.object_store_bytes)} / {gib(each)}"),
            ("object store, each GPU host", gib(host)),
            ("network into a GPU host", gbps(found.gpu_host_in_bytes_per_s)),
            ("network out of a CPU node", gbps(found.node_out_bytes_per_s)),
            ("network into a CPU node", gbps(found.node_in_bytes_per_s)),
            ("read from the store", f"{found.store_read_bytes_per_s / 1e6:,.0f} MB/s"),
            *((f"limit: {limit.name}", f"{limit.used:.0%} used") for limit in found.limits),
        ],
    )


def _records(run: str) -> list[dict[str, Any]]:
    found = read_records(as_uri(run))
    if found is None:
        raise ConfigError(f"{run} has no {METRICS}: give the folder of a run that has begun to train")
    if found.unreadable:
        print(f"{run}: {told(found.unreadable)}", flush=True)
    return found.kept
