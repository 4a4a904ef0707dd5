"""Makes single micro-batches of a stream: the same calls as in a run, in this process, on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch

from raypipe.config import AugmentConfig
from raypipe.device.prefetcher import Batch, facts_of, on_device
from raypipe.device.stage import DeviceStage
from raypipe.history.recorded_stream import RecordedStream
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.bad_samples import BadSample
from raypipe.streaming.decoding import Decoding
from raypipe.streaming.maker import NONE_EXCLUDED, MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch
from raypipe.transform.process_state import process_kept

_CPU = torch.device("cpu")


class StepMaker:
    """Makes micro-batches of a stream.

    Args:
        spec: the stream.
        augment: the augmentation on the device; None = none.
        dtype: dtype of the images that the device makes, by its name; empty = the pipeline's own, or float32.

    Attributes:
        spec: the stream, for which a single step may have any share of bad samples.
        maker: makes what the CPU transform gave.
        decoding: decodes where the device does; None = the CPU transform does.
        stage: the device stage.
    """

    def __init__(
        self,
        spec: StreamSpec,
        augment: AugmentConfig | None,
        dtype: str = "",
    ) -> None:
        if spec.transform.max_bad_fraction > 0:
            transform = replace(spec.transform, max_bad_fraction=1.0)
            spec = replace(spec, transform=transform)
        self.spec = spec
        self.maker = MicroBatchMaker(spec)
        is_encoded = spec.transform.decode == "device"
        self.decoding = Decoding(spec, _CPU) if is_encoded else None
        of_torch = getattr(torch, dtype) if dtype else None
        self.stage = DeviceStage(
            augment, _CPU, of_torch, spec.device_input, tells=False
        )


class Remade:
    """A micro-batch that is made as far as it is asked for.

    Args:
        excluded: its samples that cannot be used: index → why.
        workers: number of ranks that share its step.

    Attributes:
        maker, place: its maker, and its place in the run.
    """

    def __init__(
        self,
        maker: StepMaker,
        place: MicroBatchId,
        excluded: Mapping[int, str] = NONE_EXCLUDED,
        workers: int = 1,
    ) -> None:
        self.maker = maker
        self.place = place
        self._excluded = excluded
        self._workers = workers

    @property
    def host(self) -> MicroBatch:
        """The batch from the CPU transform, without the samples that the run could not use."""
        return self._made[0]

    @property
    def bad(self) -> list[BadSample]:
        """The samples that could not be used."""
        return self._made[1]

    @functools.cached_property
    def _made(self) -> tuple[MicroBatch, list[BadSample]]:
        maker = self.maker.maker
        with process_kept(maker.draws_globally):
            return maker.make(self.place, excluded=self._excluded)

    @functools.cached_property
    def arrived(self) -> Batch:
        """The batch on the device, before any work there."""
        plan = self.maker.spec.plan
        (batch,) = on_device(
            [self.host],
            _CPU,
            plan.micro_batch_seed,
            decode=self.maker.decoding,
            ring=False,
            facts_of=functools.partial(facts_of, plan, self._workers),
        )
        return batch

    @functools.cached_property
    def finished(self) -> Batch:
        """The batch as the model saw it: augmented, mixed and normalized by the device stage."""
        stage = self.maker.stage
        plan = self.maker.spec.plan
        progress = plan.progress(plan.global_step(self.place))
        strength = stage.config.strength_at(progress) if stage.config else 0.0
        return stage(self.arrived, strength)


def remade_of(stream: RecordedStream, place: MicroBatchId, workers: int) -> Remade:
    """Return a micro-batch of a recorded stream of W ranks, without the samples that the run could not use."""
    bad = {sample.index: sample.error for sample in stream.bad_samples(place)}
    return Remade(_maker_of(stream), place, bad, workers)


@functools.lru_cache(maxsize=4)
def _maker_of(stream: RecordedStream) -> StepMaker:
    return StepMaker(stream.spec, stream.augment, stream.record.dtype or "")


def crops_of(batch: Batch) -> dict[str, torch.Tensor]:
    """The images (B, C, H, W) of a batch's views by name, `NAME 0`, `NAME 1`, … where a view has several crops."""
    crops = {}
    for name, images in batch.views.items():
        if images.ndim == 4:
            crops[name] = images
        else:
            for number, crop in enumerate(images.unbind(1)):
                crops[f"{name} {number}"] = crop
    return crops
