"""One transform actor: a row that names a micro-batch in, a row of pixels out; see `raypipe.streaming.row`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.logs import configure_logs, log_place
from raypipe.metrics.prometheus import ActorMetrics
from raypipe.plan.schedule import PADDING, MicroBatchId, Split
from raypipe.stores.base import name_of
from raypipe.streaming.guard import BadSampleBudget, Guard, record_bad
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
