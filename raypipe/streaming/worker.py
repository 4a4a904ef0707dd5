"""One transform actor: a row that names a micro-batch in, a row of pixels out; see `raypipe.streaming.row`.

TransformWorker   the actor
Guard             around each of its micro-batches: a time limit, and what its Supervisor knows
record_bad        the quarantine: best effort, since no run should end for want of it
BadSampleBudget   how many bad samples a run puts up with
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from raypipe.errors import BadSamplesError, ResourceError
from raypipe.logs import configure_logs, log_place
from raypipe.metrics.prometheus import Recorder
from raypipe.plan.schedule import PADDING, MicroBatchId, Split
from raypipe.storage import local_file
from raypipe.storage.files import write_text
from raypipe.storage.filesystem import join, open_filesystem
from raypipe.stores.base import name_of, title_of
from raypipe.streaming.row import PLACE_SCHEMA, made_row, place_of, read_of, read_samples
from raypipe.streaming.spec import StreamSpec, micro_batch_transform
from raypipe.transform.micro_batch import (
    FIRST_ATTEMPT,
    Attempt,
    MicroBatchResult,
    MicroBatchTransform,
    ReadSample,
    Sample,
    read_encoded,
)
from raypipe.transform.sample_cache import open_caches
from raypipe.transform.sample_transform import EncodedSample, Key

logger = logging.getLogger(__name__)

# A restarted actor asks what is known of so many micro-batches before it trusts the world again. What killed it
# was at most as far away as the queue of its tasks.
_WARY_FOR = 64
_STDERR = 2

# Where a record has failed, this process tries none again: an object store that is gone says so after minutes, and
# a run should not wait for it at every bad sample.
_without_records: set[str] = set()


class TransformWorker:
    """Decodes and transforms micro-batches. Holds no state that a result could depend on.

    Args:
        spec: the stream.
        supervisor: handle of the stream's Supervisor; None = outside of an actor.
    """

    def __init__(self, spec: StreamSpec, supervisor: Any = None) -> None:
        configure_logs(spec.log, run=spec.run)
        self._metrics = Recorder(spec.run)
        self._guard: Guard | None = None
        if supervisor is not None:
            self._guard = Guard(supervisor, spec.transform.time_limit_s)
        self._plan, self._stores, self._quarantine = spec.plan, spec.stores, spec.quarantine
        config = spec.transform
        self._targets = config.target_columns
        self._budget = BadSampleBudget(config.max_bad_fraction, config.bad_grace)
        self._caches = open_caches(spec.pool, spec.stores, config)
        self._attempt = FIRST_ATTEMPT
        self._transforms: dict[Split, MicroBatchTransform] = {}
        for split, store in spec.stores.items():
            self._transforms[split] = micro_batch_transform(
                spec.transforms[split],
                config,
                probe=functools.partial(self._first_samples, split),
                exact=split == "val",
                store_address=store.address,
                sample_name=functools.partial(name_of, store),
                cache=self._caches.get(split),
            )

    def __call__(self, table: pa.Table) -> dict[str, np.ndarray]:
        return self.run(place_of(table.select(PLACE_SCHEMA.names).to_pylist()[0]), table)

    def run(self, at: MicroBatchId, table: pa.Table | None = None) -> dict[str, np.ndarray]:
        """The finished row of one micro-batch; reads the store unless a reader has done so.

        Args:
            table: the row of the source.
        """
        guarded = self._guard.micro_batch(at) if self._guard else contextlib.nullcontext(FIRST_ATTEMPT)
        started = time.perf_counter()
        with guarded as self._attempt:
            result, read_s, num_kept = self._made(at, table, self._attempt)
            work_s = time.perf_counter() - started
        # Unguarded: where records go may be slow, which is no fault of the samples.
        if result.bad:
            record_bad(self._quarantine, at, result.bad)
        amounts = {
            "actor_micro_batches_total": 1,
            "actor_read_seconds_total": read_s,
            "actor_work_seconds_total": work_s,
            "bad_samples_total": len(result.bad),
            "substituted_samples_total": sum(record["substitute"] is not None for record in result.bad),
        }
        if at.split in self._caches:
            num_samples = int((self._plan.indices(at) != PADDING).sum())
            amounts |= {"cache_hits_total": num_kept, "cache_misses_total": num_samples - num_kept}
        self._metrics.add(amounts, split=at.split)
        self._budget.spend(result.bad, len(result.index))
        return made_row(at, result, read_s, work_s)

    def _made(
        self, at: MicroBatchId, table: pa.Table | None, attempt: Attempt
    ) -> tuple[MicroBatchResult, float, int]:
        """A micro-batch, the seconds that reading took, and how many of its samples were in the cache."""
        started = time.perf_counter()
        log_place(split=at.split, epoch=at.epoch, step=self._plan.global_step(at))
        indices = self._plan.indices(at)
        cache = self._caches.get(at.split)
        kept = cache.find(indices) if cache else {}
        samples: list[Sample | ReadSample]
        given = read_of(table) if table is not None else None
        if given is not None:
            samples, labels = [*given[0]], given[1]
        elif attempt.before_sample:  # each by itself, once it is announced: to read it may be what kills
            samples = [functools.partial(self._read, at.split, index) for index in indices.tolist()]
            labels = np.zeros(len(indices), np.int64)
        else:
            wanted = indices.copy()
            wanted[list(kept)] = PADDING
            if attempt.bad:  # it would not come back
                wanted[np.isin(indices, list(attempt.bad))] = PADDING
            read, labels = read_samples(self._stores[at.split], wanted, self._targets)
            samples = [*read]
        for position, decoded in kept.items():
            samples[position] = decoded
            if given is None:
                labels[position] = decoded.label
        read_s = time.perf_counter() - started

        def read_substitute(position: int, attempt: int) -> tuple[ReadSample, int, int, Key]:
            index = self._plan.substitute(at, int(indices[position]), attempt)
            k0, k1 = self._plan.sample_keys(at, np.array([index]))[0].tolist()
            return functools.partial(self._read, at.split, index), 0, index, (k0, k1)

        result = self._transforms[at.split].run(
            {"image": samples, "label": labels, "index": indices},
            self._plan.sample_keys(at, indices),
            read_substitute,
            attempt,
        )
        return result, read_s, len(kept)

    def _read(self, split: Split, index: int) -> tuple[EncodedSample, int]:
        (sample,), (label,) = read_encoded(self._stores[split], np.array([index]), self._targets)
        return sample, int(label)

    def _first_samples(self, split: Split) -> Iterator[EncodedSample]:
        kept = self._plan.kept[split]
        num_samples = len(self._stores[split]) - len(kept.left_out)
        for index in kept.indices(np.arange(min(16, num_samples))).tolist():
            if self._attempt.before_sample:
                self._attempt.before_sample(index)
            if index not in self._attempt.bad:
                yield self._read(split, index)[0]


class Guard:
    """Of one transform actor.

    Args:
        supervisor: handle of a Supervisor.
        time_limit_s: seconds for a micro-batch, and, in a careful attempt, for each sample; 0 = none.
    """

    def __init__(self, supervisor: Any, time_limit_s: float) -> None:
        self._supervisor, self._time_limit_s = supervisor, time_limit_s
        context = ray.get_runtime_context()
        self._actor = context.get_actor_id() or f"process {os.getpid()}"
        home = f"process {os.getpid()} on {ray.util.get_node_ip_address()}, node {context.get_node_id()[:8]}"
        self._wary = _WARY_FOR if ray.get(supervisor.arrived.remote(self._actor, home)) else 0

    @contextlib.contextmanager
    def micro_batch(self, at: MicroBatchId) -> Iterator[Attempt]:
        """Gives what is known of a micro-batch; around its transform.

        Raises:
            ResourceError: it has cost too many actors.
        """
        begun = self._supervisor.begins.remote(self._actor, str(at))
        attempt = FIRST_ATTEMPT
        if self._wary:
            self._wary -= 1
            orders = ray.get(begun)
            if orders.error:
                raise ResourceError(orders.error)
            if orders.careful or orders.bad:
                why = "its process died twice while at it: it crashes, or takes longer than transform.time_limit_s"
                attempt = Attempt(dict.fromkeys(orders.bad, why), self._touch if orders.careful else None)
        self._watch()
        local_file.on_progress.append(self._watch)  # to fetch a shard may take longer than any transform
        try:
            yield attempt
        finally:
            local_file.on_progress.remove(self._watch)
            faulthandler.cancel_dump_traceback_later()
        if attempt.before_sample:
            ray.get(self._supervisor.ended.remote(self._actor))

    def _watch(self) -> None:
        # A thread of C's: it works while a transform holds the interpreter, and shows where that was.
        if self._time_limit_s:
            faulthandler.dump_traceback_later(self._time_limit_s, exit=True, file=_STDERR)

    def _touch(self, index: int) -> None:
        ray.get(self._supervisor.touches.remote(self._actor, index))
        self._watch()


def record_bad(folder_uri: str, at: MicroBatchId, bad: list[dict[str, Any]], by: str = "") -> None:
    """Log bad samples, and write them as one JSON-lines object per micro-batch.

    It is named by the micro-batch's place, so that a retry of the same one, on any node, writes the same again.
    Where it cannot be written, that is logged, once in a process, and the log alone has them from then on.

    Args:
        folder_uri: of the quarantine; empty = log only.
        at: the micro-batch.
        bad: one record per sample.
        by: who found them, where that is not an actor; part of the name.
    """
    lines = [json.dumps({**vars(at), **record}) for record in bad]
    for line in lines:
        logger.warning("bad sample: %s", line)
    if not folder_uri or folder_uri in _without_records:
        return
    try:
        filesystem, folder = open_filesystem(folder_uri)
        filesystem.create_dir(folder, recursive=True)
        write_text(join(folder_uri, f"{at}{by and '-' + by}.jsonl"), "".join(line + "\n" for line in lines))
    except Exception as error:  # a full disk, an object store that is gone, whatever it is
        _without_records.add(folder_uri)
        logger.warning("bad samples cannot be recorded in %s, but in this log: %s", folder_uri, error)


@dataclass
class BadSampleBudget:
    """How many bad samples a run puts up with before it stops.

    Attributes:
        max_fraction: of the samples seen, in [0, 1].
        grace: this many are let pass at any time, since one in the first ten says little about a rate.
    """

    max_fraction: float = 0.01
    grace: int = 10
    num_bad: int = 0
    num_seen: int = 0

    def spend(self, bad: list[dict[str, Any]], num_seen: int) -> None:
        """Count so many more samples seen, and those of them that were bad, by their records.

        Raises:
            BadSamplesError: more than max(grace, max_fraction × seen) have been bad.
        """
        self.num_bad += len(bad)
        self.num_seen += num_seen
        if bad and self.num_bad > max(self.grace, self.max_fraction * self.num_seen):
            title = title_of(bad[-1]["store"], bad[-1]["index"], bad[-1]["name"])
            raise BadSamplesError(
                f"{self.num_bad} of {self.num_seen} samples are bad, more than"
                f" transform.max_bad_fraction={self.max_fraction:g} allows (the first {self.grace} are free);"
                f" the last one is {title}: {bad[-1]['error']}."
                " Mend the store, or raise transform.max_bad_fraction"
            )
