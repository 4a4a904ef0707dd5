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

from raypipe.errors import ResourceError, StoreError
from raypipe.plan.cursor import Cursor
from raypipe.plan.schedule import PADDING, WHOLE, MicroBatchId, Plan, Share, Split
from raypipe.stores import open_store
from raypipe.stores.base import Store, name_of
from raypipe.streaming.row import PLACE_SCHEMA, READ_SCHEMA, Read, read_samples, source_row
from raypipe.transform.micro_batch import read_encoded

if TYPE_CHECKING:
    from ray.data import Dataset


# Micro-batches of a ReadTask: what a lost reader reads again at most. A task costs the driver 1 ms at the start.
_TASK_SIZE, _MAX_TASKS = 1024, 256


class MicroBatchSource(Datasource):
    """What is left of a plan's schedule at a cursor, as lazy ReadTasks in the order of the stream.

    Args:
        readers: the stores, by split, that the reader reads; other splits are left to the actors.
        supervisor: handle of the stream's Supervisor, which hears of readers that begin; None = nobody does.
        share: of the schedule, that these are.
        targets: columns that are read beside image and label, see `TransformConfig.target_columns`.
    """

    def __init__(
        self,
        plan: Plan,
        cursor: Cursor,
        readers: dict[Split, Store],
        supervisor: Any = None,
        share: Share = WHOLE,
        targets: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        plan.check(cursor)
        self._plan, self._cursor, self._readers, self._supervisor = plan, cursor, readers, supervisor
        self._share, self._targets = share, targets
        # To serialise lists, even of nothing, takes as long as all other columns.
        self._schema = READ_SCHEMA if readers else PLACE_SCHEMA
        self._total = plan.num_micro_batches(cursor, share)
        self._task_size = max(_TASK_SIZE, -(-self._total // _MAX_TASKS))

    @property
    def num_tasks(self) -> int:
        """ReadTasks that the schedule is cut into."""
        return max(1, -(-self._total // self._task_size))

    def get_name(self) -> str:
        return "Plan"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        size = self._task_size
        tasks = [(first, min(size, self._total - first)) for first in range(0, self._total, size)]
        return [
            ReadTask(
                functools.partial(self._rows, first, count),
                BlockMetadata(num_rows=count, size_bytes=None, exec_stats=None, input_files=None),
                schema=self._schema,
            )
            for first, count in tasks or [(0, 0)]
        ]

    def _rows(self, first: int, count: int) -> Iterator[pa.Table]:
        places = itertools.islice(self._plan.micro_batches(self._cursor, first, self._share), count)
        task = str(ray.get_runtime_context().get_task_id()) if self._supervisor else ""
        careful = False
        for number, at in enumerate(places):
            if number == 0 and self._supervisor:
                begun = self._supervisor.reads.remote(task, f"{count} micro-batches from {at} on")
                careful = bool(self._readers) and ray.get(begun)
            read: Read | None = None
            if at.split in self._readers:
                store, indices = self._readers[at.split], self._plan.indices(at)
                if careful:
                    self._announce(task, at, store, indices)
                read = read_samples(store, indices, self._targets)
            yield source_row(at, read, self._schema)
        if self._supervisor:
            self._supervisor.has_read.remote(task)

    def _announce(self, task: str, at: MicroBatchId, store: Store, indices: np.ndarray) -> None:
        """Read what a micro-batch needs of a store in groups; the Supervisor hears of each before, should it kill.

        Raises:
            ResourceError: to read it has cost too many readers. Not at an earlier micro-batch: what was yielded
                before is looked at no more, and Ray takes an error among it for the end.
        """
        if store.groups is None:
            self._tell(task, f"{at} of {store.address}")
            return
        groups = np.unique(np.searchsorted(store.groups, indices[indices != PADDING], "right") - 1)
        for group in groups.tolist():
            first, last = int(store.groups[group]), int(store.groups[group + 1]) - 1
            name = name_of(store, first)
            where = f"samples {first} to {last} of {store.address}{f', from {name} on' if name else ''}"
            self._tell(task, f"{where}, for {at}")
            read_encoded(store, np.array([first]), self._targets)  # it is kept, for the micro-batch

    def _tell(self, task: str, what: str) -> None:
        if error := ray.get(self._supervisor.reading.remote(task, what)):
            raise ResourceError(error)


# 110 KB images make blocks of about 28 MB, well under Ray's target of 128 MiB.
_ROWS_PER_BLOCK = 256


def read_lmdb(path: str, columns: list[str] | None = None) -> Dataset:
    """An LMDB store as a plain Ray Data dataset, one row per sample, in stored order, `image` as encoded bytes.

    Args:
        path: a `*.lmdb` file or a folder of them, or a URI of either.
        columns: columns to read; None = all.

    Raises:
        StoreError: not an LMDB store, or without one of the columns.
    """
    store = open_store(path)
    if type(store).__name__ != "LMDBStore":
        raise StoreError(f"{path} is not an LMDB store: use raypipe.stream or ray.data.read_parquet")
    wanted = tuple(columns or store.columns)
    if missing := set(wanted) - set(store.columns):
        raise StoreError(f"{path} has no column {min(missing)!r}; its columns are {', '.join(store.columns)}")

    def read(block: dict[str, np.ndarray]) -> pa.Table:
        return pa.table({name: pa.array(values) for name, values in store.read(block["id"], wanted).items()})

    return ray.data.range(len(store)).map_batches(read, batch_size=_ROWS_PER_BLOCK)
