"""One rank's share of the stream: rows → micro-batches on the device, augmented, in segments and steps.

It holds the stream to the plan: every micro-batch is the one that the plan has at its place, or the run ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from raypipe.config import AugmentConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.device_decode import DeviceDecoder
from raypipe.device.prefetcher import Batch, decoded_on_device, on_device
from raypipe.errors import RaypipeError, SampleError
from raypipe.logs import configure_logs, log_place
from raypipe.metrics.prometheus import TrainerMetrics
from raypipe.metrics.timing import StageClock, StageTimes, mark
from raypipe.plan.cursor import Cursor
from raypipe.plan.schedule import MicroBatchId, Segment, Split
from raypipe.stores.base import name_of, title_of
from raypipe.streaming.maker import BadSampleBudget, record_bad
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.supervisor import follow
from raypipe.transform.batch import HostBatch


class Feed:
    """This rank's share of the stream. Iterate it once, over segments.

    Attributes:
        plan: the run's plan.
        rank, world_size: of this process.
        cursor: the place after the last step that was consumed whole; put it in the checkpoint.
        first_batch_s: seconds from the building of the feed to its first batch; 0 before it.
        num_bad, num_fallback: bad samples seen by this rank; and those that the host had to decode for its device.
        exported: what this rank exports as metrics; a training loop may add what it has learnt.
    """

    def __init__(
        self,
        spec: StreamSpec,
        source: Iterator[HostBatch],
        start: Cursor,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        *,
        augment: AugmentConfig | None = None,
        dtype: torch.dtype = torch.float32,
        depth: int = 2,
        supervisor: Any = None,
    ) -> None:
        configure_logs(spec.log, run=spec.run, rank=rank)
        self.exported = TrainerMetrics(spec.run, rank)
        self.plan = spec.plan
        self.device = device or torch.device("cpu")
        targets = bool(spec.transform.target_columns)
        self.augment = DeviceAugment(augment, self.device, dtype, targets) if augment else None
        self.rank, self.world_size = rank, world_size
        self.cursor = start
        self.first_batch_s = 0.0
        self.num_bad = self.num_fallback = 0
        self._spec, self._start, self._supervisor = spec, start, supervisor
        self._created = time.perf_counter()
        self._clocks: dict[Split, StageClock] = {"train": StageClock(), "val": StageClock()}
        self._counts: dict[Split, StageTimes] = {"train": StageTimes(), "val": StageTimes()}
        # Where the compute of the micro-batch that was handed out last began, and its split.
        self._computing: tuple[Split, Any] | None = None
        self._budget = BadSampleBudget(spec.transform.max_bad_fraction, spec.transform.bad_grace)
        self._source: Any = source
        seed_of = self.plan.micro_batch_seed
        self._batches: Any  # an iterator of Batch
        # Ray Data would start Ray anew, and wait for ever, to end an execution after Ray has gone at exit. Of
        # these hooks the last that was registered runs first, and Ray's was before.
        atexit.register(_close, weakref.ref(self))
        if spec.transform.decode == "gpu":
            decoder = DeviceDecoder(spec.transform.size, self.device, spec.transform.exif)
            decoded = functools.partial(self._clocks["train"].add, "decode")
            self._batches = decoded_on_device(self._source, decoder, seed_of, depth, decoded)
        else:
            copied = functools.partial(self._clocks["train"].add, "transfer")
            self._batches = on_device(self._source, self.device, seed_of, depth, on_copied=copied)

    def close(self) -> None:
        """End the stream where it stands. A feed that is iterated to its end, or is dropped, needs no closing."""
        for generator in (self._batches, self._source):
            with contextlib.suppress(ValueError):  # a thread that did not end in time is still in it
                generator.close()

    def __iter__(self) -> Iterator[SegmentFeed]:
        for segment in self.plan.segments(self._start):
            steps = self._steps(segment)
            yield SegmentFeed(**vars(segment), steps=steps)
            for _ in steps:  # what the consumer left over
                pass
            self._export()
            if segment.split == "val":
                self.cursor = Cursor(segment.epoch + 1, 0, self.plan.fingerprint)
        # The stream's own end must be seen, or its execution would be left running.
        assert next(self._batches, None) is None, "the stream is longer than the plan"

    def _steps(self, segment: Segment) -> Iterator[Step]:
        for number in range(segment.first_step, segment.num_steps):
            step = Step(segment.split, segment.epoch, number, self)
            yield step
            for _ in step:
                pass

    def times(self, split: Split = "train") -> StageTimes:
        """What this rank has measured in segments of one split, the wait for the very first batch left out.

        Transfers and decoding are counted with "train". On CUDA the newest micro-batches may be missing.
        """
        seconds: dict[str, Any] = {f"{stage}_s": total for stage, total in self._clocks[split].totals().items()}
        return replace(self._counts[split], **seconds)

    def _export(self) -> None:
        epoch, step = self.cursor.epoch, self.cursor.step
        self.exported.record(
            {split: self.times(split) for split in self._counts},
            first_batch_s=self.first_batch_s,
            steps=self.global_step - self._start.epoch * self.plan.steps_per_epoch - self._start.step,
            trainer_step=self.global_step,
            trainer_epoch=epoch,
            trainer_augment_strength=self.strength(epoch, step),
        )

    def follow(self, tell: Callable[[str, str], None]) -> Callable[[], None]:
        """Have what happens to the stream told by kind and text, see `supervisor.follow`.

        A "fault" went wrong and was mended; "scale" is a new size of the pool, and why.
        """
        return follow(self._supervisor, tell)

    def strength(self, epoch: int, step: int) -> float:
        """The strength of the augmentation at a training step."""
        if self.augment is None:
            return 0.0
        return self.augment.config.strength.at(self.plan.progress(epoch, step))

    @property
    def global_step(self) -> int:
        """Training steps that are done, through all epochs, as the cursor has it."""
        return self.cursor.epoch * self.plan.steps_per_epoch + self.cursor.step

    def _next(self, expected: MicroBatchId) -> Batch:
        asked = mark(self.device)
        if self._computing:
            split, since = self._computing
            self._clocks[split].add("compute", since, asked)
            self._computing = None
        batch = next(self._batches, None)
        ready = mark(self.device)
        if self.first_batch_s == 0.0:
            self.first_batch_s = time.perf_counter() - self._created
        else:
            self._clocks[expected.split].add("wait", asked, ready)
        if batch is None or batch.at != expected:
            got = "ended" if batch is None else f"brought {batch.at}"
            raise RaypipeError(
                f"rank {self.rank} expected {expected}, the stream {got}: please report this as a bug"
            )
        split = expected.split
        log_place(split=split, epoch=expected.epoch, step=self.plan.global_step(expected))
        if self.exported.is_due():
            self._export()
        self.num_bad += batch.num_bad
        self.num_fallback += batch.num_fallback
        self._judge(batch)
        num_images = int((batch.index >= 0).sum())
        self._counts[split] += StageTimes(images=num_images, read_s=batch.read_s, work_s=batch.work_s)
        if self.augment is not None:
            batch = self._augmented(batch, self.augment)
        augmented = mark(self.device)
        self._clocks[split].add("augment", ready, augmented)
        self._computing = (split, augmented)
        return batch

    def _judge(self, batch: Batch) -> None:
        """Bad samples that only the device's decoder has found; too late for substitutes, they have weight 0."""
        store = self._spec.stores[batch.at.split]
        bad = []
        for row, error in batch.failed.items():
            index = int(batch.index[row])
            where = {"store": store.address, "index": index, "name": name_of(store, index)}
            bad.append({**where, "substitute": None, "error": error})
        if bad:
            record_bad(self._spec.quarantine, batch.at, bad, by="device")
            if self._spec.transform.on_bad_sample == "raise":
                title = title_of(store.address, bad[0]["index"], bad[0]["name"])
                raise SampleError(f"{title}: {bad[0]['error']}")
        self._budget.spend(bad, len(batch.index))

    def _augmented(self, batch: Batch, augment: DeviceAugment) -> Batch:
        if batch.at.split != "train":
            return replace(batch, image=augment.normalize(batch.image))
        counts = batch.index >= 0
        counts[list(batch.failed)] = False
        image, mixed = augment(
            batch.image,
            batch.target,
            counts,
            seed=batch.seed,
            strength=self.strength(batch.at.epoch, batch.at.step),
        )
        return replace(batch, image=image, mixed=mixed)


def _close(reference: weakref.ref[Feed]) -> None:
    feed = reference()
    if feed is not None:
        feed.close()


@dataclass(frozen=True)
class SegmentFeed(Segment):
    """This rank's share of one segment. Iterates over its steps, and goes on where it was left."""

    steps: Iterator[Step] = field(repr=False)

    def __iter__(self) -> Iterator[Step]:
        return self.steps


class Step:
    """This rank's M/W micro-batches of one step, in order; an iterable that delivers each once.

    Attributes:
        split, epoch, number: the step's place.
    """

    def __init__(self, split: Split, epoch: int, number: int, feed: Feed) -> None:
        self.split, self.epoch, self.number = split, epoch, number
        self._micros = range(feed.rank, feed.plan.config.per_step, feed.world_size)
        self._batches = self._iterate(feed)

    def __len__(self) -> int:
        return len(self._micros)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches

    def _iterate(self, feed: Feed) -> Iterator[Batch]:
        for micro in self._micros:
            yield feed._next(MicroBatchId(self.split, self.epoch, self.number, micro))
        if self.split == "train":
            feed.cursor = Cursor(self.epoch, self.number + 1, feed.plan.fingerprint)
