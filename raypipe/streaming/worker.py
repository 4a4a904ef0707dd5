"""One transform actor: a row that names a micro-batch in, a row of pixels out; see `raypipe.streaming.row`.

The Guard is around each micro-batch: a time limit, fresh memory, and a record of what it was at.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from raypipe.errors import ResourceError
from raypipe.logs import configure_logs, log_place
from raypipe.metrics.prometheus import ActorMetrics
from raypipe.plan.schedule import PADDING, MicroBatchId, Split
from raypipe.storage import local_file
from raypipe.stores.base import name_of
from raypipe.streaming.row import PLACE_SCHEMA, made_row, place_of, read_of, read_samples
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.encoded_transform import EncodedMicroBatchTransform, encoded_transform
from raypipe.transform.micro_batch import (
    FIRST_ATTEMPT,
    Attempt,
    BadSampleBudget,
    MicroBatchResult,
    MicroBatchTransform,
)
from raypipe.transform.presets import build_transform
from raypipe.transform.quarantine import record_bad
from raypipe.transform.sample_cache import open_caches
from raypipe.transform.sample_transform import Key
from raypipe.transform.target_transform import micro_batch_transform
from raypipe.transform.targets import read_encoded

# A restarted actor asks what is known of so many micro-batches before it trusts the world again. What killed it
# was at most as far away as the queue of its tasks.
_WARY_FOR = 64
# Results of the last micro-batch are on their way when an actor ends itself.
_FLUSH_S = 0.2
_STDERR = 2


class Guard:
    """Of one transform actor.

    Args:
        supervisor: handle of a Supervisor.
        time_limit_s: seconds for a micro-batch, and, in a careful attempt, for each sample; 0 = none.
        recycle_after: micro-batches after which the process ends, to be restarted; 0 = never.
    """

    def __init__(self, supervisor: Any, time_limit_s: float, recycle_after: int) -> None:
        self._supervisor, self._time_limit_s, self._recycle_after = supervisor, time_limit_s, recycle_after
        context = ray.get_runtime_context()
        self._actor = context.get_actor_id() or f"process {os.getpid()}"
        home = f"process {os.getpid()} on {ray.util.get_node_ip_address()}, node {context.get_node_id()[:8]}"
        self._wary = _WARY_FOR if ray.get(supervisor.arrived.remote(self._actor, home)) else 0
        self._num_done = 0

    @contextlib.contextmanager
    def micro_batch(self, at: MicroBatchId) -> Iterator[Attempt]:
        """Gives what is known of a micro-batch; around its transform.

        Raises:
            ResourceError: it has cost too many actors.
        """
        if self._recycle_after and self._num_done >= self._recycle_after:
            self._leave()
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
        self._num_done += 1

    def _watch(self) -> None:
        # A thread of C's: it works while a transform holds the interpreter, and shows where that was.
        if self._time_limit_s:
            faulthandler.dump_traceback_later(self._time_limit_s, exit=True, file=_STDERR)

    def _touch(self, index: int) -> None:
        ray.get(self._supervisor.touches.remote(self._actor, index))
        self._watch()

    def _leave(self) -> None:
        ray.get(self._supervisor.leaves.remote(self._actor))
        time.sleep(_FLUSH_S)
        os._exit(1)  # Ray restarts an actor that dies, and lets one go that exits


class TransformWorker:
    """Decodes and transforms micro-batches. Holds no state that a result could depend on.

    Args:
        spec: the stream.
        supervisor: handle of the stream's Supervisor; None = outside of an actor.
    """

    def __init__(self, spec: StreamSpec, supervisor: Any = None) -> None:
        configure_logs(spec.log, run=spec.run)
        self._metrics = ActorMetrics(spec.run)
        self._guard: Guard | None = None
        if supervisor is not None:
            self._guard = Guard(supervisor, spec.transform.time_limit_s, spec.pool.recycle_after)
        self._plan, self._stores, self._quarantine = spec.plan, spec.stores, spec.quarantine
        config = spec.transform
        self._targets = config.target_columns
        self._budget = BadSampleBudget(config.max_bad_fraction, config.bad_grace)
        self._caches = open_caches(spec.pool, spec.stores, config)
        self._attempt = FIRST_ATTEMPT
        self._transforms: dict[Split, MicroBatchTransform] = {}
        for split, store in spec.stores.items():
            transform = spec.transforms[split]
            options: dict[str, Any] = {
                "on_bad_sample": config.on_bad_sample,
                "exact": split == "val",
                "store_address": store.address,
                "sample_name": functools.partial(name_of, store),
            }
            if config.decode == "gpu":
                self._transforms[split] = EncodedMicroBatchTransform(
                    encoded_transform(transform, config), **options
                )
                continue
            if isinstance(transform, str | list):
                transform = build_transform(transform, config.size)
            self._transforms[split] = micro_batch_transform(
                transform,
                config,
                cache=self._caches.get(split),
                probe=functools.partial(self._first_samples, split),
                **options,
            )

    def __call__(self, table: pa.Table) -> dict[str, np.ndarray]:
        return self.run(place_of({name: table[name][0].as_py() for name in PLACE_SCHEMA.names}), table)

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
        self._metrics.made(at.split, read_s=read_s, work_s=work_s, bad=result.bad)
        if at.split in self._caches:
            num_samples = int((self._plan.indices(at) != PADDING).sum())
            self._metrics.looked_up(at.split, hits=num_kept, misses=num_samples - num_kept)
        self._budget.spend(len(result.bad), len(result.index), result.bad[-1] if result.bad else None)
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
        read = read_of(table) if table is not None else None
        if read is not None:
            samples, labels = read
        elif attempt.before_sample:  # each by itself, once it is announced: to read it may be what kills
            samples = [functools.partial(self._read, at.split, index) for index in indices.tolist()]
            labels = np.zeros(len(indices), np.int64)
        else:
            wanted = indices.copy()
            wanted[list(kept)] = PADDING
            if attempt.bad:  # it would not come back
                wanted[np.isin(indices, list(attempt.bad))] = PADDING
            samples, labels = read_samples(self._stores[at.split], wanted, self._targets)
        for position, decoded in kept.items():
            samples[position] = decoded
            if read is None:
                labels[position] = decoded.label
        read_s = time.perf_counter() - started

        def read_substitute(position: int, attempt: int) -> tuple[Any, int, int, Key]:
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

    def _read(self, split: Split, index: int) -> tuple[Any, int]:
        (sample,), (label,) = read_encoded(self._stores[split], np.array([index]), self._targets)
        return sample, int(label)

    def _first_samples(self, split: Split) -> Iterator[Any]:
        kept = self._plan.kept[split]
        num_samples = len(self._stores[split]) - len(kept.left_out)
        for index in kept.indices(np.arange(min(16, num_samples))).tolist():
            if self._attempt.before_sample:
                self._attempt.before_sample(index)
            if index not in self._attempt.bad:
                yield self._read(split, index)[0]
