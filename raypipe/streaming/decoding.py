"""Decodes a rank's micro-batches on its device, for `transform.decode: device`, with the rules for bad samples.

Actors read only headers, so some bad samples show themselves here. The rank then makes that micro-batch again,
knowing it, as an actor would: with the plan's substitute, or during validation a row of weight 0, and with the
same record, budget and error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raypipe.device.decoders import DeviceDecoder
from raypipe.plan.places import Split
from raypipe.streaming.bad_samples import BadSample, BadSampleBudget, record_bad
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.encoded_map import DATA, MAP
from raypipe.transform.fields import IMAGE, MicroBatch, Ragged
from raypipe.transform.process_state import process_kept

OnDecoded = Callable[[Split, str, Any, Any], None]


def with_images(batch: MicroBatch, image: torch.Tensor, ready: Any) -> MicroBatch:
    """The micro-batch with images on a device, (B, C, H, W), instead of encoded ones; `ready` is behind them."""
    fields: dict[str, Any] = {IMAGE: image}
    for name, values in batch.fields.items():
        if name not in (DATA, MAP):
            fields[name] = values
    return replace(batch, fields=fields, ready=ready)


class Decoding:
    """Decodes encoded micro-batches of a stream.

    Args:
        on_decoded: called with a split, the stage "decode", and `metrics.mark`s around the work on a micro-batch.

    Attributes:
        decoder: the device's.
    """

    def __init__(
        self,
        spec: StreamSpec,
        device: torch.device,
        on_decoded: OnDecoded | None = None,
    ) -> None:
        self.decoder = DeviceDecoder(device, spec.transform.apply_exif)
        self._spec = spec
        self._on_decoded = on_decoded
        self._budget = BadSampleBudget(spec.transform.max_bad_fraction)

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """Decode a micro-batch.

        Returns:
            The micro-batch, maybe made again, with its images on the device instead of encoded ones.

        Raises:
            SampleError, BadSamplesError: a sample cannot be decoded, and the settings do not allow it.
        """
        bad = dict[int, str]()
        bad_of_batch: list[BadSample] | None = None
        while True:
            data = batch.fields[DATA]
            assert isinstance(data, Ragged)
            decoded = self.decoder(data, batch[MAP], batch.weight > 0)
            if self._on_decoded:
                split = batch.position.split
                self._on_decoded(split, "decode", decoded.began, decoded.ended)
            if not decoded.failed:
                break
            bad |= {
                int(batch.index[row]): reason for row, reason in decoded.failed.items()
            }
            with process_kept(self._maker.draws_globally):
                again, bad_of_batch = self._maker.make(batch.position, excluded=bad)
            batch = replace(
                again,
                read_s=batch.read_s,
                work_s=batch.work_s,
                outage_s=batch.outage_s,
            )
        if bad_of_batch is None:
            bad_of_batch = []
        else:  # its record replaces the actor's, and has that one's bad samples, too
            record_bad(self._spec.quarantine, batch.position, bad_of_batch)
        found_here = [sample for sample in bad_of_batch if sample.index in bad]
        self._budget.spend(found_here, len(batch.index))
        return with_images(batch, decoded.image, decoded.ready)

    def to_pixels(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch with its images in host memory, as a stream without `decode: device` has it."""
        decoded = self(batch)
        fields: dict[str, Any] = dict(decoded.fields)
        image = fields[IMAGE].permute(0, 2, 3, 1).cpu().numpy()
        fields[IMAGE] = np.ascontiguousarray(image)
        return replace(decoded, fields=fields, ready=None)

    @functools.cached_property
    def _maker(self) -> MicroBatchMaker:
        return MicroBatchMaker(self._spec)
