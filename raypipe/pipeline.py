"""The stream: plan → source → actor pool, as one Ray Data execution for the whole schedule.

StreamSpec            everything that fixes a stream; pickles; built on the driver
spec.dataset(cursor)  a ray.data.Dataset of what is left at a cursor, one row per micro-batch
raypipe.stream(…)     both in one call, for people who only want the data
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.data

from raypipe import backpressure, pool_watch, relaxed
from raypipe.bad_list import read_bad_list
from raypipe.cluster import check_object_store, connect, preflight
from raypipe.config import PoolConfig, TransformConfig
from raypipe.encoded_transform import encoded_transform
from raypipe.plan import Cursor, Plan, PlanConfig, Split
from raypipe.presets import is_preset
from raypipe.source import MicroBatchSource
from raypipe.stores import open_store
from raypipe.stores.base import Store
from raypipe.supervisor import start_supervisor
from raypipe.worker import TransformWorker

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

Transform = Callable[..., Any] | str | None
"""A callable on uint8 RGB (H, W, 3), an Albumentations or torchvision v2 pipeline, a preset's name or None."""

# A reader does nothing but yield rows. It must not wait for a CPU that the pool holds: a pool that takes all
# CPUs would starve it, and the run would hang (ray#44687).
_READER_CPUS = 0


@dataclass(frozen=True)
class StreamSpec:
    """Everything that fixes a stream, and the pool that makes it. Build it with `StreamSpec.of`.

    Attributes:
        plan: the order.
        stores: the store of each split of the schedule.
        transforms: the CPU transform of each split.
        transform: decode and bad-sample settings.
        pool: the actor pool; max_actors and in_flight resolved by the preflight.
        quarantine: URI of the folder that records bad samples; empty = log only.
    """

    plan: Plan
    stores: dict[Split, Store]
    transforms: dict[Split, Transform] = field(repr=False)
    transform: TransformConfig
    pool: PoolConfig
    quarantine: str = ""

    @staticmethod
    def of(
        train: Store | str | Path,
        val: Store | str | Path | None = None,
        *,
        plan: PlanConfig | None = None,
        transform: TransformConfig | None = None,
        pool: PoolConfig | None = None,
        train_transform: Transform = "",
        val_transform: Transform = "",
        leave_out: str | Path = "",
        val_leave_out: str | Path = "",
        quarantine: str = "",
    ) -> StreamSpec:
        """Open the stores and lay out the plan.

        Args:
            train, val: stores or their addresses.
            plan, transform, pool: settings; defaults where None.
            train_transform, val_transform: callables or presets instead of those that `transform` names.
            leave_out, val_leave_out: lists of bad samples of each store, see `StoreConfig`.
            quarantine: URI of the folder that records bad samples; empty = log only.

        Raises:
            StoreError, ConfigError: a store or a setting is wrong.
        """
        transform, plan_config = transform or TransformConfig(), plan or PlanConfig()
        train_store = open_store(train) if isinstance(train, str | Path) else train
        val_store = open_store(val) if isinstance(val, str | Path) else val
        stores: dict[Split, Store] = {"train": train_store}
        transforms: dict[Split, Transform] = {
            "train": transform.train if train_transform == "" else train_transform
        }
        if val_store is not None and plan_config.val_every:
            stores["val"] = val_store
            transforms["val"] = transform.val if val_transform == "" else val_transform
        if transform.decode == "gpu":
            for chosen in transforms.values():
                encoded_transform(chosen, transform)
        return StreamSpec(
            plan=Plan.of(
                plan_config,
                train_store,
                val_store,
                leave_out=read_bad_list(leave_out, train_store, "store.leave_out"),
                val_leave_out=read_bad_list(val_leave_out, val_store, "store.val_leave_out"),
            ),
            stores=stores,
            transforms=transforms,
            transform=transform,
            pool=pool or PoolConfig(),
            quarantine=quarantine,
        )

    def readers(self) -> dict[Split, Store]:
        """The stores that the read stage reads; the actors read the others themselves."""
        if self.pool.read == "auto":
            return {split: store for split, store in self.stores.items() if store.groups is not None}
        return dict(self.stores) if self.pool.read == "stage" else {}

    def in_flight(self, max_actors: int, world_size: int) -> int:
        """Micro-batches that may be in flight: enough that no actor and no rank waits for another."""
        return max(self.pool.in_flight or 4 * max_actors + 2 * world_size, 2 * world_size + 1)

    def check_memory(self, max_actors: int, world_size: int) -> None:
        """Raise ResourceError unless what is in flight fits the object store, where presets tell its size."""
        if all(is_preset(transform) for transform in self.transforms.values()):
            micro_batch_bytes = self.plan.config.micro_batch * self.transform.size**2 * 3
            check_object_store(self.in_flight(max_actors, world_size), micro_batch_bytes)

    def dataset(self, cursor: Cursor, *, max_actors: int, world_size: int = 1, supervisor: Any = None) -> Dataset:
        """What is left of the stream at a cursor: a Dataset of one row, and one block, per micro-batch.

        The rows come in the order of the plan (see plan.order). Iterate with `batch_size=None`, or split it with
        `streaming_split(W, equal=True)`: rank r then gets every W-th, the micro-batches m of each step with
        m mod W = r.

        Args:
            cursor: where to start.
            max_actors: transform actors that the pool may grow to.
            world_size: W.
            supervisor: handle of the Supervisor that hears of faults; None = a new one.
        """
        supervisor = supervisor or start_supervisor(self.pool.max_attempts)
        self.plan.check_workers(world_size)
        max_actors = max(max_actors, self.pool.min_actors)
        in_flight = self.in_flight(max_actors, world_size)
        context = ray.data.DataContext.get_current().copy()
        context.target_max_block_size = 1  # every yielded row is its own block: nothing merges or cuts it
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # it would say so each time
        context.print_on_execution_start = False
        context.raise_original_map_exception = True
        context.memory_usage_poll_interval_s = None  # each poll walks all pages, shared ones too: 3 % of a core
        backpressure.install(context, in_flight, reads=bool(self.readers()))
        pool_watch.configure(context, supervisor, self.pool.stall_timeout_s)
        relaxed.configure(context, self.plan, cursor)
        source = MicroBatchSource(self.plan, cursor, self.readers(), supervisor)
        with ray.data.DataContext.current(context):
            rows = ray.data.read_datasource(source, override_num_blocks=source.num_tasks, num_cpus=_READER_CPUS)
            return rows.map_batches(
                TransformWorker,
                fn_constructor_args=(self, supervisor),
                batch_size=None,
                batch_format="pyarrow",
                zero_copy_batch=True,
                num_cpus=self.pool.cpus_per_actor,
                compute=ray.data.ActorPoolStrategy(
                    min_size=self.pool.min_actors,
                    max_size=max_actors,
                    # Ray Data looks for finished tasks ten times a second: what an actor can do in a tenth
                    # of a second must be queued at it.
                    max_tasks_in_flight_per_actor=max(2, in_flight // max_actors),
                ),
            )

    def splits(
        self, cursor: Cursor, *, max_actors: int, world_size: int = 1, supervisor: Any = None
    ) -> list[DataIterator]:
        """What is left of the stream at a cursor, as one iterator per rank; see `dataset`.

        One rank runs the execution in its own process; several share one in an actor of its own.
        """
        dataset = self.dataset(cursor, max_actors=max_actors, world_size=world_size, supervisor=supervisor)
        if not self.plan.num_micro_batches(cursor):  # nothing is left: no pool need start
            dataset = ray.data.from_items([])
        return [dataset.iterator()] if world_size == 1 else dataset.streaming_split(world_size, equal=True)


def stream(
    train: Store | str | Path,
    val: Store | str | Path | None = None,
    *,
    plan: PlanConfig | None = None,
    transform: TransformConfig | None = None,
    pool: PoolConfig | None = None,
    train_transform: Transform = "",
    val_transform: Transform = "",
    leave_out: str | Path = "",
    val_leave_out: str | Path = "",
    cursor: Cursor | None = None,
    world_size: int = 1,
) -> Dataset:
    """The stream as a plain Dataset, for people who only want the data.

    Args:
        train, val: stores or their addresses.
        plan, transform, pool: settings; defaults where None.
        train_transform, val_transform: callables or presets instead of those that `transform` names.
        leave_out, val_leave_out: lists of bad samples of each store, see `StoreConfig`.
        cursor: where to start; None = at the beginning.
        world_size: W, the number of ranks that the Dataset will be split over.

    Returns:
        A Dataset of one row per micro-batch, in the order of the plan; see `StreamSpec.dataset`.

    Raises:
        StoreError, ConfigError, CursorError, ResourceError: what is wrong, and how to mend it.
    """
    spec = StreamSpec.of(
        train,
        val,
        plan=plan,
        transform=transform,
        pool=pool,
        train_transform=train_transform,
        val_transform=val_transform,
        leave_out=leave_out,
        val_leave_out=val_leave_out,
    )
    connect()
    allocation = preflight(spec.pool)
    spec.check_memory(allocation.max_actors, world_size)
    return spec.dataset(cursor or spec.plan.start(), max_actors=allocation.max_actors, world_size=world_size)
