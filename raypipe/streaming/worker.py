"""One transform actor: a row that names a micro-batch in, a row of pixels out.

in    split, epoch, step, micro        and, from a reader: encoded, label and maybe mask, boxes, lists of B
out   split, epoch, step, micro        image uint8 (1, B, H, W, 3), or, for the device to decode, the arrays of an
                                       EncodedMicroBatch, each (1, …); of streams that have them, mask uint8
                                       (1, B, H, W), boxes float32 (1, B, K, 5); label, index int64 (1, B),
                                       weight float32 (1, B), num_bad int64 (1,),
                                       read_s, work_s float64 (1,): seconds spent on it here
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raypipe.logs import configure_logs, log_place
from raypipe.metrics.prometheus import ActorMetrics
from raypipe.plan.schedule import PADDING, MicroBatchId, Plan, Split
from raypipe.stores.base import Store, name_of
from raypipe.streaming.guard import BadSampleBudget, Guard, record_bad
from raypipe.streaming.source import SPLITS, place_of, read_samples
from raypipe.transform.micro_batch import (
    FIRST_ATTEMPT,
    Attempt,
    MicroBatchResult,
    MicroBatchTransform,
    ReadSample,
    Sample,
    micro_batch_transform,
    read_encoded,
)
from raypipe.transform.sample_cache import open_caches
from raypipe.transform.sample_transform import EncodedSample, Key

if TYPE_CHECKING:
    from raypipe.streaming.pipeline import StreamSpec


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
        self._plan: Plan = spec.plan
        self._stores: dict[Split, Store] = spec.stores
        self._quarantine = spec.quarantine
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
        row = {name: table[name][0] for name in table.column_names}
        at = place_of({name: row[name].as_py() for name in ("split", "epoch", "step", "micro")})
        return self.run(at, row)

    def run(self, at: MicroBatchId, row: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
        """The finished row of one micro-batch; reads the store unless a reader has done so."""
        guarded = self._guard.micro_batch(at) if self._guard else contextlib.nullcontext(FIRST_ATTEMPT)
        started = time.perf_counter()
        with guarded as self._attempt:
            result, read_s, num_kept = self._made(at, row, self._attempt)
            work_s = time.perf_counter() - started
        # Unguarded: where records go may be slow, which is no fault of the samples.
        if result.bad:
            record_bad(self._quarantine, at, result.bad)
        self._metrics.made(at.split, read_s=read_s, work_s=work_s, bad=result.bad)
        if at.split in self._caches:
            num_samples = int((self._plan.indices(at) != PADDING).sum())
            self._metrics.looked_up(at.split, hits=num_kept, misses=num_samples - num_kept)
        self._budget.spend(len(result.bad), len(result.index), result.bad[-1] if result.bad else None)
        return {
            "split": np.array([SPLITS.index(at.split)], np.int8),
            "epoch": np.array([at.epoch]),
            "step": np.array([at.step]),
            "micro": np.array([at.micro]),
            **{name: array[None] for name, array in result.arrays.items()},
            "label": result.label[None],
            "index": result.index[None],
            "weight": result.weight[None],
            "num_bad": np.array([len(result.bad)]),
            "read_s": np.array([read_s]),
            "work_s": np.array([work_s]),
        }

    def _made(
        self, at: MicroBatchId, row: Mapping[str, Any] | None, attempt: Attempt
    ) -> tuple[MicroBatchResult, float, int]:
        """A micro-batch, the seconds that reading took, and how many of its samples were in the cache."""
        started = time.perf_counter()
        log_place(split=at.split, epoch=at.epoch, step=self._plan.global_step(at))
        indices = self._plan.indices(at)
        cache = self._caches.get(at.split)
        kept = cache.find(indices) if cache else {}
        samples: list[Sample | ReadSample]
        if row and "encoded" in row and row["encoded"].is_valid:
            parts = [row[name].as_py() for name in ("encoded", "mask", "boxes") if name in row]
            samples = [EncodedSample(*sample) for sample in zip(*parts, strict=True)]
            labels = np.asarray(row["label"].values)
        elif attempt.before_sample:  # each by itself, once it is announced: to read it may be what kills
            samples = [functools.partial(self._read, at.split, index) for index in indices.tolist()]
            labels = np.zeros(len(indices), np.int64)
            for position, decoded in kept.items():
                labels[position] = decoded.label
        else:
            wanted = indices.copy()
            wanted[list(kept)] = PADDING
            if attempt.bad:  # it would not come back
                wanted[np.isin(indices, list(attempt.bad))] = PADDING
            read, labels = read_samples(self._stores[at.split], wanted, self._targets)
            samples = [*read]
            for position, decoded in kept.items():
                labels[position] = decoded.label
        for position, decoded in kept.items():
            samples[position] = decoded
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
