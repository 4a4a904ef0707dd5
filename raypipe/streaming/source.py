"""The plan as a Ray Data source.

    ReadTasks, each a generator over a share of what is left of the schedule
    → one row per block: its places, and, where a reader reads, its encoded samples

A small number of lazy tasks keeps the driver small for a schedule of any length; one runs at a time. A lost task
runs again from its start, so the schedule is more than one task. Rows are tiny if the transform actors read the
store themselves.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from raypipe.errors import ResourceError
from raypipe.metrics.prometheus import Recorder
from raypipe.metrics.tracer import traced
from raypipe.plan.places import PADDING, Cursor, MicroBatchId, Split
from raypipe.rayext.processes import this_process
from raypipe.rayext.trace_sender import sending_trace
from raypipe.storage.retries import Threads, outages_s
from raypipe.stores.base import Columns, Store, name_of
from raypipe.stores.in_memory import hold
from raypipe.streaming.blocks import MAX_BYTES, Block, cut, most, tasks
from raypipe.streaming.row import SOURCE_SCHEMA, source_row
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.samples import joined, read_samples

# What two cores transform in half a second, in this many rows at most.
_AHEAD_BYTES = 64 << 20
_MAX_AHEAD = 16


class MicroBatchSource(Datasource):
    """A stream's schedule from a place on, as lazy ReadTasks in the order of the stream.

    Args:
        spec: the stream.
        readers: the stores, by split, that the reader reads; other splits are left to the actors.
        supervisor: handle of the stream's Supervisor, to which readers report their start; None = no report.
        ranks: number of ranks that get the rows in turn.
        block: micro-batches in a block; 0 = as many as the supervisor finds, within these limits:
        largest: micro-batches of a block; 0 = any number.
        max_bytes: bytes of a block, and of one of a split that is remembered.
        num_first: micro-batches from the start on that the ranks make themselves.
    """

    def __init__(
        self,
        spec: StreamSpec,
        start: Cursor | MicroBatchId,
        readers: dict[Split, Store],
        supervisor: Any = None,
        *,
        ranks: int = 1,
        block: int = 1,
        largest: int = 0,
        max_bytes: tuple[int, int] = (MAX_BYTES, MAX_BYTES),
        num_first: int = 0,
    ) -> None:
        super().__init__()
        plan = spec.plan
        # Each task has the plan, and no code of the user's. What only names places needs no lists of samples.
        self._plan = plan if readers else plan.without_draws()
        self._start = start
        self._readers = readers
        self._supervisor = supervisor
        self._names = spec.names
        self._reads_class = spec.columns.reads_class
        self._ranks = ranks
        self._share = spec.share
        self._block = block
        self._largest = largest
        self._max_bytes = max_bytes
        self._run = spec.run
        self._num_first = num_first
        self._traces = spec.traces
        num = plan.num_micro_batches(start) // spec.share[1]
        self._tasks = tasks(num - num_first, ranks)

    @property
    def num_tasks(self) -> int:
        """ReadTasks that the schedule is cut into."""
        return len(self._tasks)

    def get_name(self) -> str:
        return "Plan"

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,
    ) -> list[ReadTask]:
        return [
            ReadTask(
                functools.partial(self._rows, first, count),
                # How many rows there will be is not known, and nothing depends on it.
                BlockMetadata(
                    num_rows=count, size_bytes=None, exec_stats=None, input_files=None
                ),
                schema=SOURCE_SCHEMA,
            )
            for first, count in self._tasks
        ]

    def _rows(self, first: int, count: int) -> Iterator[pa.Table]:
        is_first_task = first == 0
        upcoming = self._plan.micro_batches(
            self._start, first + self._num_first, self._share
        )
        places = itertools.islice(upcoming, count)
        position = next(places, None)
        if position is None:
            return
        task = ""
        careful = False
        sizes: dict[Split, int] = dict.fromkeys(("train", "val"), self._block or 1)
        if self._supervisor:
            task = str(ray.get_runtime_context().get_task_id())
            share = f"{count} micro-batches from {position} on"
            begun = self._supervisor.reader_started.remote(
                task, share, this_process("reader")
            )
            if not self._block and not is_first_task:
                room = min(most(count, self._ranks), self._largest or count)
                sizes = ray.get(
                    self._supervisor.sizes.remote(task, room, *self._max_bytes)
                )
            careful = bool(self._readers) and ray.get(begun)
        hold(self._readers.values())
        events: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._traces and self._supervisor:
            events = sending_trace(self._supervisor, this_process("reader"))
        with events:
            every_place = itertools.chain([position], places)
            blocks = cut(every_place, self._ranks, sizes)
            rows = self._blocks(blocks, task, careful)
            # a careful reader announces each read, which may kill it
            if self._readers and not careful:
                rows = _ahead(rows)
            yield from rows
        if task:
            self._supervisor.reader_finished.remote(task)

    def _blocks(
        self, blocks: Iterable[Block], task: str, careful: bool
    ) -> Iterator[pa.Table]:
        """Yield the rows of blocks."""
        metrics = Recorder(self._run)
        for block in blocks:
            with traced("row", block):
                samples = None
                begun_s = time.perf_counter()
                outage_s = outages_s()
                if block[0].split in self._readers:
                    samples = joined(
                        [
                            self._read(position, task if careful else "")
                            for position in block
                        ]
                    )
                    metrics.add_storage("reader")
                    samples.read_s = time.perf_counter() - begun_s
                    samples.outage_s = outages_s() - outage_s
                row = source_row(block, samples)
            yield row

    def _read(self, position: MicroBatchId, task: str) -> Columns:
        """Read the samples of a micro-batch; a task that is given announces what it reads."""
        store = self._readers[position.split]
        indices = self._plan.indices(position)
        if task:
            self._announce(task, position, store, indices)
        samples = read_samples(store, indices, self._names, self._reads_class)
        # Copies: a block's micro-batches are held at a time, whose views might keep many row groups in memory.
        samples.images = [image and bytes(image) for image in samples.images]
        return samples

    def _announce(
        self, task: str, position: MicroBatchId, store: Store, indices: np.ndarray
    ) -> None:
        """Read a micro-batch's samples from a store in groups; announce each to the Supervisor first, in case
        it kills the process.

        Raises:
            ResourceError: reading it has cost too many readers. It is not raised at an earlier micro-batch:
                those already yielded are skipped, and Ray takes an error among them for the end.
        """
        if store.groups is None:
            self._tell(task, f"{position} of {store.address}")
            return
        groups = np.unique(
            np.searchsorted(store.groups, indices[indices != PADDING], "right") - 1
        )
        for group in groups.tolist():
            first = int(store.groups[group])
            last = int(store.groups[group + 1]) - 1
            name = name_of(store, first)
            where = f"samples {first} to {last} of {store.address}{f', from {name} on' if name else ''}"
            self._tell(task, f"{where}, for {position}")
            # it is kept, for the micro-batch
            store.read(np.array([first]), self._names)

    def _tell(self, task: str, reading: str) -> None:
        if error := ray.get(self._supervisor.announce_read.remote(task, reading)):
            raise ResourceError(error)


def _ahead(rows: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield rows, of which a thread makes about _AHEAD_BYTES before they are asked for.

    So the groups of the next window are fetched while the actors are still busy with those of this one.
    """
    with Threads(1) as thread:
        reading = deque([thread.submit(next, rows, None)])
        while (row := reading.popleft().result()) is not None:
            num_ahead = min(_MAX_AHEAD, 1 + _AHEAD_BYTES // row.nbytes)
            while len(reading) < num_ahead:
                reading.append(thread.submit(next, rows, None))
            yield row
