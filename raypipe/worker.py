"""One transform actor: a row that names a micro-batch in, a row of pixels out.

in    split, epoch, step, micro        and, from a reader: encoded list of B, label list of B
out   split, epoch, step, micro        image uint8 (1, B, H, W, 3), or, for the device to decode, the arrays of an
                                       EncodedMicroBatch, each (1, …); label, index int64 (1, B),
                                       weight float32 (1, B), num_bad int64 (1,),
                                       read_s, work_s float64 (1,): seconds spent on it here
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raypipe.encoded_transform import EncodedMicroBatchTransform, encoded_transform
from raypipe.guard import Guard
from raypipe.order import Kept
from raypipe.plan import MicroBatchId, Plan, Split
from raypipe.presets import build_transform
from raypipe.quarantine import record_bad
from raypipe.sample_transform import Key
from raypipe.source import SPLITS, place_of, read_samples
from raypipe.stores.base import Store
from raypipe.transform import FIRST_ATTEMPT, Attempt, BadSampleBudget, MicroBatchTransform

if TYPE_CHECKING:
    from raypipe.pipeline import StreamSpec


class TransformWorker:
    """Decodes and transforms micro-batches. Holds no state that a result could depend on.

    Args:
        spec: the stream.
        supervisor: handle of the stream's Supervisor; None = outside of an actor.
    """

    def __init__(self, spec: StreamSpec, supervisor: Any = None) -> None:
        self._guard: Guard | None = None
        if supervisor is not None:
            self._guard = Guard(supervisor, spec.transform.time_limit_s, spec.pool.recycle_after)
        self._plan: Plan = spec.plan
        self._stores: dict[Split, Store] = spec.stores
        self._quarantine = spec.quarantine
        config = spec.transform
        self._budget = BadSampleBudget(config.max_bad_fraction, config.bad_grace)
        self._transforms: dict[Split, MicroBatchTransform] = {}
        for split, store in spec.stores.items():
            transform = spec.transforms[split]
            exact = split == "val"
            if config.decode == "gpu":
                self._transforms[split] = EncodedMicroBatchTransform(
                    encoded_transform(transform, config),
                    on_bad_sample=config.on_bad_sample,
                    exact=exact,
                    store_address=store.address,
                )
                continue
            if isinstance(transform, str):
                transform = build_transform(transform, config.size)
            self._transforms[split] = MicroBatchTransform(
                transform,
                decode_min_side=config.decode_min_side or None,
                exif=config.exif,
                on_bad_sample=config.on_bad_sample,
                exact=exact,
                store_address=store.address,
                probe=functools.partial(_first_images, store, spec.plan.kept[split]),
            )

    def __call__(self, table: pa.Table) -> dict[str, np.ndarray]:
        row = {name: table[name][0] for name in table.column_names}
        at = place_of({name: row[name].as_py() for name in ("split", "epoch", "step", "micro")})
        guarded = self._guard.micro_batch(at) if self._guard else contextlib.nullcontext(FIRST_ATTEMPT)
        with guarded as attempt:
            return self.run(at, row["encoded"], row["label"], attempt)

    def run(
        self, at: MicroBatchId, encoded: Any = None, label: Any = None, attempt: Attempt = FIRST_ATTEMPT
    ) -> dict[str, np.ndarray]:
        """The finished row of one micro-batch; reads the store unless a reader has done so."""
        started = time.perf_counter()
        indices = self._plan.indices(at)
        if encoded is not None and encoded.is_valid:
            images = encoded.as_py()
            labels = np.asarray(label.values)
        else:
            images, labels = read_samples(self._stores[at.split], indices)
        read_s = time.perf_counter() - started

        def read_substitute(position: int, attempt: int) -> tuple[bytes | None, int, int, Key]:
            index = self._plan.substitute(at, int(indices[position]), attempt)
            columns = self._stores[at.split].read(np.array([index]))
            k0, k1 = self._plan.sample_keys(at, np.array([index]))[0].tolist()
            return columns["image"][0], int(columns["label"][0]), index, (k0, k1)

        result = self._transforms[at.split].run(
            {"image": images, "label": labels, "index": indices},
            self._plan.sample_keys(at, indices),
            read_substitute,
            attempt,
        )
        if result.bad:
            record_bad(self._quarantine, at, result.bad)
        self._budget.spend(len(result.bad), len(indices), result.bad[-1] if result.bad else None)
        return {
            "split": np.array([SPLITS.index(at.split)], np.int8),
            "epoch": np.array([at.epoch]),
            "step": np.array([at.step]),
            "micro": np.array([at.micro]),
            **(
                {"image": result.image}
                if isinstance(result.image, np.ndarray)
                else {name: array[None] for name, array in result.image.items()}
            ),
            "label": result.label[None],
            "index": result.index[None],
            "weight": result.weight[None],
            "num_bad": np.array([len(result.bad)]),
            "read_s": np.array([read_s]),
            "work_s": np.array([time.perf_counter() - started]),
        }


def _first_images(store: Store, kept: Kept) -> Iterator[bytes | None]:
    for index in kept.indices(np.arange(min(16, len(store) - len(kept.left_out)))):
        yield store.read(np.array([index]), ("image",))["image"][0]
