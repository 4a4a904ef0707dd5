"""The stream: plan → source → actor pool, as one Ray Data execution for the whole schedule.

StreamSpec            everything that fixes a stream; pickles; built on the driver
spec.dataset(cursor)  a ray.data.Dataset of what is left at a cursor, one row per micro-batch
raypipe.stream(…)     both in one call, for people who only want the data
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.data

from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.logs import LogFormat
from raypipe.metrics import prometheus as telemetry
from raypipe.plan.cursor import Cursor
from raypipe.plan.rank_group import RankGroup, rank_groups
from raypipe.plan.schedule import Plan, Split
from raypipe.rayext import autoscaler, backpressure, inline_metadata, lean, pool_watch
from raypipe.rayext.admission import free_cpus
from raypipe.rayext.cluster import check_object_store, connect, preflight
from raypipe.rayext.pool_size import SizeRules
from raypipe.stores import open_store
from raypipe.stores.bad_list import read_bad_list
from raypipe.stores.base import Store
from raypipe.streaming.source import MicroBatchSource
from raypipe.streaming.supervisor import start_supervisor, start_supervisors
from raypipe.streaming.worker import TransformWorker
from raypipe.transform.micro_batch import check_transforms
from raypipe.transform.presets import is_preset
from raypipe.transform.sample_cache import check_cache
from raypipe.transform.transform_steps import Steps, config_without_files, without_files

if TYPE_CHECKING:
    from ray.data import DataIterator, Dataset

Transform = Callable[..., Any] | str | Steps | None
"""A callable on uint8 RGB (H, W, 3), an Albumentations or torchvision v2 pipeline, None, or what `transform.train`
may be."""

# A reader does nothing but yield rows. It must not wait for a CPU that the pool holds: a pool that takes all
# CPUs would starve it, and the run would hang (ray#44687).
_READER_CPUS = 0


def placement(prefer_nodes: str) -> dict[str, Any]:
    """Options of Ray's for an actor that prefers nodes of a label, and takes any other where those have no room.

    Left alone, Ray Data spreads actors over all nodes, the hosts of GPUs too.

    Args:
        prefer_nodes: `label=value`; empty = no preference.
    """
    label, _, value = prefer_nodes.partition("=")
    return {"label_selector": {label: value}, "fallback_strategy": [{"label_selector": {}}]} if label else {}


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
        run: name of the run, for metrics and logs.
        log: format of its log lines.
    """

    plan: Plan
    stores: dict[Split, Store]
    transforms: dict[Split, Transform] = field(repr=False)
    transform: TransformConfig
    pool: PoolConfig
    quarantine: str = ""
    run: str = ""
    log: LogFormat = "text"

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
        run: str = "",
        log: LogFormat = "text",
    ) -> StreamSpec:
        """Open the stores and lay out the plan.

        Args:
            train, val: stores or their addresses.
            plan, transform, pool: settings; defaults where None.
            train_transform, val_transform: instead of those that `transform` names.
            leave_out, val_leave_out: lists of bad samples of each store, see `StoreConfig`.
            quarantine: URI of the folder that records bad samples; empty = log only.
            run: name of the run, for metrics and logs.
            log: format of its log lines, "text" or "json".

        Raises:
            StoreError, ConfigError: a store or a setting is wrong.
        """
        transform = config_without_files(transform or TransformConfig())
        plan_config, pool = plan or PlanConfig(), pool or PoolConfig()
        check_cache(pool, transform)
        train_store = open_store(train) if isinstance(train, str | Path) else train
        val_store = open_store(val) if isinstance(val, str | Path) else val
        stores: dict[Split, Store] = {"train": train_store}
        transforms: dict[Split, Transform] = {
            "train": transform.train if train_transform == "" else train_transform
        }
        if val_store is not None and plan_config.val_every:
            stores["val"] = val_store
            transforms["val"] = transform.val if val_transform == "" else val_transform
        transforms = {split: without_files(chosen) for split, chosen in transforms.items()}
        check_transforms(transform, transforms, stores)
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
            pool=pool,
            quarantine=quarantine,
            run=run,
            log=log,
        )

    def readers(self) -> dict[Split, Store]:
        """The stores that the read stage reads; the actors read the others themselves."""
        if self.pool.read == "auto":
            return {split: store for split, store in self.stores.items() if store.groups is not None}
        return dict(self.stores) if self.pool.read == "stage" else {}

    def max_actors(self, group: RankGroup, max_actors: int) -> int:
        """Of the transform actors of all executions, those that the pool of one may grow to."""
        return max(group.share(max_actors), self.pool.min_actors)

    def in_flight(self, group: RankGroup) -> backpressure.InFlight:
        """Micro-batches that may be in flight in one execution, see `PoolConfig.in_flight_for`."""
        share = group.share(self.pool.in_flight) if self.pool.in_flight else 0
        return backpressure.InFlight(*replace(self.pool, in_flight=share).in_flight_for(group.size))

    def size_rules(self, group: RankGroup, max_actors: int) -> SizeRules:
        """What bounds and paces the size of one execution's pool."""
        pool = self.pool
        return SizeRules(
            min_actors=pool.min_actors,
            max_actors=self.max_actors(group, max_actors),
            grow_wait=pool.grow_wait,
            grow_after_s=pool.grow_after_s,
            grow_factor=pool.grow_factor,
            shrink_after_s=pool.shrink_after_s,
        )

    def initial_actors(self, group: RankGroup, max_actors: int) -> int:
        """Transform actors that one execution begins with: as many as there is room for now, beside other runs.

        More nodes come when ranks wait.
        """
        room = int(free_cpus() / self.pool.cpus_per_actor + 1e-9)
        return min(max(group.share(room), self.pool.min_actors), self.max_actors(group, max_actors))

    def check_memory(self, max_actors: int, world_size: int, num_streams: int = 1) -> None:
        """Raise ResourceError unless what is in flight fits the object store, where presets tell its size.

        What actors on nodes that are yet to come have in flight is left out: they bring an object store each.

        Args:
            max_actors, world_size: of the stream.
            num_streams: such streams that run at one time.
        """
        if all(is_preset(transform) for transform in self.transforms.values()):
            channels = 4 if self.transform.mask_column else 3
            micro_batch_bytes = self.plan.config.micro_batch * self.transform.size**2 * channels
            limits = (
                self.in_flight(group).limit(self.initial_actors(group, max_actors))
                for group in rank_groups(world_size, self.pool.executions)
            )
            check_object_store(num_streams * sum(limits), micro_batch_bytes)

    def dataset(
        self,
        cursor: Cursor,
        *,
        max_actors: int,
        world_size: int = 1,
        supervisor: Any = None,
        group: RankGroup | None = None,
    ) -> Dataset:
        """What is left of the stream at a cursor: a Dataset of one row, and one block, per micro-batch.

        The rows come in the order of the plan (see plan.order). Iterate with `batch_size=None`, or split it with
        `streaming_split(R, equal=True)` over the R ranks of the group: each then gets every R-th, which are the
        micro-batches m of each step with m mod W = its rank among all W.

        Args:
            cursor: where to start.
            max_actors: transform actors that the pools of all executions may grow to.
            world_size: W.
            supervisor: handle of the Supervisor that hears of faults; None = a new one.
            group: the ranks that this execution serves; None = all.
        """
        supervisor = supervisor or start_supervisor(self.pool.max_attempts, self.run, self.log)
        self.plan.check_workers(world_size)
        group = group or RankGroup(0, world_size, world_size)
        actors = self.initial_actors(group, max_actors)
        in_flight = self.in_flight(group)
        lean.configure()
        context = ray.data.DataContext.get_current().copy()
        context.target_max_block_size = 1  # every yielded row is its own block: nothing merges or cuts it
        context.execution_options.preserve_order = True
        context.enable_progress_bars = False
        logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # it would say so each time
        context.print_on_execution_start = False
        context.raise_original_map_exception = True
        context.issue_detectors_config.detectors = []  # one warns of memory=0 below; pool_watch ends what hangs
        context.memory_usage_poll_interval_s = None  # each poll walks all pages, shared ones too: 3 % of a core
        backpressure.install(context, in_flight, actors, reads=bool(self.readers()))
        inline_metadata.configure(context)
        autoscaler.configure(context, self.size_rules(group, max_actors), supervisor)
        pool_watch.configure(context, supervisor, self.pool.stall_timeout_s)
        telemetry.configure(context, self.run, self.log)
        source = MicroBatchSource(
            self.plan, cursor, self.readers(), supervisor, group, self.transform.target_columns
        )
        with ray.data.DataContext.current(context):
            rows = ray.data.read_datasource(source, override_num_blocks=source.num_tasks, num_cpus=_READER_CPUS)
            return rows.map_batches(
                TransformWorker,
                fn_constructor_args=(self, supervisor),
                batch_size=None,
                batch_format="pyarrow",
                zero_copy_batch=True,
                num_cpus=self.pool.cpus_per_actor,
                # Else later actors ask for the bytes of a block, and the autoscaler finds no node type that has
                # them where the cluster's YAML does not name its memory.
                memory=0,
                **placement(self.pool.prefer_nodes),
                compute=ray.data.ActorPoolStrategy(
                    min_size=self.pool.min_actors,
                    max_size=self.max_actors(group, max_actors),
                    initial_size=actors,
                    # Ray Data looks for finished tasks ten times a second: what an actor can do in a tenth
                    # of a second must be queued at it.
                    max_tasks_in_flight_per_actor=max(2, in_flight.limit(actors) // actors),
                ),
            )

    def splits(
        self,
        cursor: Cursor,
        *,
        max_actors: int,
        world_size: int = 1,
        supervisor: Any = None,
        executions: int | None = None,
    ) -> list[DataIterator]:
        """What is left of the stream at a cursor, as one iterator per rank; see `dataset`.

        A rank with an execution for itself runs it in its own process; several share one in an actor of its own.

        Args:
            executions: G; None = pool.executions.

        Raises:
            ConfigError: G does not divide W, or W does not divide M.
        """
        chief = supervisor or start_supervisor(self.pool.max_attempts)
        groups = rank_groups(world_size, executions or self.pool.executions)
        iterators: list[DataIterator] = []
        supervisors = start_supervisors(self.pool.max_attempts, self.run, self.log, chief, len(groups))
        for group, supervisor in zip(groups, supervisors, strict=True):
            dataset = self.dataset(
                cursor, max_actors=max_actors, world_size=world_size, supervisor=supervisor, group=group
            )
            if not self.plan.num_micro_batches(cursor):  # nothing is left: no pool need start
                dataset = ray.data.from_items([])
            alone = group.size == 1
            iterators += [dataset.iterator()] if alone else dataset.streaming_split(group.size, equal=True)
        return iterators


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
        train_transform, val_transform: instead of those that `transform` names.
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
    if spec.pool.executions > 1:
        raise ConfigError(
            f"raypipe.stream is one Dataset, so one execution: pool.executions is {spec.pool.executions}; "
            "StreamSpec.splits gives one iterator per rank"
        )
    connect()
    allocation = preflight(spec.pool)
    spec.check_memory(allocation.max_actors, world_size)
    return spec.dataset(cursor or spec.plan.start(), max_actors=allocation.max_actors, world_size=world_size)
