"""The benchmark: the stream against the ceiling of the same machine, in one run.

    ceiling        only decode and transform, whole micro-batches as an actor makes them, one process per actor,
                   bytes already in memory, no Ray; in a submitted job, as many tasks of the cluster
    stream         what one consumer gets from the whole pipe, in its steady state
    first batch    from ray.init to the first micro-batch
    torch          the same stream as torch.utils.benchmark measures `next` on a loader's batches
    costs          CPU time and bytes of an image, by which docs/clusters.md sizes a cluster

The machine's speed drifts, so the ceiling is measured before and after each stream. Batches come in clumps, in the
blocks of all actors, so the stream's rate is the slope of a line through all of them: the difference of two would
count up to one clump too much.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

import raypipe
from raypipe.config import (
    AtLeast1,
    PlanConfig,
    PoolConfig,
    Positive,
    RunConfig,
    TransformConfig,
)
from raypipe.cpus import num_cpus
from raypipe.errors import ConfigError
from raypipe.packages import versions
from raypipe.printing import Result, print_table, told
from raypipe.stores import Store
from raypipe.transform.transform_steps import brief

# Images that one ceiling process keeps in memory: more than fit its caches, few enough to read at once.
_CEILING_IMAGES = 512
_MIN_BATCHES = 4  # a rate needs three after the first
# Actors beyond those that a rate needs: they start, fail and share their nodes with others.
_HEADROOM = 0.15

Figures = dict[str, float]


def bench(
    run: RunConfig,
    target: str = "",
    *,
    seconds: Positive = 20.0,
    repeats: AtLeast1 = 1,
    images_per_s: float = 0.0,
    core_hour_price: float = 0.0,
    gb_price: float = 0.0,
) -> Result:
    """Measure the stream against the ceiling of this machine.

    In a submitted job it is the ceiling of the cluster.

    Examples:
        raypipe bench train.lmdb --transform.train heavy --repeats 3
        raypipe bench train.lmdb --images-per-s 20000 --core-hour-price 0.04 --gb-price 0.01

    Args:
        run: Here the training store, transform.train, plan.micro_batch_size and the pool matter. The ceiling has
            pool.max_actors processes (0 = one per CPU).
        seconds: how long to measure each stream.
        repeats: how often to measure; the result is the medians.
        images_per_s: a rate of all GPUs together, for which to compute CPUs, 15 % to spare, and network; 0 =
            none.
        core_hour_price: dollars for a CPU core for an hour, to compute dollars per million images.
        gb_price: dollars for a gigabyte that CPU nodes send to trainers, for the same.
    """
    from raypipe.streaming.opening import open_train

    opened = open_train(run)
    actors = run.pool.max_actors or num_cpus()
    if _on_cluster() and not run.pool.max_actors:
        import ray

        raypipe.connect()
        actors = max(1, int(ray.available_resources().get("CPU", 0.0)))
    config = run.transform
    pool = dataclasses.replace(
        run.pool, engine="ray", min_actors=actors, max_actors=actors
    )
    micro_batch = min(run.plan.micro_batch_size, len(opened))
    of_ceiling = (opened, config, pool, micro_batch, seconds / 2)
    before = ceiling(*of_ceiling)
    measured = []
    for _ in range(repeats):
        guess = before["images_per_s"]
        stream = stream_once(opened, config, pool, micro_batch, seconds, guess)
        after = ceiling(*of_ceiling)
        measured.append(compared(before, stream, after))
        before = after
    figures: Result = summary(measured)
    figures |= {
        "store": opened.address,
        "transform": config.train,
        "size": config.size,
        "actors": actors,
        "micro_batch": micro_batch,
        "cpus": num_cpus(),
        "versions": versions(),
    }
    figures |= costs(figures, pool.cpus_per_actor, core_hour_price, gb_price)
    if images_per_s:
        figures |= needs(figures, images_per_s, pool.cpus_per_actor)
    return figures


def print_bench(figures: Result) -> None:
    """Print the result of `bench` in a table, and what it means."""
    rows = told(figures, "store", "versions")
    rows["transform"] = brief(figures["transform"])
    print_table(figures["store"], rows)
    print(verdict(figures, figures["actors"]))


def costs(
    figures: Result,
    cpus_per_actor: float,
    core_hour_price: float,
    gb_price: float,
) -> Figures:
    """Costs of a million images: the cores of the actors for as long as the stream takes, GB, and dollars."""
    hours = 1e6 / figures["stream_images_per_s"] / 3600
    million = {
        "core_hours_per_million": figures["actors"] * cpus_per_actor * hours,
        "read_gb_per_million": figures["encoded_bytes_per_image"] / 1000,
        "sent_gb_per_million": figures["micro_batch_bytes"]
        / figures["micro_batch"]
        / 1000,
    }
    if core_hour_price or gb_price:
        dollars = (
            million["core_hours_per_million"] * core_hour_price
            + million["sent_gb_per_million"] * gb_price
        )
        million["dollars_per_million"] = dollars
    return million


def verdict(figures: Figures, actors: int) -> str:
    """Say in a sentence or two what the figures mean."""
    text = (
        f"The stream runs at {figures['ratio']:.0%} of the rate at which {actors} processes decode and transform "
        "images that are in memory."
    )
    if figures["ratio"] > 1:
        text += " More than 100 % is the drift of this machine's speed: measure longer, or with --repeats 3."
    return text


def needs(figures: Result, images_per_s: float, cpus_per_actor: float) -> Figures:
    """CPUs for a rate and some headroom, of actors as fast as the measured ones, and what they read and send."""
    per_actor = figures["stream_images_per_s"] / figures["actors"]
    actors = math.ceil(images_per_s * (1 + _HEADROOM) / per_actor)
    gbit_of_gb = images_per_s / 1e6 * 8
    return {
        "wanted_images_per_s": images_per_s,
        "cpus_needed": math.ceil(actors * cpus_per_actor),
        "read_gbit_per_s": gbit_of_gb * figures["read_gb_per_million"],
        "sent_gbit_per_s": gbit_of_gb * figures["sent_gb_per_million"],
    }


def _on_cluster() -> bool:
    """Return whether this process belongs to a cluster, as a submitted job does."""
    return bool(os.environ.get("RAY_ADDRESS"))


def ceiling(
    store: Store,
    transform: TransformConfig,
    pool: PoolConfig,
    micro_batch: int,
    seconds: float,
) -> Figures:
    """Measure only decode and transform for `seconds`, in as many processes as the pool has actors at most.

    They are processes of this machine without Ray; in a cluster, tasks with an actor's CPUs each, where the pool
    would be. Each makes micro-batches of `micro_batch` images with an actor's threads.

    Returns:
        `images_per_s` of all of them together; and of an image `read_cpu_s_per_image` and
        `transform_cpu_s_per_image`, CPU time in s, and `encoded_bytes_per_image`: means.
    """
    arguments = store, transform, pool.kernel_threads, micro_batch, seconds
    processes = range(pool.max_actors)
    if _on_cluster():
        import ray

        from raypipe.rayext.placement import placement

        raypipe.connect()
        task: Any = ray.remote(num_cpus=pool.cpus_per_actor, **placement())(_alone)
        costs = ray.get([task.remote(*arguments) for _ in processes])
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(len(processes), spawn) as executor:
            running = [executor.submit(_alone, *arguments) for _ in processes]
            costs = [future.result() for future in running]
    mean = {
        name: statistics.fmean(measures[name] for measures in costs)
        for name in costs[0]
    }
    return mean | {"images_per_s": mean["images_per_s"] * len(processes)}


def _alone(
    store: Store,
    transform: TransformConfig,
    threads: int,
    micro_batch: int,
    seconds: float,
) -> Figures:
    """Measure the figures of `ceiling` in one process, with its images in memory and warmed up."""
    # Ray sets it for torch in an actor of one CPU
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from raypipe.transform.process_state import use_one_thread
    from raypipe.transform.sample_maker import SampleMaker
    from raypipe.transform.samples import of_images

    use_one_thread()  # an actor does so too
    store.read(np.arange(1), ("image",))  # opens it
    kept = np.arange(min(len(store), _CEILING_IMAGES))
    began_cpu = time.process_time()
    encoded = store.read(kept, ("image",))["image"]
    read_cpu_s = time.process_time() - began_cpu
    maker = SampleMaker(transform.train, transform, threads=threads)
    indices = np.arange(min(micro_batch, len(encoded)))

    def make(first: int) -> None:
        """Make a micro-batch of the images from number `first` on, beginning again at their end."""
        keys = np.stack([first + indices, 0 * indices], axis=1).astype(np.uint64)
        images = [encoded[(first + i) % len(encoded)] for i in range(len(indices))]
        maker.make(of_images(images), keys)

    make(0)
    started = time.perf_counter()
    began_cpu = time.process_time()
    done = 0
    while (elapsed := time.perf_counter() - started) < seconds:
        make(done)
        done += len(indices)
    return {
        "images_per_s": done / elapsed,
        "read_cpu_s_per_image": read_cpu_s / len(encoded),
        "transform_cpu_s_per_image": (time.process_time() - began_cpu) / done,
        "encoded_bytes_per_image": sum(map(len, encoded)) / len(encoded),
    }


def stream_once(
    store: Store,
    transform: TransformConfig,
    pool: PoolConfig,
    micro_batch: int,
    seconds: float,
    guess: float,
) -> Figures:
    """Run the stream through one consumer, for `seconds`, and then as long as torch's timer takes for half of it.

    Args:
        guess: an upper bound of the stream's images/s, roughly, to plan enough epochs.

    Returns:
        `images_per_s`, see `steady`; `first_batch_s`, from ray.init to the first micro-batch;
        `micro_batch_bytes`, of one micro-batch, as it travels; and `torch_ms_per_batch` and
        `torch_images_per_s`, of `next` by torch.utils.benchmark. Blocks bring several batches at once, so most
        calls take no time, and a few all of it: the timer is asked for the mean of one long run.
    """
    from torch.utils.benchmark import Timer

    from raypipe.streaming.maker import MicroBatchMaker
    from raypipe.streaming.row import block_row

    label = "label" if "label" in store.schema.names else ""
    spec = raypipe.open_stream(
        store,
        plan=PlanConfig(
            epochs=max(3, math.ceil(3 * guess * seconds / len(store)) + _MIN_BATCHES),
            micro_batch_size=micro_batch,
        ),
        transform=transform,
        pool=dataclasses.replace(pool, head_start=0),
        target_column=label,
    )
    started = time.perf_counter()
    if pool.engine == "ray":
        raypipe.connect()
    arrivals: list[tuple[float, int]] = []
    with raypipe.loader(
        spec, max_actors=pool.max_actors or None, device="cpu"
    ) as loader:
        batches = (batch for epoch in loader.epochs() for batch in epoch.train)
        for batch in batches:
            arrivals.append((time.perf_counter(), len(batch.weight)))
            is_long = arrivals[-1][0] - arrivals[0][0] > seconds
            if is_long and len(arrivals) >= _MIN_BATCHES:
                break
        images_per_s = steady(arrivals)
        calls = max(_MIN_BATCHES, round(images_per_s * seconds / 2 / micro_batch))
        taken = Timer("next(batches)", globals={"batches": batches}).timeit(calls)
        batches.close()
    if pool.engine == "ray":
        import ray

        ray.shutdown()  # the ceiling needs its CPUs
    place = next(spec.plan.micro_batches(spec.plan.start()))
    row = block_row([MicroBatchMaker(spec).batch(place)])
    return {
        "images_per_s": images_per_s,
        "first_batch_s": arrivals[0][0] - started,
        "micro_batch_bytes": sum(array.nbytes for array in row.values()),
        "torch_ms_per_batch": taken.mean * 1000,
        "torch_images_per_s": micro_batch / taken.mean,
    }


def steady(batches: Sequence[tuple[float, int]]) -> float:
    """The steady rate of a stream, images/s, by the arrival and the number of images of each batch."""
    # The first ones come while actors still start, and a buffer fills: leave out a sixth.
    kept = batches[max(1, len(batches) // 6) :]
    if len(batches) < _MIN_BATCHES:
        raise ConfigError(
            f"the stream brought {len(batches)} batches, too few for a rate: raise --seconds"
        )
    arrivals, num_images = np.array(kept).T
    return float(np.polyfit(arrivals - arrivals[0], num_images.cumsum(), 1)[0])


def compared(before: Figures, stream: Figures, after: Figures) -> Figures:
    """The figures of one repeat: a stream, and the mean of the ceilings around it."""
    around = {name: (before[name] + after[name]) / 2 for name in before}
    per_s = stream["images_per_s"]
    limit = around.pop("images_per_s")
    figures = {
        "ceiling_images_per_s": limit,
        "stream_images_per_s": per_s,
        "ratio": per_s / limit,
    }
    figures |= stream | around
    del figures["images_per_s"]
    return figures


def summary(measured: list[Figures]) -> Figures:
    """Medians over the repeats; ratios are medians of each repeat's own ratio."""
    return {
        name: statistics.median(measures[name] for measures in measured)
        for name in measured[0]
    }
