"""A stream on Ray: plan → source → actor pool, as one Ray Data execution for the whole schedule.

dataset(spec, cursor)   a ray.data.Dataset of the stream from a cursor on, one row per block
splits(spec, cursor)    the same as one iterator per rank
raypipe.stream(…)       spec and dataset in one call, if you only want the data
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray.data

from raypipe.config import PoolConfig
from raypipe.errors import ConfigError, ResourceError, SampleError
from raypipe.plan.places import Cursor
from raypipe.rayext.allocation import preflight
from raypipe.rayext.cluster import connect
from raypipe.rayext.execution import Settings, context_of
from raypipe.rayext.iteration import Ended
from raypipe.rayext.placement import placement
from raypipe.storage.filesystem import is_remote
from raypipe.storage.patience import patience_s
from raypipe.stores.base import Store
from raypipe.streaming.blocks import MAX_BYTES
from raypipe.streaming.opening import Train, open_stream
from raypipe.streaming.source import MicroBatchSource
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import start_supervisor
from raypipe.streaming.worker import TransformWorker
from raypipe.transform.column_types import NUM_PROBED
from raypipe.transform.contents import stream_fields
from raypipe.transform.decode_array import decode_array
from raypipe.transform.fields import IMAGE
from raypipe.transform.presets import is_preset, num_pixels
from raypipe.transform.sizes import has_sizes, most_pixels

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

# What an attempt may take that is begun when the patience ends, see `storage.patience`.
_LAST_ATTEMPT_S = 60.0

# A reader does nothing but yield rows. It must not wait for a CPU that the pool holds: a pool that takes all
# CPUs would starve it, and the run would hang (ray#44687).
_READER_CPUS = 0


def _pool_of(pool: PoolConfig, max_actors: int) -> tuple[PoolConfig, int]:
    """The pool with its largest number of actors, and how many it begins with.

    It begins with as many as there is room for now. More nodes come when ranks wait.
    """
    pool = replace(pool, max_actors=max(max_actors, pool.min_actors))
    room = int(ray.available_resources().get("CPU", 0.0) / pool.cpus_per_actor + 1e-9)
    return pool, min(max(room, pool.min_actors), pool.max_actors)


def blocks_in_flight(pool: PoolConfig, max_actors: int, world_size: int) -> int:
    """Blocks of a stream that may be in flight when its pool has its largest size."""
    pool, actors = _pool_of(pool, max_actors)
    fixed, per_actor, _ = pool.blocks_for(world_size, actors)
    return fixed + per_actor * actors


def check_memory(spec: StreamSpec, max_actors: int, world_size: int) -> None:
    """Raise ResourceError unless the data in flight fits the object store; only presets tell its size beforehand.

    Without Ray nothing is in flight. Actors on nodes that are yet to come are not counted: each node brings its
    own object store.
    """
    batch_bytes = _micro_batch_bytes(spec)
    if spec.pool.engine == "inline" or not batch_bytes:
        return
    block = max(
        1, spec.pool.micro_batches_per_block
    )  # blocks whose size is found are no larger than there is room for
    block_bytes = block * batch_bytes
    num = blocks_in_flight(spec.pool, max_actors, world_size)
    capacity, needed = _object_store_bytes(), num * block_bytes
    if needed > capacity:
        raise ResourceError(
            f"{num} blocks in flight of {block_bytes / 2**20:.0f} MiB need "
            f"{needed / 2**30:.1f} GiB of object store, the cluster has {capacity / 2**30:.1f} GiB: lower "
            "pool.max_in_flight, pool.micro_batches_per_block or plan.micro_batch_size, or start Ray with a "
            "larger object store"
        )


def _micro_batch_bytes(spec: StreamSpec) -> int:
    """Bytes of pixels and targets of their size in presets' largest micro-batch; 0 = not all are presets."""
    largest = most_pixels(spec.transform, spec.plan.config.bucket_sides)
    pixels = [
        largest if is_preset(transform) else num_pixels(transform, spec.transform.final_size) or 0
        for transform in spec.transforms.values()
    ]
    if not all(pixels):
        return 0
    return _bytes_of(spec, max(pixels))


def _bytes_of(spec: StreamSpec, pixels: int) -> int:
    """Bytes of a micro-batch of images and targets with this many pixels; 0 = unknown."""
    pixel_bytes = _pixel_bytes(spec)
    if pixel_bytes:
        fields = stream_fields(spec.transform)
        targets = (field for name, field in fields.items() if name != IMAGE and field.shape is None)
        pixel_bytes += sum(np.dtype(field.dtype).itemsize for field in targets)
    return math.ceil(spec.plan.config.micro_batch_size * pixels * pixel_bytes)


def _pixel_bytes(spec: StreamSpec) -> float:
    """Bytes of a pixel's channels, which presets keep; 0 = none of a store's first arrays can be read."""
    if spec.transform.decode_as == "rgb":
        return 1.5 if spec.transform.wire == "yuv420" else 3
    kept = spec.plan.kept["train"]
    first = kept.indices(np.arange(min(NUM_PROBED, kept.size)))
    for image in spec.stores["train"].read(first, ("image",))["image"]:
        with contextlib.suppress(SampleError):
            array = decode_array(image)
            return array.shape[2] * array.itemsize
    return 0


def _object_store_bytes() -> float:
    return ray.cluster_resources().get("object_store_memory", 0.0)


def dataset(
    spec: StreamSpec,
    cursor: Cursor,
    *,
    max_actors: int,
    world_size: int = 1,
    supervisor: Any = None,
) -> Dataset:
    """The stream from a cursor on: a Dataset of one row for each block.

    Iterate with `batch_size=None`, or split it with `streaming_split(W, equal=True)` over the ranks: each
    then gets every W-th row, and so the micro-batches m of each step with m mod W = its rank.

    Args:
        max_actors: transform actors that the pool may grow to.
        world_size: W.
        supervisor: handle of the Supervisor to which faults are reported; None = a new one.
    """
    supervisor = supervisor or start_supervisor(spec.run, spec.log_format)
    spec.plan.check_workers(world_size)
    pool, actors = _pool_of(spec.pool, max_actors)
    if any(is_remote(store.address) for store in spec.stores.values()):  # an outage ends in its own error
        pool = replace(pool, stall_timeout_s=max(pool.stall_timeout_s, patience_s() + _LAST_ATTEMPT_S))
    fixed, per_actor, largest = pool.blocks_for(world_size, actors)
    settings = Settings(
        pool, fixed, per_actor, bool(spec.readers()), supervisor, world_size, spec.run, spec.log_format
    )
    # Of the object store as it is now, streams take half.
    room = _object_store_bytes() / 2 / max(1, blocks_in_flight(spec.pool, max_actors, world_size))
    max_bytes = min(MAX_BYTES, int(room))
    buckets = spec.plan.config.bucket_sides
    if has_sizes(spec.transform, "train", buckets):  # the measurement has one size, and another may come
        fits = max(1, max_bytes // max(1, _bytes_of(spec, most_pixels(spec.transform, buckets))))
        largest = min(largest, fits) if largest else fits
    source = MicroBatchSource(
        spec.plan,
        cursor,
        spec.readers(),
        supervisor,
        spec.wanted,
        ranks=world_size,
        block=pool.micro_batches_per_block,
        largest=largest,
        max_bytes=max_bytes,
        run=spec.run,
    )
    with ray.data.DataContext.current(context_of(settings, actors)):
        rows = ray.data.read_datasource(source, override_num_blocks=source.num_tasks, num_cpus=_READER_CPUS)
        return rows.map_batches(
            TransformWorker,
            fn_constructor_args=(spec, supervisor),
            batch_size=None,
            batch_format="pyarrow",
            zero_copy_batch=True,
            num_cpus=pool.cpus_per_actor,
            # Else later actors ask for the bytes of a block, and the autoscaler finds no node type that has
            # them where the cluster's YAML does not name its memory.
            memory=0,
            **placement(),
            compute=ray.data.ActorPoolStrategy(
                min_size=pool.min_actors,
                max_size=pool.max_actors,
                initial_size=actors,
                # Ray Data looks for finished tasks ten times a second: what an actor can do in a tenth
                # of a second must be queued at it.
                max_tasks_in_flight_per_actor=max(2, settings.limit(actors) // actors),
            ),
        )


def splits(
    spec: StreamSpec,
    cursor: Cursor,
    *,
    max_actors: int,
    world_size: int = 1,
    supervisor: Any = None,
    apart: bool = False,
) -> list[DataIterator]:
    """The stream from a cursor on, as one iterator per rank; see `dataset`.

    An execution that several ranks share runs in its own actor.

    Args:
        apart: an execution of a single rank runs in an actor, too. Otherwise it runs in that rank's process, where
            it competes with the training loop for the interpreter, but saves the 2 s that an actor takes to start.

    Raises:
        ConfigError: W does not divide M.
    """
    spec.plan.check_workers(world_size)
    spec.plan.check(cursor)
    if not spec.plan.num_micro_batches(cursor):
        nothing: Any = Ended()
        return [nothing] * world_size
    supervisor = supervisor or start_supervisor(spec.run, spec.log_format)
    rows = dataset(spec, cursor, max_actors=max_actors, world_size=world_size, supervisor=supervisor)
    if world_size == 1 and not apart:
        return [rows.iterator()]
    return rows.streaming_split(world_size, equal=True)


def stream(
    train: Train,
    val: Store | str | Path | None = None,
    *,
    cursor: Cursor | None = None,
    world_size: int = 1,
    **settings: Any,
) -> Dataset:
    """The stream as a plain Dataset, if you only want the data.

    Args:
        train, val, settings: see `open_stream`.
        cursor: where to start; None = at the beginning.
        world_size: W, the number of ranks that the Dataset will be split over.

    Returns:
        One row for each block, as `raypipe.streaming.row` describes those from an actor; its `batches_of` gives a
            row's micro-batches. With one rank these are in the order of the plan.

    Raises:
        StoreError, ConfigError, CursorError, ResourceError: the message says what is wrong, and how to fix it.
    """
    spec = open_stream(train, val, **settings)
    if spec.pool.engine == "inline":
        raise ConfigError(
            "raypipe.stream is a Dataset, which Ray makes, and pool.engine is 'inline': raypipe.loader makes the "
            "stream in this process"
        )
    connect()
    max_actors = preflight(spec.pool).max_actors
    check_memory(spec, max_actors, world_size)
    return dataset(spec, cursor or spec.plan.start(), max_actors=max_actors, world_size=world_size)
