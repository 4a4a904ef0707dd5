"""The benchmark: the stream against the ceiling of the same machine, in one run.

    ceiling        decode and transform alone, one process per actor, bytes already in memory, no Ray; in a
                   submitted job, as many tasks of the cluster
    stream         what one consumer gets from the whole pipe, in its steady state
    first batch    from ray.init to the first micro-batch
    boundary gap   the gap before the first block of a segment, as a multiple of the gap between other blocks
    costs          CPU time and bytes of an image, which `raypipe plan-capacity` sizes a cluster by

The machine's speed drifts, so the ceiling is measured before and after each stream. Blocks come in clumps, as many
as there are actors, so the stream's rate is the slope of a line through all of them: a difference between two of
them would count up to one clump too much.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from raypipe.config import PlanConfig, PoolConfig, RunConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.logs import table
from raypipe.lookup import num_cpus, versions
from raypipe.pages import number
from raypipe.storage.files import check_place, write_json
from raypipe.stores import Store
from raypipe.transform.transform_steps import brief, config_without_files

# Images that one ceiling process keeps in memory: more than fit its caches, few enough to read at once.
_CEILING_IMAGES = 512


Figures = dict[str, float]


def bench(
    run: RunConfig, target: str = "", *, seconds: float = 20.0, repeats: int = 1, output: str = ""
) -> dict[str, Any]:
    """Measure the stream against the ceiling of this machine, or, submitted, of the cluster.

    Example: raypipe bench imagenet.lmdb --transform.train heavy --repeats 3

    Args:
        run: settings; those of the training store, transform.train, the micro-batch's size and the pool matter.
            pool.max_actors is also how many processes the ceiling has; 0 = one per CPU. The ceiling does not use
            pool.cache; with it the stream's first epoch is not measured.
        target: see `settings.command_parser`.
        seconds: that each stream runs for, about.
        repeats: how often all is measured; medians are printed.
        output: write what is found to this file too, for plan-capacity; a local path or a URI.
    """
    from raypipe.streaming.spec import open_train

    if output:
        check_place(output)
    opened = open_train(run)
    actors = run.pool.max_actors or _cpus_here()
    config = config_without_files(run.transform)
    pool = dataclasses.replace(run.pool, engine="ray", min_actors=actors, max_actors=actors)
    micro_batch = run.plan.micro_batch_size
    measured = []
    for _ in range(repeats):
        before = ceiling(opened, config, actors, seconds / 2)
        stream = stream_once(opened, config, pool, micro_batch, seconds, before["images_per_s"])
        measured.append(compared(before, stream, ceiling(opened, config, actors, seconds / 2)))
    found = summary(measured)
    report = found | measured_settings(opened, config, actors, micro_batch) | {"cache": pool.cache}
    if output:
        write_json(output, report)
    what = f"{opened.address}: {brief(config.train)} at {config.size_text} px"
    how = f"{actors} actors, micro-batches of {micro_batch}, {repeats} repeats"
    table(f"{what}, {how}", [(_UNITS[name], number(value)) for name, value in found.items() if name in _UNITS])
    print(verdict(found, actors))
    return report


_UNITS = {
    "ceiling_images_per_s": "ceiling, images/s",
    "stream_images_per_s": "stream, images/s",
    "ratio": "stream / ceiling",
    "first_batch_s": "first batch, s",
    "boundary_gap_ratio": "gap between segments / gap within",
    "micro_batch_bytes": "micro-batch, bytes",
    "read_cpu_s_per_image": "reading, CPU s/image",
    "transform_cpu_s_per_image": "transform, CPU s/image",
    "encoded_bytes_per_image": "encoded, bytes/image",
}


def verdict(found: Figures, actors: int) -> str:
    """The figures of a summary in a sentence or two."""
    said = (
        f"The stream runs at {found['ratio']:.0%} of the rate at which {actors} processes decode and transform "
        "images that are in memory."
    )
    if found["ratio"] > 1:
        said += " More than 100 % is the drift of this machine's speed: measure longer, or with --repeats 3."
    if "boundary_gap_ratio" not in found:
        said += " Each segment of this store is one block, so gaps between segments cannot be compared."
    return said


def _cpus_here() -> int:
    """Free CPUs of the cluster that a job was submitted to, or those of this process."""
    if not _on_cluster():
        return num_cpus()
    import ray

    from raypipe.rayext.cluster import connect

    connect()
    return max(1, int(ray.available_resources().get("CPU", 0.0)))


def _on_cluster() -> bool:
    """Whether this process belongs to a cluster, as a submitted job does."""
    return bool(os.environ.get("RAY_ADDRESS"))


def ceiling(store: Store, transform: TransformConfig, processes: int, seconds: float) -> Figures:
    """Measure decode and transform alone, `processes` processes side by side for `seconds`.

    They are processes of this machine without Ray; in a cluster, tasks with a CPU each, where the pool would be.

    Returns:
        `images_per_s` of all of them together; and of an image `read_cpu_s_per_image` and
        `transform_cpu_s_per_image`, CPU time in s, and `encoded_bytes_per_image`: means.
    """
    arguments = store, transform, seconds
    if _on_cluster():
        import ray

        from raypipe.rayext.cluster import connect
        from raypipe.rayext.placement import placement

        connect()
        task: Any = ray.remote(_alone).options(num_cpus=1, **placement(PoolConfig().label_selector))
        found = ray.get([task.remote(*arguments) for _ in range(processes)])
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            running = [pool.submit(_alone, *arguments) for _ in range(processes)]
            found = [each.result() for each in running]
    mean = {name: statistics.fmean(one[name] for one in found) for name in found[0]}
    return mean | {"images_per_s": mean["images_per_s"] * processes}


def _alone(store: Store, transform: TransformConfig, seconds: float) -> Figures:
    """What `ceiling` returns, of one process, with its images in memory and warmed up."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for torch, as Ray has it in an actor of one CPU
    import cv2

    from raypipe.transform.contents import Images
    from raypipe.transform.presets import build_transform
    from raypipe.transform.samples import EncodedSample

    cv2.setNumThreads(1)  # as in an actor
    store.read(np.arange(1), ("image",))  # opens it
    began_cpu = time.process_time()
    encoded = store.read(np.arange(min(len(store), _CEILING_IMAGES)), ("image",))["image"]
    read_cpu_s = time.process_time() - began_cpu
    images = [EncodedSample(image) for image in encoded]
    apply = Images(build_transform(transform.train, transform.final_size), transform).one
    for image in images[:8]:
        apply(image, (0, 0))
    started, began_cpu, done = time.perf_counter(), time.process_time(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        apply(images[done % len(images)], (done, 0))
        done += 1
    return {
        "images_per_s": done / elapsed,
        "read_cpu_s_per_image": read_cpu_s / len(images),
        "transform_cpu_s_per_image": (time.process_time() - began_cpu) / done,
        "encoded_bytes_per_image": sum(map(len, encoded)) / len(encoded),
    }


def stream_once(
    store: Store, transform: TransformConfig, pool: PoolConfig, micro_batch: int, seconds: float, guess: float
) -> Figures:
    """Run the stream for about `seconds`, with a validation after every epoch, through one consumer.

    Args:
        guess: images/s that the stream does not exceed by far: so many epochs are planned.

    Returns:
        What `steady` finds; `first_batch_s`, from ray.init to the first micro-batch; `micro_batch_bytes`, of the
        pixels of one micro-batch.
    """
    import ray

    from raypipe.rayext.cluster import connect
    from raypipe.streaming.pipeline import splits
    from raypipe.streaming.row import host_blocks
    from raypipe.streaming.spec import StreamSpec
    from raypipe.transform.fields import IMAGE, VIEW

    # The same transform in both splits, so that every micro-batch costs the same.
    transform = dataclasses.replace(transform, val=transform.train)
    epochs = max(3, round(guess * seconds / len(store)))
    plan = PlanConfig(epochs=epochs, micro_batch_size=min(micro_batch, len(store)))
    label = "label" if "label" in store.columns else ""
    spec = StreamSpec(store, store, plan=plan, transform=transform, pool=pool, label_column=label)
    started = time.perf_counter()
    connect()
    blocks, num_bytes = list[tuple[float, int, tuple[str, int]]](), 0
    (iterator,) = splits(spec, spec.plan.start(), max_actors=pool.max_actors)
    for block in (stream := host_blocks(iterator)):
        arrived, batches = time.perf_counter(), list(block)
        num_images = sum(int((batch.weight > 0).sum()) for batch in batches)
        blocks.append((arrived, num_images, (batches[0].at.split, batches[0].at.epoch)))
        images = {
            name: each for name, each in batches[0].arrays().items() if name.partition(".")[0] in (IMAGE, VIEW)
        }
        num_bytes = sum(each.nbytes for each in images.values())
        if arrived - blocks[0][0] > seconds:
            break
        del block, batches
    stream.close()
    ray.shutdown()
    return {"first_batch_s": blocks[0][0] - started, "micro_batch_bytes": num_bytes, **steady(blocks)}


def steady(blocks: Sequence[tuple[float, int, tuple[str, int]]]) -> Figures:
    """The rate of a stream in its steady state, and the cost of its boundaries.

    Args:
        blocks: of each block the time at which it arrived, its images, and its segment.

    Returns:
        `images_per_s`; `boundary_gap_ratio`, of the mean gap before the first block of a segment to that before
        the others, left out where one of them has none.
    """
    # The first blocks come while actors still start, and a buffer fills: leave out a sixth.
    kept = blocks[max(1, len(blocks) // 6) :]
    if len(kept) < 3:
        raise ConfigError(f"the stream brought {len(blocks)} blocks, too few for a rate: raise --seconds")
    arrivals = np.array([arrived for arrived, _, _ in kept])
    images_until = np.cumsum([num_images for _, num_images, _ in kept])
    gaps = np.diff(arrivals)
    boundary = np.array([a[2] != b[2] for a, b in itertools.pairwise(kept)])
    found = {"images_per_s": float(np.polyfit(arrivals - arrivals[0], images_until, 1)[0])}
    if boundary.any() and not boundary.all():
        # Clumps make single gaps long or short: a mean, not a median, sees each in full.
        found["boundary_gap_ratio"] = float(gaps[boundary].mean() / gaps[~boundary].mean())
    return found


def compared(before: Figures, stream: Figures, after: Figures) -> Figures:
    """The figures of one repeat: a stream, and the mean of the ceilings around it."""
    around = {name: (before[name] + after[name]) / 2 for name in before}
    per_s, limit = stream["images_per_s"], around.pop("images_per_s")
    figures = {"ceiling_images_per_s": limit, "stream_images_per_s": per_s, "ratio": per_s / limit}
    return figures | {name: value for name, value in stream.items() if name != "images_per_s"} | around


def summary(measured: list[Figures]) -> Figures:
    """Medians over the repeats; ratios are medians of each repeat's own ratio."""
    names = [name for name in measured[0] if all(name in one for one in measured)]
    found = {name: statistics.median(one[name] for one in measured) for name in names}
    return found | {"micro_batch_bytes": int(found["micro_batch_bytes"])}


def measured_settings(store: Store, transform: TransformConfig, actors: int, micro_batch: int) -> dict[str, Any]:
    """What was measured, and on what: the part of a report that is no measurement."""
    return {
        "store": str(store.address),
        "transform": transform.train,
        "size": transform.size,
        "actors": actors,
        "micro_batch": min(micro_batch, len(store)),
        "read": "actor" if store.groups is None else "stage",
        "cpus": num_cpus(),
        "machine": platform.machine(),
        "versions": versions(),
    }
