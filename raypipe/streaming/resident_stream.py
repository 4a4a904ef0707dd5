"""Stream of one rank whose data cost nothing: batches that are on its device already.

The loop gets a few micro-batches again and again, at the places of the plan. All else is as it is: their shapes,
fields and labels, the augmentation and its seeds, steps, epochs, validations, checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from raypipe.device.prefetcher import Batch, on_device
from raypipe.plan.places import PADDING, Cursor, MicroBatchId, Split
from raypipe.plan.schedule import Plan, Segment
from raypipe.streaming.decoding import Decoding
from raypipe.streaming.lifetime import HostStream
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.start.head_start import micro_batches_of_rank
from raypipe.transform.sizes import Size, size_in

NUM_KEPT = 4
"""Micro-batches of each size that take turns: together they exceed a CPU's caches, as those of a stream do."""
# Micro-batches of the schedule among which each bucket is looked for before the loop begins.
_NUM_LOOKED_AT = 256


class ResidentStream:
    """Stream of one rank, of micro-batches that stay on its device. `open` makes them.

    Args:
        spec: the stream.
        rank, world_size: number of this rank, and W.
        device: where they stay.
    """

    def __init__(
        self, spec: StreamSpec, rank: int, world_size: int, device: torch.device
    ) -> None:
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._kept: dict[tuple[Split, Size], list[Batch]] = {}
        self._maker: MicroBatchMaker | None = None
        self._num_handed_out = 0

    def open(self, start: Cursor, only: Segment | None = None) -> HostStream:
        """Open the stream at a place; `only` is the one segment that it brings, None = all from there on."""
        plan = self._spec.plan.only(only) if only else self._spec.plan
        return HostStream(iter(()), resident=self._batches(plan, start))

    def _batches(self, plan: Plan, start: Cursor) -> Iterator[Batch]:
        spec = replace(self._spec, plan=plan)
        places = micro_batches_of_rank(spec, start, self._rank, self._world_size)
        for position in places:
            key = self._key(position)
            if key not in self._kept:
                self._keep(plan, start, position)
            yield self._at(position, self._kept[key])

    def _key(self, position: MicroBatchId) -> tuple[Split, Size]:
        """Return the common properties of micro-batches that can replace each other."""
        plan = self._spec.plan
        bucket = plan.bucket_of(position)
        size = size_in(self._spec.transform, position.split, position.epoch, bucket)
        return position.split, size

    def _keep(self, plan: Plan, start: Cursor, first: MicroBatchId) -> None:
        """Make micro-batches of a place's size, and, before the first, of all sizes that come soon."""
        spec = replace(self._spec, plan=plan)
        places_by_key = {self._key(first): [first]}
        places = micro_batches_of_rank(spec, start, self._rank, self._world_size)
        for _, position in zip(range(_NUM_LOOKED_AT), places, strict=False):
            key = self._key(position)
            if key in self._kept or position.split != first.split:
                continue
            of_key = places_by_key.setdefault(key, [])
            if position not in of_key and len(of_key) < NUM_KEPT:
                of_key.append(position)
        for key, of_key in places_by_key.items():
            self._kept[key] = self._made(of_key)

    def _made(self, places: list[MicroBatchId]) -> list[Batch]:
        """Make micro-batches as a pool does, and bring them onto the device."""
        if self._maker is None:
            self._maker = MicroBatchMaker(self._spec)
        maker = self._maker
        decode = None
        if self._spec.transform.decode == "device":
            decode = Decoding(self._spec, self._device)
        return list(
            on_device(
                (maker.batch(position) for position in places),
                self._device,
                self._spec.plan.micro_batch_seed,
                ring=False,
                decode=decode,
            )
        )

    def _at(self, position: MicroBatchId, kept: list[Batch]) -> Batch:
        """Return one of the batches, in turn, at another place."""
        batch = kept[self._num_handed_out % len(kept)]
        self._num_handed_out += 1
        fields = {name: _own(value) for name, value in batch.fields.items()}
        weight = batch.weight
        index = batch.index
        if position.split == "val":
            # each sample is counted once, and the batch may be one with padding
            index = self._spec.plan.indices(position)
            counts = torch.from_numpy(index != PADDING)
            weight = counts.to(self._device, weight.dtype)
        return replace(
            batch,
            position=position,
            seed=self._spec.plan.micro_batch_seed(position),
            fields=fields,
            weight=weight,
            index=index,
            num_bad=0,
            read_s=0.0,
            work_s=0.0,
            outage_s=0.0,
        )


def _own(value: Any) -> Any:
    """A copy of floats, which a loop may normalize in place: after some rounds they would not be finite."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.clone()
    return value
