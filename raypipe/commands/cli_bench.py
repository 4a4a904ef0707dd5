"""The command that measures speed. It is part of the command line, see `raypipe.commands.cli`."""

from __future__ import annotations

import os
from typing import Any, Literal

from raypipe.config import TransformConfig
from raypipe.logs import table
from raypipe.transform.transform_steps import brief, config_without_files


def bench(
    store: str,
    *,
    transform: str | list[dict[str, Any]] = "heavy",
    size: int = 224,
    cache: Literal["off", "memory", "disk"] = "off",
    actors: int = 0,
    micro_batch: int = 256,
    seconds: float = 20.0,
    repeats: int = 1,
    resume: bool = False,
    image_column: str = "image",
    label_column: str = "label",
    layout: str = "auto",
    output: str = "",
) -> dict[str, Any]:
    """Measure the stream against the ceiling of this machine, or, submitted, of the cluster.

    Example: raypipe bench imagenet.lmdb --repeats 3

    Args:
        store: the images.
        transform: preset, module:function, a list of Albumentations transforms, or a file of one (*.yaml, *.json).
        size: side of the images that the preset makes, in pixels.
        cache: keep decoded samples on each node, see pool.cache; the ceiling does without, and the stream's first
            epoch is not measured.
        actors: transform actors, and processes of the ceiling; 0 = one per CPU.
        micro_batch: samples in a micro-batch.
        seconds: that each stream runs for, about.
        repeats: how often all is measured; medians are printed.
        resume: measure something else: a resume at the start and at the end of an epoch of ImageNet's length.
        image_column: of the store, as `raypipe inspect` takes it.
        label_column: likewise.
        layout: likewise.
        output: write what is found to this file too, for plan-capacity; a local path or a URI.
    """
    from raypipe.commands import bench as bench_module
    from raypipe.storage.whole_file import check_place, write_json
    from raypipe.stores import open_store, store_options

    if output:
        check_place(output)
    opened = open_store(store, **store_options(image_column, label_column, layout))
    actors = actors or _cpus_here()
    config = config_without_files(TransformConfig(train=transform, size=size))
    if resume:
        from raypipe.commands import resume_bench

        cost = resume_bench.measure(
            opened, transform=config, actors=actors, micro_batch=micro_batch, repeats=repeats
        )
        table(
            f"{store}: a resume in an epoch of {resume_bench.NUM_SAMPLES:,} samples, {repeats} repeats",
            [
                ("first batch, at the epoch's start", f"{cost['resume_start_s']:.2f} s"),
                ("first batch, at its last step", f"{cost['resume_end_s']:.2f} s"),
                ("end / start", f"{cost['resume_ratio']:.3f}"),
            ],
        )
        return cost
    measured = bench_module.bench(
        opened,
        transform=config,
        cache=cache,
        actors=actors,
        micro_batch=micro_batch,
        seconds=seconds,
        repeats=repeats,
    )
    found = bench_module.summary(measured)
    report = found | bench_module.settings_of(opened, config, actors, micro_batch) | {"cache": cache}
    if output:
        write_json(output, report)
    table(
        f"{store}: {brief(config.train)} at {size} px, {actors} actors, micro-batches of {micro_batch},"
        f" {repeats} repeats",
        [
            ("ceiling: decode and transform alone", f"{found['ceiling_images_per_s']:,.0f} images/s"),
            ("stream, steady", f"{found['stream_images_per_s']:,.0f} images/s"),
            ("stream / ceiling", f"{found['ratio']:.3f}"),
            ("first batch, from ray.init", f"{found['first_batch_s']:.1f} s"),
            ("gap at a boundary / ordinary gap", f"{found['boundary_gap_ratio']:.2f}"),
            (
                "object store, peak / bound",
                f"{_mib(found['object_store_bytes'])} / {_mib(found['object_store_bound_bytes'])}",
            ),
            ("memory of all processes, peak", _mib(found["private_bytes"])),
            ("CPU time of an image: reading", f"{found['read_cpu_s_per_image'] * 1e3:.3f} ms"),
            ("CPU time of an image: decode, transform", f"{found['transform_cpu_s_per_image'] * 1e3:.3f} ms"),
        ],
    )
    return report


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def _cpus_here() -> int:
    """Free CPUs of the cluster that a job was submitted to, or those of this process."""
    from raypipe.commands.bench import on_cluster

    if not on_cluster():
        return len(os.sched_getaffinity(0))
    import ray

    from raypipe.rayext.cluster import connect

    connect()
    return max(1, int(ray.available_resources().get("CPU", 0.0)))
