"""Makes micro-batches of a recorded stream again: the same calls as in the run, in this process, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from raypipe.config import AugmentConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.prefetcher import Batch, on_device
from raypipe.device.stage import DeviceStage
from raypipe.history.recorded_stream import RecordedStream
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.decoding import Decoding
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch
from raypipe.transform.process_state import process_kept

_CPU = torch.device("cpu")


class StepMaker:
    """Makes micro-batches of a recorded stream again, on the CPU.

    Attributes:
        spec: the stream, for which a single step may have any share of bad samples.
        maker: makes what the CPU transform gave.
        augment: the augmentation, with the normalization that holds; None = none.
    """

    def __init__(self, stream: RecordedStream) -> None:
        self._stream = stream
        spec = stream.spec
        if spec.transform.max_bad_fraction > 0:
            transform = replace(spec.transform, max_bad_fraction=1.0)
            spec = replace(spec, transform=transform)
        self.spec: StreamSpec = spec
        self.maker = MicroBatchMaker(spec)
        name = stream.record["dtype"]
        dtype = getattr(torch, name) if name else None
        self._device = DeviceStage(
            stream.augment, _CPU, dtype, spec.device_input, tells=False
        )
        self._decoding = None
        if spec.transform.decode == "device":
            self._decoding = Decoding(spec, _CPU)

    @property
    def augment(self) -> AugmentConfig | None:
        """See the class."""
        return self._device.config

    @property
    def device(self) -> DeviceAugment | None:
        """The augmentation, built; None = none."""
        return self._device.augment

    def on_cpu(self, place: MicroBatchId) -> MicroBatch:
        """Make a micro-batch; samples that the run could not use are left out as they were then."""
        recorded = self._stream.bad_samples(place)
        excluded = {index: record.error for index, record in recorded.items()}
        with process_kept(self.maker.draws_globally):
            batch, _ = self.maker.make(place, excluded=excluded)
        return batch

    def batch(self, place: MicroBatchId) -> Batch:
        """Make a micro-batch as the model saw it."""
        return self.finish(self.arrive(self.on_cpu(place)))

    def arrive(self, host: MicroBatch) -> Batch:
        """Bring a micro-batch onto the device, before any work there."""
        plan = self.spec.plan
        (batch,) = on_device(
            [host], _CPU, plan.micro_batch_seed, decode=self._decoding, ring=False
        )
        if plan.sources:
            batch = replace(batch, source=plan.source_of(batch.index))
        return batch

    def finish(self, batch: Batch) -> Batch:
        """Augment, mix and normalize a batch as the device stage did."""
        return self._device(batch, self.strength_at(batch.position))

    def strength_at(self, place: MicroBatchId) -> float:
        """Return the strength of the augmentation on the device."""
        augment = self.augment
        if augment is None:
            return 0.0
        plan = self.spec.plan
        return augment.strength_at(plan.progress(plan.global_step(place)))
