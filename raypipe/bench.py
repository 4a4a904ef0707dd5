"""The benchmark: the stream against the ceiling of the same machine, in one run.

    ceiling        decode and transform alone, one process per actor, bytes already in memory, no Ray
    stream         what one consumer gets from the whole pipe, in its steady state
    first batch    from ray.init to the first micro-batch
    boundary gap   the gap before the first micro-batch of a segment, as a multiple of the ordinary gap

The machine's speed drifts, so the ceiling is measured before and after each stream.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.stores import open_store

# Images that one ceiling process keeps in memory: more than fit its caches, few enough to read at once.
_CEILING_IMAGES = 512


@dataclass(frozen=True)
class Measured:
    """One repeat. Throughputs in images/s, times in s."""

    ceiling_images_per_s: float
    stream_images_per_s: float
    first_batch_s: float
    ordinary_gap_s: float
    boundary_gap_s: float


def ceiling(store: str, transform: TransformConfig, processes: int, seconds: float) -> float:
    """Images/s of decode and transform alone, `processes` processes side by side for `seconds`."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    results = context.SimpleQueue()
    workers = [
        context.Process(target=_ceiling_worker, args=(store, transform, seconds, barrier, results))
        for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise ConfigError("a ceiling process failed; its error is printed above")
    return sum(results.get() for _ in workers)


def _ceiling_worker(address: str, transform: TransformConfig, seconds: float, barrier: Any, results: Any) -> None:
    from raypipe.decode import decode
    from raypipe.presets import build_transform
    from raypipe.sample_transform import SampleTransform

    store = open_store(address)
    images = store.read(np.arange(min(len(store), _CEILING_IMAGES)), ("image",))["image"]
    apply = SampleTransform(build_transform(transform.train, transform.size))
    min_side = transform.decode_min_side or None
    for image in images[:8]:
        apply(decode(image, min_side=min_side), (0, 0))
    barrier.wait(timeout=120)
    started, done = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        apply(decode(images[done % len(images)], min_side=min_side), (done, 0))
        done += 1
    results.put(done / elapsed)


def stream_once(
    store: str, transform: TransformConfig, actors: int, micro_batch: int, seconds: float, guess: float
) -> tuple[float, float, float, float]:
    """Run the stream for about `seconds`, with a validation after every epoch, through one consumer.

    Args:
        guess: images/s, to choose the number of epochs by.

    Returns:
        Steady images/s; seconds from ray.init to the first batch; ordinary and boundary gap, seconds.
    """
    import ray

    from raypipe.cluster import connect
    from raypipe.config import PoolConfig
    from raypipe.pipeline import StreamSpec
    from raypipe.plan import PlanConfig
    from raypipe.rank_stream import host_batches

    opened = open_store(store)
    # The same transform in both splits, so that every micro-batch costs the same.
    transform = dataclasses.replace(transform, val=transform.train)
    micro_batch = min(micro_batch, len(opened))
    epochs = max(3, round(guess * seconds / (2 * len(opened))))
    spec = StreamSpec.of(
        opened,
        opened,
        plan=PlanConfig(epochs=epochs, micro_batch=micro_batch),
        transform=transform,
        pool=PoolConfig(min_actors=actors, max_actors=actors),
    )
    started = time.perf_counter()
    connect()
    arrivals, segments, sizes = [], [], []
    (iterator,) = spec.splits(spec.plan.start(), max_actors=actors)
    for batch in host_batches(iterator):
        arrivals.append(time.perf_counter())
        segments.append((batch.at.split, batch.at.epoch))
        sizes.append(int((batch.weight > 0).sum()))
    ray.shutdown()
    # The first batches come while actors still start, and a buffer fills: leave out a sixth.
    first = max(1, len(arrivals) // 6)
    gaps = np.diff(arrivals)[first:]
    boundary = np.array([a != b for a, b in itertools.pairwise(segments)])[first:]
    throughput = sum(sizes[first + 1 :]) / (arrivals[-1] - arrivals[first])
    # Gaps come in clumps when several actors finish together: a mean, not a median, sees each in full.
    return (
        throughput,
        arrivals[0] - started,
        float(gaps[~boundary].mean()) if (~boundary).any() else float("nan"),
        float(gaps[boundary].mean()) if boundary.any() else float("nan"),
    )


def bench(
    store: str, *, transform: TransformConfig, actors: int, micro_batch: int, seconds: float, repeats: int
) -> list[Measured]:
    """Measure the ceiling, the stream and the ceiling again, `repeats` times."""
    measured = []
    for _ in range(repeats):
        before = ceiling(store, transform, actors, seconds / 2)
        steady, first, ordinary, at_boundary = stream_once(store, transform, actors, micro_batch, seconds, before)
        after = ceiling(store, transform, actors, seconds / 2)
        measured.append(Measured((before + after) / 2, steady, first, ordinary, at_boundary))
    return measured


def summary(measured: list[Measured]) -> dict[str, float]:
    """Medians over the repeats; ratios are medians of each repeat's own ratio."""

    def median(values: list[float]) -> float:
        return float(statistics.median(values))

    return {
        "ceiling_images_per_s": median([m.ceiling_images_per_s for m in measured]),
        "stream_images_per_s": median([m.stream_images_per_s for m in measured]),
        "ratio": median([m.stream_images_per_s / m.ceiling_images_per_s for m in measured]),
        "first_batch_s": median([m.first_batch_s for m in measured]),
        "boundary_gap_ratio": median([m.boundary_gap_s / m.ordinary_gap_s for m in measured]),
    }
