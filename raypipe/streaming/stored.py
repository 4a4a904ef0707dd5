"""A finished micro-batch without its place, as it is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raypipe.plan.places import MicroBatchId
from raypipe.streaming.bad_samples import BadSample
from raypipe.transform.fields import MicroBatch, Ragged


@dataclass(frozen=True)
class Stored:
    """A finished micro-batch without its place.

    Attributes:
        index, weight, fields: see `MicroBatch`.
        bad: its bad samples, during validation.
    """

    index: np.ndarray
    weight: np.ndarray
    fields: dict[str, np.ndarray | Ragged]
    bad: list[BadSample]

    @staticmethod
    def of(batch: MicroBatch, bad: Sequence[BadSample]) -> Stored:
        """Take a micro-batch's own of a block's bad samples."""
        bad_here = [sample for sample in bad if sample.position == batch.position]
        return Stored(batch.index, batch.weight, batch.fields, bad_here)

    def at(
        self,
        position: MicroBatchId,
        read_s: float,
        work_s: float,
        memory_key: bytes = b"",
    ) -> tuple[MicroBatch, list[BadSample]]:
        """Return the micro-batch, and its bad samples, at a place."""
        batch = MicroBatch(
            position,
            self.index,
            self.weight,
            self.fields,
            num_bad=len(self.bad),
            read_s=read_s,
            work_s=work_s,
            num_remembered=1,
            memory_key=memory_key,
        )
        return batch, [replace(sample, position=position) for sample in self.bad]

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(
            values.values.nbytes + values.offsets.nbytes
            if isinstance(values, Ragged)
            else values.nbytes
            for values in (self.index, self.weight, *self.fields.values())
        )
