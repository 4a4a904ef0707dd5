"""The plan as a Ray Data source.

    MicroBatchSource   ReadTasks, each a generator over a share of what is left of the schedule
                       → one row per micro-batch: its place, and, where a reader reads, its encoded samples
    read_lmdb          a store as a plain Ray Data source → one row per sample

Few lazy tasks keep the driver small, whatever the length of the schedule; one runs at a time. A task that is lost
is run again from its start, so the schedule is not one task. Rows are tiny where the transform actors read the
store themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import Datasource, read_datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from raypipe.errors import ConfigError, ResourceError, StoreError
from raypipe.plan.cursor import Cursor
from raypipe.plan.rank_group import EVERY_RANK, RankGroup
from raypipe.plan.schedule import PADDING, MicroBatchId, Plan, Split
from raypipe.stores import open_store
from raypipe.stores.base import Store, name_of
from raypipe.streaming.supervisor import Orders
from raypipe.transform.micro_batch import read_encoded
from raypipe.transform.sample_transform import EncodedSample
from raypipe.transform.targets import as_bytes

if TYPE_CHECKING:
    from ray.data import Dataset

SPLITS: tuple[Split, ...] = ("train", "val")
_PLACE = [("split", pa.int8()), ("epoch", pa.int64()), ("step", pa.int64()), ("micro", pa.int64())]
PLACE_SCHEMA = pa.schema(_PLACE)
"""Rows for transform actors that read."""
ENCODED_SCHEMA = pa.schema([*_PLACE, ("encoded", pa.list_(pa.large_binary())), ("label", pa.list_(pa.int64()))])
"""Rows of a reader that reads; null in a split that it leaves to the actors."""
_BINARIES = pa.list_(pa.large_binary())
TARGET_SCHEMA = pa.schema([*ENCODED_SCHEMA, ("mask", _BINARIES), ("boxes", _BINARIES)])
"""The same of a stream with masks or boxes."""


def place_of(row: dict[str, Any]) -> MicroBatchId:
    """The place in the run of one row, which may come from the source or from the stream."""
    return MicroBatchId(SPLITS[int(row["split"])], int(row["epoch"]), int(row["step"]), int(row["micro"]))


def read_samples(
    store: Store, indices: np.ndarray, targets: Mapping[str, str] | None = None
) -> tuple[list[EncodedSample], np.ndarray]:
    """Samples, and labels int64 (B,), of int64 indices (B,); padding has no image, and label 0.

    Args:
        targets: see `read_encoded`.
    """
    real = indices != PADDING
    read, read_labels = read_encoded(store, indices[real], targets)
    if real.all():
        return read, read_labels
    samples = [EncodedSample(None)] * len(indices)
    labels = np.zeros(len(indices), np.int64)
    for position, sample in zip(np.flatnonzero(real), read, strict=True):
        samples[position] = sample
    labels[real] = read_labels
    return samples, labels


# Micro-batches of a ReadTask: what a lost reader reads again at most. A task costs the driver 1 ms at the start.
_SHARE, _MAX_TASKS = 1024, 256


class MicroBatchSource(Datasource):
    """What is left of a plan's schedule at a cursor, as lazy ReadTasks in the order of the stream.

    Args:
        plan: the run's plan.
        cursor: where to start.
        readers: the stores, by split, that the reader reads; other splits are left to the actors.
        supervisor: handle of the stream's Supervisor, which hears of readers that begin; None = nobody does.
        group: the ranks whose micro-batches these are.
        targets: columns that are read beside image and label, see `TransformConfig.target_columns`.
    """

    def __init__(
        self,
        plan: Plan,
        cursor: Cursor,
        readers: dict[Split, Store],
        supervisor: Any = None,
        group: RankGroup = EVERY_RANK,
        targets: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        plan.check(cursor)
        self._plan, self._cursor, self._readers, self._supervisor = plan, cursor, readers, supervisor
        self._group, self._targets = group, targets
        self._total = plan.num_micro_batches(cursor, group)
        self._share = max(_SHARE, -(-self._total // _MAX_TASKS))

    @property
    def num_tasks(self) -> int:
        """ReadTasks that the schedule is cut into."""
        return max(1, -(-self._total // self._share))

    def get_name(self) -> str:
        return "Plan"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        shares = [(first, min(self._share, self._total - first)) for first in range(0, self._total, self._share)]
        stream = (self._plan, self._cursor, self._readers, self._supervisor, self._group, self._targets)
        rows = functools.partial(_rows, *stream)
        return [
            ReadTask(
                functools.partial(rows, first, count),
                BlockMetadata(num_rows=count, size_bytes=None, exec_stats=None, input_files=None),
                schema=_schema(self._readers, self._targets),
            )
            for first, count in shares or [(0, 0)]
        ]


def _schema(readers: Mapping[Split, Store], targets: Mapping[str, str] | None) -> pa.Schema:
    if not readers:
        return PLACE_SCHEMA
    return TARGET_SCHEMA if targets else ENCODED_SCHEMA


def _rows(
    plan: Plan,
    cursor: Cursor,
    readers: dict[Split, Store],
    supervisor: Any,
    group: RankGroup,
    targets: Mapping[str, str] | None,
    first: int,
    count: int,
) -> Iterator[pa.Table]:
    share = itertools.islice(plan.micro_batches(cursor, first, group), count)
    schema = _schema(readers, targets)
    announce: _Announcer | None = None
    for number, at in enumerate(share):
        if number == 0 and supervisor is not None:
            announce = _Announcer(supervisor, f"{count} micro-batches from {at} on", bool(readers), targets)
        row: list[Any] = [SPLITS.index(at.split), at.epoch, at.step, at.micro]
        if readers:
            # To serialise lists, even of nothing, takes as long as all other columns.
            read: list[Any] = [None] * (len(schema) - len(row))
            if at.split in readers:
                store, indices = readers[at.split], plan.indices(at)
                if announce:
                    announce(number, at, store, indices)
                read = _encoded(*read_samples(store, indices, targets), bool(targets))
            row += read
        arrays = [pa.array([value], field.type) for value, field in zip(row, schema, strict=True)]
        yield pa.Table.from_arrays(arrays, schema=schema)
    if announce:
        announce.end()


class _Announcer:
    """Tells the Supervisor what a reader that has died before is about to read, should it die of it.

    Args:
        supervisor: its handle.
        share: of the schedule, for people.
        reads: whether it reads anything but the plan.
        targets: see `read_encoded`.
    """

    def __init__(self, supervisor: Any, share: str, reads: bool, targets: Mapping[str, str] | None) -> None:
        self._supervisor, self._targets = supervisor, targets
        self._task = ray.get_runtime_context().get_task_id()  # the same when it is restarted
        begun = supervisor.reads.remote(self._task, share)
        self._orders = ray.get(begun) if reads else Orders()
        self._groups: dict[str, np.ndarray] = {}

    def __call__(self, number: int, at: MicroBatchId, store: Store, indices: np.ndarray) -> None:
        """Samples of a micro-batch, which has this number in the share, are about to be read.

        Raises:
            ResourceError: to read them has cost too many readers.
        """
        orders = self._orders
        if not orders.careful:
            return
        # Not sooner: what was yielded before is looked at no more, and Ray takes an error among it for the end.
        if orders.error and number >= orders.place:
            raise ResourceError(orders.error)
        self._tell(number, f"{at} of {store.address}")
        if store.groups is None:
            return
        groups = np.unique(np.searchsorted(store.groups, indices[indices != PADDING], "right") - 1)
        for group in np.setdiff1d(groups, self._groups.get(at.split, ())).tolist():
            first, last = int(store.groups[group]), int(store.groups[group + 1]) - 1
            name = name_of(store, first)
            self._tell(
                number, f"samples {first} to {last} of {store.address}{f', from {name} on' if name else ''}"
            )
            read_encoded(store, np.array([first]), self._targets)  # it is kept, for the micro-batch
        self._groups[at.split] = groups
        self._tell(number, f"{at} of {store.address}")

    def _tell(self, number: int, what: str) -> None:
        ray.get(self._supervisor.reading.remote(self._task, number, what))

    def end(self) -> None:
        """The share is read."""
        self._supervisor.has_read.remote(self._task)


def _encoded(samples: list[EncodedSample], labels: np.ndarray, targets: bool) -> list[Any]:
    images, *columns = zip(*samples, strict=True)
    return [images, labels, *([as_bytes(value) for value in column] for column in columns if targets)]


class StoreSource(Datasource):
    """A store as a Ray Data source: one row per sample, stored order, cut into equal ranges."""

    def __init__(self, store: Store, columns: tuple[str, ...]) -> None:
        super().__init__()
        self._store, self._columns = store, columns

    def get_name(self) -> str:
        return "Store"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        store, columns = self._store, self._columns
        bounds = np.linspace(0, len(store), min(parallelism, max(1, len(store))) + 1).astype(np.int64)
        return [
            ReadTask(
                functools.partial(_ranges, store, columns, int(start), int(stop)),
                BlockMetadata(num_rows=int(stop - start), size_bytes=None, exec_stats=None, input_files=None),
                per_task_row_limit=per_task_row_limit,
            )
            for start, stop in itertools.pairwise(bounds)
        ]


# Rows per block that a plain read yields: 110 KB images make about 28 MB, well under Ray's 128 MiB target.
_ROWS_PER_BLOCK = 256


def _ranges(store: Store, columns: tuple[str, ...], start: int, stop: int) -> Iterator[pa.Table]:
    for first in range(start, stop, _ROWS_PER_BLOCK):
        rows = store.read(np.arange(first, min(stop, first + _ROWS_PER_BLOCK)), columns)
        yield pa.table({name: pa.array(values) for name, values in rows.items()})


def read_lmdb(path: str, columns: list[str] | None = None, parallelism: int = -1) -> Dataset:
    """Read an LMDB store as a plain Ray Data dataset, one row per sample, in stored order.

    Args:
        path: a `*.lmdb` file or a folder of them, or a URI of either.
        columns: columns to read; None = all.
        parallelism: read tasks; -1 = 8, or one per sample where there are fewer.

    Returns:
        A Dataset with the columns asked for, `image` as encoded bytes.

    Raises:
        StoreError: not an LMDB store, or without one of the columns.
    """
    store = open_store(path)
    if type(store).__name__ != "LMDBStore":
        raise StoreError(f"{path} is not an LMDB store: use raypipe.stream or ray.data.read_parquet")
    missing = [name for name in columns or () if name not in store.columns]
    if missing:
        raise StoreError(f"{path} has no column {missing[0]!r}; its columns are {', '.join(store.columns)}")
    if parallelism != -1 and parallelism < 1:
        raise ConfigError(f"parallelism must be -1 or at least 1, got {parallelism}")
    tasks = 8 if parallelism == -1 else parallelism
    source = StoreSource(store, tuple(columns) if columns else store.columns)
    return read_datasource(source, override_num_blocks=min(tasks, max(1, len(store))))
