"""A stream on Ray: plan → source → actor pool, as one Ray Data execution for the whole schedule.

block_dataset(spec, start)   a ray.data.Dataset of the stream from a place on, one row per block
splits(spec, start)          the same as one iterator per rank

`raypipe.dataset` makes the Dataset for users, see `raypipe.streaming.dataset`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray.data

from raypipe.config import PoolConfig
from raypipe.library_settings import of_this_process
from raypipe.plan.places import Cursor, MicroBatchId
from raypipe.rayext.cluster_state import is_local
from raypipe.rayext.execution import Settings, context_of
from raypipe.rayext.iteration import Ended
from raypipe.rayext.placement import cpus_name, placement
from raypipe.storage.filesystem import is_remote
from raypipe.storage.retries import patience_s
from raypipe.streaming.blocks import MAX_BYTES, most_bytes
from raypipe.streaming.source import MicroBatchSource
from raypipe.streaming.spec import StreamSpec, check_pickles
from raypipe.streaming.supervisor import start_supervisor
from raypipe.streaming.worker import TransformWorker
from raypipe.transform.sizes import pixel_range

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

# Seconds of an attempt that is begun when the patience ends, see `storage.retries`.
_LAST_ATTEMPT_S = 60.0

# A reader does nothing but yield rows. It must not wait for a CPU that the pool holds: a pool that takes all
# CPUs would starve it, and the run would hang (ray#44687).
_READER_CPUS = 0


def _pool_of(spec: StreamSpec, max_actors: int) -> tuple[PoolConfig, int]:
    """The pool with its most actors and its limit of a stall, and how many actors there is room for now.

    More nodes come when ranks wait.
    """
    pool = spec.pool
    pool = replace(pool, max_actors=max(max_actors, pool.min_actors))
    if any(is_remote(store.address) for store in spec.stores.values()):
        # an outage ends in its own error
        stall_s = max(pool.stall_timeout_s, patience_s() + _LAST_ATTEMPT_S)
        pool = replace(pool, stall_timeout_s=stall_s)
    room = int(
        ray.available_resources().get(cpus_name(), 0.0) / pool.cpus_per_actor + 1e-9
    )
    return pool, min(max(room, pool.min_actors), pool.max_actors)


def block_dataset(
    spec: StreamSpec,
    start: Cursor | MicroBatchId,
    *,
    max_actors: int,
    world_size: int = 1,
    supervisor: Any = None,
    num_first: int = 0,
) -> Dataset:
    """The stream from a cursor, or from the step of a micro-batch, on: a Dataset of one row for each block.

    Iterate with `batch_size=None`, or split it with `streaming_split(W, equal=True)` over the ranks: each
    then gets every W-th row, and so the micro-batches m of each step with m mod W = its rank.

    Args:
        max_actors: transform actors that the pool may grow to.
        world_size: W.
        supervisor: handle of the Supervisor to which faults are reported; None = a new one.
        num_first: micro-batches from there on that the ranks make themselves.
    """
    supervisor = supervisor or start_supervisor(spec.run, spec.log_format)
    spec.plan.check_workers(world_size)
    pool, actors = _pool_of(spec, max_actors)
    supervisor.pool_planned.remote(
        actors * pool.cpus_per_actor, pool.min_actors * pool.cpus_per_actor
    )
    first_actors = actors
    if is_local():
        # The imports of each take the CPUs from all else that starts. The others follow with the first block.
        first_actors = max(pool.min_actors, math.ceil(actors / 2))
    readers = spec.readers(is_local())
    fixed, per_actor, largest = pool.blocks_for(world_size, actors)
    settings = Settings(
        pool,
        fixed,
        per_actor,
        bool(readers),
        supervisor,
        world_size,
        spec.run,
        spec.log_format,
        actors,
        spec.traces,
        # each rank goes on to twice its first ones at most, and starts a step or so from the others
        left_out=2 * (num_first + spec.plan.config.per_step),
    )
    source = MicroBatchSource(
        spec,
        start,
        readers,
        supervisor,
        ranks=world_size,
        block=pool.micro_batches_per_block,
        largest=largest,
        max_bytes=_block_bytes(spec, settings),
        num_first=num_first,
    )
    with ray.data.DataContext.current(context_of(settings, actors)):
        rows = ray.data.read_datasource(
            source, override_num_blocks=source.num_tasks, num_cpus=_READER_CPUS
        )
        of_actor = replace(spec, opened={}, library_settings=of_this_process())
        # By Ray Data's default, a dead actor is restarted, and its task is repeated, without limit.
        return rows.map_batches(
            TransformWorker,
            fn_constructor_args=(of_actor, supervisor),
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
                initial_size=first_actors,
                # Ray Data looks for finished tasks ten times a second: what an actor can do in a tenth
                # of a second must be queued at it.
                max_tasks_in_flight_per_actor=max(2, settings.limit(actors) // actors),
            ),
        )


def _block_bytes(spec: StreamSpec, settings: Settings) -> tuple[int, int]:
    """Return the largest block in bytes, and the largest of those that are remembered."""
    actors = settings.actors
    # Streams take half of the object store as it is now.
    object_store = ray.cluster_resources().get("object_store_memory", 0.0)
    room = object_store / 2 / settings.limit(actors)
    # Blocks are sized by the images that were measured, and those to come may be larger.
    min_pixels, max_pixels = pixel_range(
        spec.transform, spec.plan.config.sides_in("train")
    )
    share = min_pixels / max_pixels
    largest = most_bytes(actors * settings.pool.kernel_threads, room)
    return int(largest * share), int(min(MAX_BYTES, room) * share)


def splits(
    spec: StreamSpec,
    start: Cursor | MicroBatchId,
    *,
    max_actors: int,
    world_size: int = 1,
    supervisor: Any = None,
    apart: bool = False,
    num_first: int = 0,
) -> list[DataIterator]:
    """The stream from a place on, as one iterator per rank; see `block_dataset`.

    An execution that several ranks share runs in its own actor.

    Args:
        apart: an execution of a single rank runs in an actor, too. Otherwise it runs in that rank's process, where
            it competes with the training loop for the interpreter, but saves the 2 s that an actor takes to start.

    Raises:
        ConfigError: W does not divide M.
    """
    spec.plan.check_workers(world_size)
    if spec.plan.num_micro_batches(start) // spec.share[1] <= num_first:
        nothing: Any = Ended()
        return [nothing] * world_size
    check_pickles(spec)
    rows = block_dataset(
        spec,
        start,
        max_actors=max_actors,
        world_size=world_size,
        supervisor=supervisor,
        num_first=num_first,
    )
    if world_size == 1 and not apart:
        return [rows.iterator()]
    return rows.streaming_split(world_size, equal=True)
