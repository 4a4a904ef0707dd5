"""Transform actor: maps a row that names a block to a row with its pixels; see `raypipe.streaming.row`.

TransformWorker   the actor
Guard             around each of its blocks: a time limit, and its Supervisor's instructions
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from raypipe import library_settings
from raypipe.cpus import queued_s
from raypipe.errors import ResourceError
from raypipe.logs import configure_logs
from raypipe.metrics.prometheus import Recorder
from raypipe.metrics.tracer import begin_recording, traced
from raypipe.packages import differences
from raypipe.plan.places import PADDING, MicroBatchId, Split
from raypipe.rayext.cluster_state import yield_cpus
from raypipe.rayext.failures import deaths
from raypipe.rayext.kv_store import was_restarted
from raypipe.rayext.processes import this_process
from raypipe.rayext.trace_sender import TraceSender
from raypipe.storage import retries
from raypipe.storage.shared_memory import remove_unused
from raypipe.stores.base import Columns
from raypipe.stores.in_memory import hold
from raypipe.streaming.bad_samples import BadSample, counts_of
from raypipe.streaming.blocks import Block
from raypipe.streaming.faults import NO_ORDERS, Orders
from raypipe.streaming.maker import Made, MicroBatchMaker
from raypipe.streaming.memory.recall import recall_of
from raypipe.streaming.read_ahead import ReadAhead
from raypipe.streaming.row import block_row, of_source_row
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import stream_name
from raypipe.transform.fields import MicroBatch
from raypipe.transform.process_state import use_one_thread
from raypipe.transform.user_code import failed

# A restarted actor asks what is known of so many blocks before it trusts the world again. What killed it
# was at most as far away as the queue of its tasks.
_WARY_FOR = 64
# The time of an actor's first block says little, and after some the rest are as long.
_MEASURED = range(1, 8)
_STDERR = 2
_DEADLY = "its process died twice while at it: it crashes, or takes longer than transform.time_limit_s"
# Seconds by which a time limit may be longer than it says.
_UNWATCHED_S = 0.25


class TransformWorker:
    """Makes blocks of micro-batches, as an actor.

    Args:
        spec: the stream.
        supervisor: handle of the stream's Supervisor.
    """

    def __init__(self, spec: StreamSpec, supervisor: Any) -> None:
        yield_cpus()
        # what imports torch later has one thread, too, whatever cpus_per_actor is
        os.environ["OMP_NUM_THREADS"] = "1"
        library_settings.apply(spec.library_settings)
        configure_logs(spec.log_format, run=spec.run)
        # First of all: the Supervisor looks after the processes that it knows.
        self._guard = Guard(supervisor, spec.transform.time_limit_s)
        remove_unused()
        hold(spec.stores.values())
        self._maker = MicroBatchMaker(spec, self._read)
        self._metrics = Recorder(spec.run)
        self._read_ahead = ReadAhead(spec.plan, spec.stores, spec.names)
        if differing := differences(spec.versions):
            supervisor.packages_differ.remote(
                f"{ray.util.get_node_ip_address()} has {differing}: its pixels may differ"
            )
        self._supervisor = supervisor
        makers = self._maker.sample_makers
        self._recall = recall_of(self._maker.block, makers, stream_name(supervisor))
        if spec.traces and begin_recording():
            TraceSender(supervisor, this_process("transform actor"))
        self._num_blocks = 0
        self._told = set[Split]()  # splits that are remembered, as the Supervisor knows
        self._orders = NO_ORDERS
        # Samples of a careful block that a reader has read, by index.
        self._given: dict[int, Columns] = {}

    def __call__(self, table: pa.Table) -> dict[str, np.ndarray]:
        """The finished row of a block, from a row of the source."""
        block, given = of_source_row(table)
        with traced("block", block):
            return self._made(block, given)

    def _made(self, block: Block, given: Columns | None) -> dict[str, np.ndarray]:
        queued_before_s = queued_s()
        use_one_thread()
        with self._guard.block(block) as orders:
            self._orders = orders
            if orders.careful and given is not None:
                self._given = self._by_index(block, given)
                given = None
            try:
                batches, bad, arrays = self._recalled(block, given, orders)
            except SystemExit as error:
                # Ray would take it for a death, and run it again
                raise failed("the transform", error) from error
            finally:
                self._orders = NO_ORDERS
                self._given = {}
        # Unguarded: a slow destination of the records is not a fault of the samples.
        self._maker.settle(batches, bad)
        self._count(batches, bad)
        row = block_row(batches, arrays)
        if self._num_blocks in _MEASURED:
            # Other processes that run during the first blocks say nothing of later ones.
            work_s = sum(batch.work_s for batch in batches)
            work_s -= queued_s() - queued_before_s
            work_s = max(0.0, work_s) / len(block)
            num_bytes = sum(array.nbytes for array in row.values())
            self._supervisor.block_measured.remote(
                block[0].split, work_s, num_bytes // len(block)
            )
        if not self._num_blocks:
            # Items of a Dataset come and go by the thousand. Else a full collection, once in about 100,000 items,
            # would take 0.15 s to look through the objects of all libraries.
            gc.freeze()
        self._num_blocks += 1
        return row

    def _recalled(self, block: Block, given: Columns | None, orders: Orders) -> Made:
        """Make the micro-batches of a block, as far as they are not remembered."""
        recall = self._recall
        split = block[0].split
        # no sample is to be touched with care
        is_safe = not (orders.careful or orders.bad)
        if not (recall and is_safe and recall.wants(split)):
            return self._maker.block(
                block,
                given,
                excluded=dict.fromkeys(orders.bad, _DEADLY),
                one_by_one=orders.careful,
            )
        made = recall.block(block, given)
        if recall.looks_for(split) and split not in self._told:
            self._supervisor.split_remembered.remote(split)
            self._told.add(split)
        return made

    def _read(self, position: MicroBatchId, indices: np.ndarray) -> Columns:
        """Read samples for the maker. In a careful block they come one by one, and each is announced first: to
        read it may be what kills."""
        if not self._orders.careful:
            self._read_ahead.begin(position)
            return self._maker.read_store(position, indices)
        for index in indices[indices != PADDING].tolist():
            self._guard.announce(position, index)
            if index in self._given:
                return self._given[index]
        return self._maker.read_store(position, indices)

    def _by_index(self, block: Block, given: Columns) -> dict[int, Columns]:
        """The samples that a reader has read, each by itself."""
        indices = self._maker.plan.draw_block(block).indices.ravel().tolist()
        return {
            index: given.rows(slice(row, row + 1)) for row, index in enumerate(indices)
        }

    def _count(self, batches: list[MicroBatch], bad: list[BadSample]) -> None:
        split = batches[0].position.split
        num_remembered = sum(batch.num_remembered for batch in batches)
        amounts = {
            "actor_micro_batches_total": len(batches) - num_remembered,
            "actor_remembered_total": num_remembered,
            "actor_read_seconds_total": sum(batch.read_s for batch in batches),
            "actor_work_seconds_total": sum(batch.work_s for batch in batches),
            **counts_of(bad),
        }
        self._metrics.add(amounts, split=split)
        self._metrics.add_storage("actor")


class Guard:
    """Guard of one transform actor.

    Args:
        supervisor: handle of a Supervisor.
        time_limit_s: seconds for a micro-batch, and, in a careful attempt, for each sample; 0 = none.
    """

    def __init__(self, supervisor: Any, time_limit_s: float) -> None:
        self._supervisor = supervisor
        self._time_limit_s = time_limit_s
        self._process = this_process("transform actor")
        self._actor = (
            ray.get_runtime_context().get_actor_id() or f"process {self._process.pid}"
        )
        try:
            restarted = ray.get(
                supervisor.actor_started.remote(
                    self._actor, str(self._process), was_restarted()
                )
            )
        except deaths():
            # the stream ended in the meantime; a traceback would be printed
            ray.actor.exit_actor()
        supervisor.process_joined.remote(self._actor, self._process)
        self._wary = _WARY_FOR if restarted else 0
        self._watched_at = -math.inf
        # A thread that reads ahead reports progress, too, and must not start the clock of a block that has ended.
        self._lock = threading.Lock()
        self._is_in_block = False

    @contextlib.contextmanager
    def block(self, block: Block) -> Iterator[Orders]:
        """Around a block's transform: gives what is known about the block.

        Raises:
            ResourceError: the block has cost too many actors.
        """
        begun = self._supervisor.block_started.remote(
            self._actor, list(map(str, block)), self._process
        )
        orders = NO_ORDERS
        if self._wary:
            self._wary -= 1
            orders = ray.get(begun)
            if orders.error:
                raise ResourceError(orders.error)
        # to fetch a shard may take longer than any transform
        retries.on_progress.append(self._watch)
        self._is_in_block = True
        try:
            yield orders
        finally:
            retries.on_progress.remove(self._watch)
            with self._lock:
                self._is_in_block = False
                faulthandler.cancel_dump_traceback_later()
                self._watched_at = -math.inf
        if orders.careful:
            ray.get(self._supervisor.block_finished.remote(self._actor))

    def announce(self, position: MicroBatchId, index: int) -> None:
        """Say that a sample is touched next, before it is: it may kill this process."""
        ray.get(
            self._supervisor.announce_sample.remote(self._actor, str(position), index)
        )
        self._watch()

    def _watch(self) -> None:
        with self._lock:
            # A thread of C's: it works while a transform holds the interpreter, and shows where that was. To start
            # it takes as long as some tiny images, so it is started again only now and then, and waits that much
            # longer.
            now = time.monotonic()
            is_time = now > self._watched_at + _UNWATCHED_S
            if self._is_in_block and self._time_limit_s and is_time:
                faulthandler.dump_traceback_later(
                    self._time_limit_s + _UNWATCHED_S, exit=True, file=_STDERR
                )
                self._watched_at = now
