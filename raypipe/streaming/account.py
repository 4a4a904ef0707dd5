"""Measurements of one rank: where its time goes, and the records, metrics and advice made from them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from raypipe import __version__
from raypipe.config import AugmentConfig
from raypipe.metrics.prometheus import STAGES, TrainerMetrics
from raypipe.metrics.records import Folder
from raypipe.metrics.timing import (
    Situation,
    StageClock,
    StageTimes,
    diagnose,
    has_drained,
    mark,
)
from raypipe.metrics.utilization import Samples, Utilization
from raypipe.plan.places import Cursor, Split, TrainStep
from raypipe.rayext.cluster_state import spilled_bytes
from raypipe.streaming.chronicle import Chronicle
from raypipe.streaming.spec import StreamSpec


class Account:
    """Account of one rank's loader, which reports each micro-batch by `asked`, `arrived`, `handed_out`. It has
    no reference to the loader.

    Args:
        augment: the loader's augmentation; None = none.
        folder: where rank 0 records the run; None = nowhere.

    Attributes:
        clocks: clock of each split; the thread that copies adds to them.
        first_batch_s: seconds from the start of the stream to its first batch; 0 before it.
        num_bad: bad samples that this rank has seen.
        exported: metrics of this rank.
        chronicle: console lines and records of rank 0.
        actors: transform actors that the pool has at most; 0 = trainers make the stream themselves.
        readers: number of readers at one time; 0 = the actors read the store.
        is_run: whether `raypipe train` trains, and no loop of the user's own.
    """

    def __init__(
        self,
        spec: StreamSpec,
        device: torch.device,
        rank: int,
        world_size: int,
        augment: AugmentConfig | None,
        folder: Folder | None,
    ) -> None:
        self.clocks: dict[Split, StageClock] = {
            "train": StageClock(),
            "val": StageClock(),
        }
        self.first_batch_s = 0.0
        self.num_bad = 0
        info = {
            "version": __version__,
            "plan": spec.plan.fingerprint,
            "workers": str(world_size),
        }
        self._utilization = Utilization(device)
        self._in_training = Samples()  # those taken while it trained
        self.exported = TrainerMetrics(spec.run, rank, self._utilization.sample, **info)
        self.chronicle = Chronicle(world_size, rank, folder)
        self.actors = self.readers = 0
        self.is_run = False
        self._plan = spec.plan
        self._device = device
        self._world_size = world_size
        self._augment = augment
        # Where the compute of the micro-batch that was handed out last began, and its split.
        self._computing: tuple[Split, Any] | None = None
        self.begin_interval()

    def begin(self, cursor: Cursor) -> None:
        """Begin the stream at a place, possibly again."""
        self._start_step = self._plan.global_step(cursor)
        self._created = time.perf_counter()
        self.first_batch_s = 0.0
        self.exported.begin()

    def times(self, split: Split) -> StageTimes:
        """See `Loader.times`."""
        return self.clocks[split].times()

    def asked(self) -> Any:
        """The next micro-batch is asked for, so the compute of the last one has ended: the mark of this moment."""
        now = mark(self._device)
        if self._computing:
            split, since = self._computing
            self.clocks[split].add("compute", since, now)
            self._computing = None
        return now

    def arrived(self, split: Split, asked: Any) -> Any:
        """A micro-batch that was asked for at a mark is there: the mark of this moment."""
        drained = has_drained(asked)
        now = mark(self._device)
        if self.first_batch_s:
            self.clocks[split].add("wait", asked, now)
            self.clocks[split].count(micro_batches=1, drained=drained)
        else:
            self.first_batch_s = time.perf_counter() - self._created
            self.begin_interval()  # the start of the run is reported apart
        return now

    def decoded(self, split: Split, began: Any, ended: Any) -> None:
        """A micro-batch was decoded on the device, between two marks. Called by the thread that copies."""
        self.clocks[split].add("decode", began, ended)

    def handed_out(self, split: Split, arrived: Any, **amounts: Any) -> None:
        """A micro-batch that arrived at a mark has been augmented, and its compute begins.

        Args:
            amounts: its images, and the seconds that an actor spent on it.
        """
        self.clocks[split].count(**amounts)
        now = mark(self._device)
        self.clocks[split].add("augment", arrived, now)
        self._computing = split, now

    @contextlib.contextmanager
    def saving(self, whom: Callable[[], str]) -> Iterator[None]:
        """Context manager: count its time as waiting for a checkpoint, not as compute; rank 0 reports a long
        wait.

        Args:
            whom: name of the cause of the wait.
        """
        computing = self._computing
        begun = self.asked()
        with self.chronicle.waiting("the checkpoint", whom):
            yield
        ended = mark(self._device)
        self.clocks["train"].add("checkpoint", begun, ended)
        if computing:
            self._computing = computing[0], ended

    def strength(self, done: TrainStep) -> float:
        """The strength of the augmentation after so many training steps."""
        if self._augment:
            return self._augment.strength_at(self._plan.progress(done))
        return 0.0

    def export(self, cursor: Cursor) -> None:
        """Export where the rank stands, after the step of a cursor."""
        step = self._plan.global_step(cursor)
        self.exported.record(
            {split: self.times(split) for split in self.clocks},
            first_batch_s=self.first_batch_s,
            steps=step - self._start_step,
            trainer_step=step,
            trainer_epoch=cursor.epoch,
            trainer_augment_strength=self.strength(step),
        )

    def begin_interval(self) -> None:
        """An interval of the training begins."""
        self._before = self.times("train")
        self._since = time.perf_counter()
        self._samples_before = self._utilization.samples

    @property
    def interval_age_s(self) -> float:
        """Seconds since an interval of the training began."""
        return time.perf_counter() - self._since

    def interval(
        self, cursor: Cursor, shows: bool = False, **learnt: float
    ) -> dict[str, float]:
        """Record the training up to a cursor, since the last call or the epoch's begin.

        Args:
            shows: also print it.
            learnt: loss, lr, …

        Returns:
            Its images, on all ranks; its seconds, `train_s`; and those that rank 0 waited for data, `wait_s`.
        """
        times = self.times("train") - self._before
        seconds = self.interval_age_s
        plan = self._plan
        samples = self._utilization.samples - self._samples_before
        self._in_training += samples
        self.begin_interval()
        images = times.images * self._world_size
        wait = min(1.0, times.wait_s / seconds)
        if samples.mean is None:
            used = self._utilization.latest
        else:
            used = samples.mean
        of_gpu = {} if used is None else {"gpu_utilization": used}
        last = TrainStep(plan.global_step(cursor) - 1)
        line = (
            f"epoch {cursor.epoch + 1}/{plan.config.epochs}  step {cursor.step}/{plan.steps_per_epoch}  "
            f"loss {learnt.get('loss', 0.0):.4f}  {images / seconds:,.0f} images/s  waiting for data {wait:.0%}"
            + ("" if used is None else f"  GPU {used:.0%}")
        )
        self.chronicle.record(
            "train",
            line if shows else "",
            epoch=cursor.epoch,
            **learnt,
            images_per_s=images / seconds,
            wait_fraction=wait,
            **of_gpu,
            **{
                f"{stage}_s": getattr(times, f"{stage}_s")
                for stage in STAGES
                if stage != "wait"
            },
            **({"strength": self.strength(last)} if self._augment else {}),
            num_bad=self.num_bad,
        )
        return {"images": images, "train_s": seconds, "wait_s": times.wait_s}

    def diagnose(self, epoch: int) -> None:
        """Record at the end of an epoch where this rank's time went, and tell it at the end of the last."""
        times = self.times("train")
        used = self._in_training.mean
        ready = self.chronicle.ready()
        # Asked of all nodes, so only where it may say why finished blocks come late.
        spilled = spilled_bytes() if ready else 0
        text = " ".join(
            diagnose(
                times,
                Situation(
                    world_size=self._world_size,
                    actors=self.actors,
                    device=self._device.type,
                    readers=self.readers,
                    ready=ready,
                    spilled_bytes=spilled,
                    is_run=self.is_run,
                    gpu_utilization=used,
                ),
            )
        )
        is_last = epoch + 1 == self._plan.config.epochs
        of_gpu = {} if used is None else {"gpu_utilization": used}
        self.chronicle.record(
            "diagnosis", text if is_last else "", **asdict(times), **of_gpu, text=text
        )

    def tell_notice(self, text: str) -> None:
        """A node of the trainers is about to go."""
        self.chronicle.record("fault", f"fault: {text}", text=text)
        self.exported.add({"stream_faults_total": 1}, kind="notice")
