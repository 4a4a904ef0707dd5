"""A finished micro-batch without its place, as it is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raypipe.plan.places import MicroBatchId
from raypipe.streaming.bad_samples import BadSample
from raypipe.transform.fields import MicroBatch, Ragged

# To copy fewer bytes costs no more than the rank's question.
_LEAST_COLLECTED = 256 << 10


def is_collectable(num_bytes: int, bad: Sequence[Any]) -> bool:
    """Return whether ranks may collect a micro-batch: it is large, and an actor has no bad samples to report."""
    return num_bytes >= _LEAST_COLLECTED and not bad


@dataclass(frozen=True)
class Stored:
    """A finished micro-batch without its place.

    Attributes:
        index, weight, fields: see `MicroBatch`.
        bad: its bad samples, during validation.
        collected_bytes: bytes of the fields, if only its rank gets them, and `fields` is empty; else 0.
    """

    index: np.ndarray
    weight: np.ndarray
    fields: dict[str, np.ndarray | Ragged]
    bad: list[BadSample]
    collected_bytes: int = 0

    @staticmethod
    def of(batch: MicroBatch, bad: Sequence[BadSample]) -> Stored:
        """Take a micro-batch's own of a block's bad samples."""
        bad_here = [sample for sample in bad if sample.position == batch.position]
        return Stored(batch.index, batch.weight, batch.fields, bad_here)

    @property
    def is_collectable(self) -> bool:
        """True if its rank may collect it."""
        return is_collectable(self.num_bytes, self.bad)

    def outline(self) -> Stored:
        """Return all that a transform actor needs of it, if its rank collects the fields."""
        return replace(self, fields={}, collected_bytes=self.num_bytes)

    def at(
        self,
        position: MicroBatchId,
        read_s: float,
        work_s: float,
        key: bytes,
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
            memory_key=key if self.collected_bytes else b"",
            memory_bytes=self.collected_bytes,
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
