"""Metrics of one rank's loader: its observers, and the records and advice that are made of their measurements."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from raypipe import __version__
from raypipe.config import AugmentConfig
from raypipe.device.prefetcher import Batch
from raypipe.metrics.observer import Cause, Observer
from raypipe.metrics.prometheus import STAGES, TrainerMetrics
from raypipe.metrics.records import RunFolder
from raypipe.metrics.timing import Situation, StageClock, StageTimes, diagnose
from raypipe.plan.places import Cursor, MicroBatchId, TrainStep
from raypipe.plan.schedule import Plan
from raypipe.rayext.cluster_state import spilled_bytes
from raypipe.streaming.loop_progress import Progress
from raypipe.streaming.rank_trace import RankTrace
from raypipe.streaming.run_log import RunLog

_INTERVAL_S = 10.0


class LoaderMetrics:
    """Metrics of one rank, to whose observers its loader tells each event. It has no reference to the loader.

    Args:
        run: name of the run.
        plan: the run's plan.
        device: the device that trains.
        rank, world_size: number of this rank, and W.
        augment: the loader's augmentation; None = none.
        folder: where rank 0 records the run; None = nowhere.

    Attributes:
        observers: see `raypipe.metrics.observer`; a loop may append its own.
        clock: where the time goes.
        prometheus: metrics that Ray exports.
        run_log: console lines and records of rank 0.
        num_bad: bad samples that this rank has seen.
        interval_s: seconds between two records of the training; infinity = the loop makes them, by `interval`
            and `diagnose`.
        actors: transform actors that the pool has at most; 0 = trainers make the stream themselves.
        readers: number of readers at one time; 0 = the actors read the store.
        is_run: whether `raypipe train` trains, and no loop of the user's own.
    """

    def __init__(
        self,
        run: str,
        plan: Plan,
        device: torch.device,
        rank: int,
        world_size: int,
        augment: AugmentConfig | None,
        folder: RunFolder | None,
    ) -> None:
        labels = {
            "version": __version__,
            "plan": plan.fingerprint,
            "workers": str(world_size),
        }
        self.clock = StageClock(device)
        self.prometheus = TrainerMetrics(run, rank, self.clock.sample, **labels)
        self.run_log = RunLog(world_size, rank, folder)
        self.observers: list[Observer] = [self.clock, self.prometheus, self.run_log]
        self.num_bad = 0
        self.interval_s = _INTERVAL_S
        self.actors = 0
        self.readers = 0
        self.is_run = False
        self._plan = plan
        self._saved_at = time.perf_counter()
        self._device = device
        self._world_size = world_size
        self._augment = augment
        self._is_step_due = False  # a step was handed out, and is not recorded yet
        self.begin_interval()

    def trace(self, address: str, seconds: float, run: str, rank: int) -> None:
        """Trace the stream from now on, see `RankTrace`."""
        trace = RankTrace(address, seconds, rank, self._device, run)
        self.observers.append(trace)
        self.clock.on_stage = trace.on_stage

    def tell(self, event: str, *values: Any) -> None:
        """Tell all observers of an event, by the name of its method."""
        for observer in self.observers:
            getattr(observer, event)(*values)

    def record(self, kind: str, line: str = "", **values: Any) -> None:
        """Record values of the loop at its step; the kind "val" is a validation's.

        Args:
            line: a line of progress to print; empty = none.
        """
        self.tell("recorded", kind, line, values)

    def begin(self, progress: Progress) -> None:
        """Begin the stream where a loop stands, possibly again."""
        self._progress = progress
        self._start_step = self._plan.global_step(progress.start)
        self._diagnosed = progress.start.epoch - 1
        self._is_step_due = False
        self.clock.begin()
        self.move()

    def move(self) -> None:
        """The loop has gone on."""
        self.run_log.step = self._plan.global_step(self._progress.cursor)

    @contextlib.contextmanager
    def waiting(self, position: MicroBatchId, cause: Cause) -> Iterator[None]:
        """Context manager: the loop waits for a batch.

        Args:
            cause: names the cause of the wait.
        """
        is_first = not self.clock.first_batch_s
        name = "the first batch" if is_first else str(position)
        self.tell("asked", position.split, name, cause)
        with self._until("arrived", position.split):
            yield
        if is_first:  # the start of the run is reported apart
            self.begin_interval()

    @contextlib.contextmanager
    def saving(self, cause: Cause) -> Iterator[None]:
        """Context manager: count its time as waiting for a checkpoint, not as compute; rank 0 reports a long
        wait.

        Args:
            cause: names the cause of the wait.
        """
        self._saved_at = time.perf_counter()
        self.tell("saving", cause)
        with self._until("saved"):
            yield

    @contextlib.contextmanager
    def _until(self, *event: Any) -> Iterator[None]:
        """Context manager: tell an event at its end, or that the wait has failed."""
        end: tuple[Any, ...] = ("failed",)
        try:
            yield
            end = event
        finally:
            self.tell(*end)

    @property
    def checkpoint_age_s(self) -> float:
        """Seconds since the loop began to make its last checkpoint, or since its start."""
        return time.perf_counter() - self._saved_at

    def strength(self, done: TrainStep) -> float:
        """The strength of the augmentation after so many training steps."""
        if self._augment:
            return self._augment.strength_at(self._plan.progress(done))
        return 0.0

    def export(self, at_once: bool = False) -> None:
        """Export where the rank stands, once a second or at once."""
        if not (at_once or self.prometheus.is_due()):
            return
        cursor = self._progress.cursor
        step = self._plan.global_step(cursor)
        self.prometheus.record(
            {"train": self.clock.times("train"), "val": self.clock.times("val")},
            first_batch_s=self.clock.first_batch_s,
            steps=step - self._start_step,
            trainer_step=step,
            trainer_epoch=cursor.epoch,
            trainer_augment_strength=self.strength(step),
        )

    def begin_interval(self) -> None:
        """An interval of the training begins."""
        self._before = self.clock.times("train")
        self._since = time.perf_counter()

    def begin_batch(self, place: MicroBatchId) -> None:
        """A batch is asked for; one of a training that comes after something else begins an interval."""
        self.settle()
        last = self._progress.last
        if place.split == "train" and not (last and last.split == "train"):
            self.begin_interval()

    def end_batch(self, batch: Batch) -> None:
        """The batch was handed out, and its compute begins."""
        self.move()
        self._is_step_due = batch.position.split == "train" and batch.ends_step

    def settle(self) -> None:
        """Record the training up to the batch that was handed out last, if due: its compute has ended."""
        is_step_due = self._is_step_due
        self._is_step_due = False
        is_late = time.perf_counter() - self._since >= self.interval_s
        is_due = is_late or self._progress.ended_split
        if is_step_due and is_due and math.isfinite(self.interval_s):
            self.interval()

    def end_epoch(self, epoch: int) -> None:
        """Diagnose an epoch at its end, once, unless the loop does."""
        if math.isfinite(self.interval_s) and epoch > self._diagnosed:
            self._diagnosed = epoch
            self.diagnose(epoch)

    def interval(self, shows: bool = False, **learned: float) -> dict[str, float]:
        """Record the training since the last call or the epoch's begin.

        Args:
            shows: also print it.
            learned: loss, lr, …

        Returns:
            Its images, on all ranks; its seconds, `train_s`; and those that rank 0 waited for data, `wait_s`.
        """
        cursor = self._progress.cursor
        times = self.clock.times("train") - self._before
        seconds = time.perf_counter() - self._since
        self.begin_interval()
        used = times.gpu_utilization
        if used is None:
            used = self.clock.gpu_utilization
        images = times.images * self._world_size
        values = {
            "epoch": cursor.epoch,
            **learned,
            "images_per_s": images / seconds,
            "wait_fraction": min(1.0, times.wait_s / seconds),
            **_utilized(used),
            **{f"{stage}_s": getattr(times, f"{stage}_s") for stage in _BESIDE_WAIT},
        }
        if self._augment:
            last_step = TrainStep(self._plan.global_step(cursor) - 1)
            values["strength"] = self.strength(last_step)
        values["num_bad"] = self.num_bad
        values |= _remembered(times, self.clock.times("val"))
        line = self._line(cursor, values) if shows else ""
        self.tell("recorded", "train", line, values)
        return {"images": images, "train_s": seconds, "wait_s": times.wait_s}

    def _line(self, cursor: Cursor, values: Mapping[str, float]) -> str:
        """The line of an interval's values."""
        plan = self._plan
        parts = [
            f"epoch {cursor.epoch + 1}/{plan.config.epochs}",
            f"step {cursor.step}/{plan.steps_per_epoch}",
            f"loss {values.get('loss', 0.0):.4f}",
            f"{values['images_per_s']:,.0f} images/s",
            f"waiting for data {values['wait_fraction']:.0%}",
        ]
        if "gpu_utilization" in values:
            parts.append(f"GPU {values['gpu_utilization']:.0%}")
        return "  ".join(parts)

    def diagnose(self, epoch: int) -> None:
        """Record at the end of an epoch where this rank's time went, and tell it at the end of the last."""
        times = self.clock.times("train")
        ready = self.run_log.ready()
        situation = Situation(
            world_size=self._world_size,
            actors=self.actors,
            device=self._device.type,
            readers=self.readers,
            ready=ready,
            # Asked of all nodes, so only where it may say why finished blocks come late.
            spilled_bytes=spilled_bytes() if ready else 0,
            is_run=self.is_run,
        )
        remembered = _remembered(times, self.clock.times("val"))
        sentences = [*diagnose(times, situation), *_in_words(remembered)]
        text = " ".join(filter(None, sentences))
        is_last = epoch + 1 == self._plan.config.epochs
        values = {**asdict(times), **_utilized(times.gpu_utilization), "text": text}
        values |= {f"{name}_share": share for name, share in remembered.items()}
        self.tell("recorded", "diagnosis", text if is_last else "", values)

    def tell_notice(self, text: str) -> None:
        """A node of the trainers is about to go."""
        self.tell("recorded", "fault", f"fault: {text}", {"text": text})


_BESIDE_WAIT = [stage for stage in STAGES if stage != "wait"]


def _remembered(train: StageTimes, val: StageTimes) -> dict[str, float]:
    """The shares of images that were made before, as values to record; none where there were none."""
    shares = {
        "remembered": train.remembered_fraction,
        "val_remembered": val.remembered_fraction,
    }
    return {name: share for name, share in shares.items() if share}


def _in_words(remembered: Mapping[str, float]) -> list[str]:
    """A sentence about images that were made before; none where there were none."""
    names = {"remembered": "training", "val_remembered": "validation"}
    shares = [f"{share:.0%} in {names[name]}" for name, share in remembered.items()]
    if not shares:
        return []
    return [f"Images that were made once, and remembered: {', '.join(shares)}."]


def _utilized(share: float | None) -> dict[str, float]:
    """The GPU's utilization as a value to record; none where it is not known."""
    return {} if share is None else {"gpu_utilization": share}
