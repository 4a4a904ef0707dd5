"""One transform actor: a row that names a micro-batch in, a row of pixels out.

in    split, epoch, step, micro        and, from a reader: encoded list of B, label list of B
out   split, epoch, step, micro        image uint8 (1, B, H, W, 3), label, index int64 (1, B),
                                       weight float32 (1, B), num_bad int64 (1,),
                                       read_s, work_s float64 (1,): seconds spent on it here
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.fs

from raypipe.plan import MicroBatchId, Plan, Split
from raypipe.presets import build_transform
from raypipe.sample_transform import Key
from raypipe.source import SPLITS, place_of, read_samples
from raypipe.stores.base import Store
from raypipe.transform import BadSampleBudget, MicroBatchTransform

if TYPE_CHECKING:
    from raypipe.pipeline import StreamSpec

logger = logging.getLogger(__name__)


class TransformWorker:
    """Decodes and transforms micro-batches. Holds no state that a result could depend on."""

    def __init__(self, spec: StreamSpec) -> None:
        self._plan: Plan = spec.plan
        self._stores: dict[Split, Store] = spec.stores
        self._quarantine = spec.quarantine
        config = spec.transform
        self._budget = BadSampleBudget(config.max_bad_fraction, config.bad_grace)
        self._transforms: dict[Split, MicroBatchTransform] = {}
        for split, store in spec.stores.items():
            transform = spec.transforms[split]
            if isinstance(transform, str):
                transform = build_transform(transform, config.size)
            self._transforms[split] = MicroBatchTransform(
                transform,
                decode_min_side=config.decode_min_side or None,
                exif=config.exif,
                on_bad_sample=config.on_bad_sample,
                exact=split == "val",
                store_address=store.address,
                probe=functools.partial(_first_images, store),
            )

    def __call__(self, table: pa.Table) -> dict[str, np.ndarray]:
        row = {name: table[name][0] for name in table.column_names}
        at = place_of({name: row[name].as_py() for name in ("split", "epoch", "step", "micro")})
        return self.run(at, row["encoded"], row["label"])

    def run(self, at: MicroBatchId, encoded: Any = None, label: Any = None) -> dict[str, np.ndarray]:
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
        )
        if result.bad:
            self._report(at, result.bad)
        self._budget.spend(len(result.bad), len(indices), result.bad[-1] if result.bad else None)
        return {
            "split": np.array([SPLITS.index(at.split)], np.int8),
            "epoch": np.array([at.epoch]),
            "step": np.array([at.step]),
            "micro": np.array([at.micro]),
            "image": result.image,
            "label": result.label[None],
            "index": result.index[None],
            "weight": result.weight[None],
            "num_bad": np.array([len(result.bad)]),
            "read_s": np.array([read_s]),
            "work_s": np.array([time.perf_counter() - started]),
        }

    def _report(self, at: MicroBatchId, bad: list[dict[str, Any]]) -> None:
        """Quarantine: one JSON-lines object per micro-batch, named by its place, so that a retry of the
        same micro-batch, on any node, writes the same object again."""
        lines = [json.dumps({**vars(at), **record}) for record in bad]
        for line in lines:
            logger.warning("bad sample: %s", line)
        if self._quarantine:
            filesystem, folder = pyarrow.fs.FileSystem.from_uri(self._quarantine)
            filesystem.create_dir(folder, recursive=True)
            with filesystem.open_output_stream(f"{folder}/{at}.jsonl") as file:
                file.write("".join(line + "\n" for line in lines).encode())


def _first_images(store: Store) -> Iterator[bytes | None]:
    for index in range(min(16, len(store))):
        yield store.read(np.array([index]), ("image",))["image"][0]
