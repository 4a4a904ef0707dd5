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
import ray.data
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from raypipe.errors import ConfigError, ResourceError, StoreError
from raypipe.plan.cursor import Cursor
from raypipe.plan.schedule import EVERY_RANK, PADDING, MicroBatchId, Plan, RankGroup, Split
from raypipe.stores import open_store
from raypipe.stores.base import Store, name_of
from raypipe.streaming.row import ENCODED_SCHEMA, PLACE_SCHEMA, TARGET_SCHEMA, Read, read_samples, source_row
from raypipe.streaming.supervisor import Orders
from raypipe.transform.micro_batch import read_encoded

if TYPE_CHECKING:
    from ray.data import Dataset


# Micro-batches of a ReadTask: what a lost reader reads again at most. A task costs the driver 1 ms at the start.
_SHARE, _MAX_TASKS = 1024, 256


class MicroBatchSource(Datasource):
    """What is left of a plan's schedule at a cursor, as lazy ReadTasks in the order of the stream.

    Args:
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
        # To serialise lists, even of nothing, takes as long as all other columns.
        self._schema = PLACE_SCHEMA
        if readers:
            self._schema = TARGET_SCHEMA if targets else ENCODED_SCHEMA
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
        return [
            ReadTask(
                functools.partial(self._rows, first, count),
                BlockMetadata(num_rows=count, size_bytes=None, exec_stats=None, input_files=None),
                schema=self._schema,
            )
            for first, count in shares or [(0, 0)]
        ]

    def _rows(self, first: int, count: int) -> Iterator[pa.Table]:
        share = itertools.islice(self._plan.micro_batches(self._cursor, first, self._group), count)
        announce: _Announcer | None = None
        for number, at in enumerate(share):
            if number == 0 and self._supervisor is not None:
                what = f"{count} micro-batches from {at} on"
                announce = _Announcer(self._supervisor, what, bool(self._readers), self._targets)
            read: Read | None = None
            if at.split in self._readers:
                store, indices = self._readers[at.split], self._plan.indices(at)
                if announce:
                    announce(number, at, store, indices)
                read = read_samples(store, indices, self._targets)
            yield source_row(at, read, self._schema)
        if announce:
            announce.end()


class _Announcer:
    """Tells the Supervisor what a reader that has died before is about to read, should it die of it.

    Args:
        share: of the schedule, for people.
        reads: whether it reads anything but the plan.
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


# Rows per block that a plain read yields: 110 KB images make about 28 MB, well under Ray's 128 MiB target.
_ROWS_PER_BLOCK = 256


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
    wanted = tuple(columns) if columns else store.columns

    def read(block: dict[str, np.ndarray]) -> Iterator[pa.Table]:
        for first in range(0, len(block["id"]), _ROWS_PER_BLOCK):
            rows = store.read(block["id"][first : first + _ROWS_PER_BLOCK], wanted)
            yield pa.table({name: pa.array(values) for name, values in rows.items()})

    tasks = 8 if parallelism == -1 else parallelism
    indices = ray.data.range(len(store), override_num_blocks=min(tasks, max(1, len(store))))
    return indices.map_batches(read, batch_size=None)
