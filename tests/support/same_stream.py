"""One stream, however it is made: by how many actors and ranks, in which blocks, and in spite of what."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import without_ray
from signalled import own_processes

from raypipe.config import PoolConfig
from raypipe.device.prefetcher import Batch
from raypipe.plan.places import Cursor
from raypipe.streaming.digest import iterate_digests
from raypipe.streaming.handover import loader
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.pipeline import splits
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import Field, MicroBatch, Ragged


@dataclass(frozen=True)
class Way:
    """A way to make a stream on a cluster.

    Attributes:
        actors: number of actors.
        cpus: CPUs of each, and threads of its kernel.
        workers: ranks that share the stream.
        block: micro-batches in a block; 0 = as many as pay.
        from_step: training step to begin with.
        reader: as in PoolConfig.
        apart: whether the execution has a process of its own.
        head_start: as in PoolConfig, for the loader of one rank; None = a pool makes all.
        kills: actors that are killed at random moments.
    """

    actors: int = 1
    cpus: float = 0.5
    workers: int = 1
    block: int = 0
    from_step: int = 0
    reader: Literal["auto", "actors", "separate"] = "auto"
    apart: bool = False
    head_start: int | None = None
    kills: int = 0


def assert_same_stream(spec: StreamSpec, *ways: Way) -> list[bytes]:
    """Each way makes the micro-batches that this process makes alone; returns their digests."""
    alone = without_ray.digests(spec)
    for way in ways:
        expected = without_ray.digests(spec, way.from_step)
        assert expected == alone[len(alone) - len(expected) :]
        assert digests_of(spec, way) == expected, way
    return alone


def digests_of(spec: StreamSpec, way: Way) -> list[bytes]:
    """The digests of the micro-batches that a way makes."""
    pool = PoolConfig(
        min_actors=way.actors,
        max_actors=way.actors,
        cpus_per_actor=way.cpus,
        micro_batches_per_block=way.block,
        reader=way.reader,
    )
    start = spec.plan.cursor_at(way.from_step)
    if way.head_start is not None:
        pool = replace(pool, head_start=way.head_start)
        return _digests_of_loader(replace(spec, pool=pool), start)
    spec = replace(spec, pool=pool)
    with killed(way.kills, seed=way.actors) as pids:
        iterators = splits(
            spec,
            start,
            max_actors=way.actors,
            world_size=way.workers,
            apart=way.apart,
        )
        found = [one.digest for one in iterate_digests(spec.plan, start, iterators)]
    assert len(pids) == way.kills
    return found


def _digests_of_loader(spec: StreamSpec, start: Cursor) -> list[bytes]:
    places = spec.plan.micro_batches(start)
    found = []
    with loader(spec, cursor=start) as one:
        for batch in without_ray.every_batch(one):
            assert batch.position == next(places)
            found.append(batch_hash(in_host_memory(batch)))
            if spec.pool.head_start < 0 and len(found) < 12:
                time.sleep(0.3)  # the pool takes over
    return found


def in_host_memory(batch: Batch) -> MicroBatch:
    """A loader's batch as its actor had it."""
    fields: dict[str, Any] = {}
    for name, values in batch.fields.items():
        if isinstance(values, list):
            fields[name] = Ragged.of("bytes", values, Field("bytes"))
        else:
            fields[name] = values.numpy()
    if "image" in fields:
        fields["image"] = batch.image.permute(0, 2, 3, 1).numpy()
    return MicroBatch(
        batch.position, batch.index, batch.weight.numpy(), fields, batch.num_bad
    )


@contextmanager
def killed(times: int, seed: int) -> Iterator[list[int]]:
    """Within, actors are killed at random moments; gives the process ids of those that were."""
    choose = random.Random(seed)
    pids = list[int]()
    ended = threading.Event()

    def kill() -> None:
        while len(pids) < times and not ended.wait(choose.uniform(0.1, 0.7)):
            actors = set(own_processes("MapWorker(MapBatches(Transform")) - set(pids)
            if actors:
                pids.append(choose.choice(sorted(actors)))
                os.kill(pids[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield pids
    finally:
        ended.set()
        killer.join()
