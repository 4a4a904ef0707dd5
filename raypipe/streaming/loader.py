"""One rank's loader: it takes the stream in the order of the plan, and knows where the run stands.

If a micro-batch is not the one that the plan expects, the run ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from raypipe import __version__
from raypipe.config import AugmentConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.mixing import check_mixable
from raypipe.device.prefetcher import Batch
from raypipe.errors import CursorError, RaypipeError
from raypipe.logs import STAGES, configure_logs, log_place
from raypipe.metrics.meter import Meter
from raypipe.metrics.prometheus import TrainerMetrics
from raypipe.metrics.run_log import Folder
from raypipe.metrics.timing import StageTimes, diagnose
from raypipe.plan.places import CURSOR_FILE, Cursor, MicroBatchId, Split
from raypipe.plan.schedule import Segment
from raypipe.rayext.trainer_notice import Notice
from raypipe.storage.files import write_text
from raypipe.storage.filesystem import join
from raypipe.streaming.arrival import Feed, augmented, judge, moved
from raypipe.streaming.bad_samples import BadSampleBudget
from raypipe.streaming.chronicle import Chronicle
from raypipe.streaming.digest import settings_of
from raypipe.streaming.epochs import Epoch, Pass
from raypipe.streaming.running import EXHAUSTED, Running
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.stateful import Stateful, latest_of_train, numbers_in, report, restore
from raypipe.transform.columns import SampleColumns
from raypipe.transform.views import makes_views

_logger = logging.getLogger(__name__)


_INTERVAL_S = 10.0
_Rest = tuple[Segment | None, Iterator[Batch]]


class Interval(NamedTuple):
    """A stretch of training: images of all ranks, seconds, and how many of these rank 0 waited for data."""

    images: int
    seconds: float
    wait_s: float


class Loader:
    """This rank's share of the stream: the rest of the run, once, in the order of the plan.

        for epoch in loader.epochs():
            for batch in epoch.train:
                ...                       # forward and backward of one micro-batch
                if batch.ends_step:
                    ...                   # optimizer.step(); from now on state_dict() counts this step
            for batch in epoch.val:
                ...

    `raypipe.loader` makes one. If a loop stops in the middle of an epoch's training or validation, the rest of it
    is skipped when the loop goes on to the next. The stream ends, with all its processes and threads, when the
    loop over the epochs is left in any way, when nothing holds the loader or its epochs, by `close`, and at exit.

    Attributes:
        plan: the run's plan.
        rank: this process's rank.
        world_size: W, the number of ranks.
        keep: batches that stay valid besides the newest.
        cursor: the place after the last step of which all batches were handed out.
        num_bad: bad samples that this rank has seen.
        num_fallback: samples that the host decoded for the device.
        jpeg_decoder: the library that decodes on the device, with its version; empty where actors decode all.
        exported: what this rank exports as metrics; a training loop may add its loss and the like.
        chronicle: what rank 0 tells and records.
        notice: when nodes of the trainers are about to go.
        interval_s: seconds between two records of the training; infinity = the loop makes them, by `interval`
            and `diagnose`.
    """

    def __init__(
        self,
        spec: StreamSpec,
        open_at: Callable[[Cursor], Feed],
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        *,
        cursor: Cursor | None = None,
        augment: AugmentConfig | None = None,
        dtype: torch.dtype = torch.float32,
        depth: int = 2,
        keep: int = 0,
        folder: Folder | None = None,
        start_from: Folder | None = None,
    ) -> None:
        """
        Args:
            open_at: starts the stream at a place.
            cursor: that place; None = `load_state_dict` will set it.
            folder: where rank 0 records the run; None = nowhere.
            start_from: folder of a checkpoint that `restore` loads while Ray Train has none.
            device, augment, dtype, depth, keep: see `raypipe.loader`.
        """
        configure_logs(spec.log, run=spec.run, rank=rank)
        info = {"version": __version__, "plan": spec.plan.fingerprint, "workers": str(world_size)}
        self.exported = TrainerMetrics(spec.run, rank, **info)
        self.plan = spec.plan
        self.device = device or torch.device("cpu")
        targets, views = bool(spec.transform.target_columns), makes_views(spec.transforms["train"])
        if augment and (target := spec.columns.target):
            check_mixable(augment, target.dtype, target.shape)
        self.augment: DeviceAugment | None = None
        self.rank, self.world_size = rank, world_size
        self.num_bad = self.num_fallback = 0
        self.jpeg_decoder = ""
        self._spec, self._open_at, self._depth, self.keep = spec, open_at, depth, keep
        self._start_from = start_from
        self._meter = Meter(self.device)
        self._budget = BadSampleBudget(spec.transform.max_bad_fraction, spec.transform.bad_grace)
        self.chronicle = Chronicle(world_size, rank, folder)
        self._running = Running(self.chronicle.close)
        self._running.close_with(self)
        self.interval_s, self._actors = _INTERVAL_S, 0
        self._supervisor: Any = None
        self.notice = Notice(functools.partial(_tell_notice, self.chronicle, self.exported))
        self._go_to(cursor or self.plan.start())
        if cursor:
            self._open()
        if augment:  # its imports take a second, in which the pool starts
            try:
                self.augment = DeviceAugment(augment, self.device, dtype, targets, views)
            except BaseException:  # whose traceback holds the loader
                self.close()
                raise

    def _go_to(self, cursor: Cursor) -> None:
        self.plan.check(cursor)
        self._start = cursor
        self._stand_at(cursor)
        # What the loader holds refers to it weakly: a ring of references would keep a dropped one running.
        self._epochs = Loader._each_epoch(weakref.proxy(self))
        self._batches: Any = None  # an iterator of Batch

    def _open(self) -> None:
        """Start the stream."""
        if self.rank == 0 and next(self.plan.segments(self._start), None) is None:
            _logger.warning(
                "all %d epochs are done, and nothing is left to train; to go on, set a larger plan.epochs",
                self.num_epochs,
            )
        self._meter.begin()
        self.exported.begin()
        # Of the feed no more is held than these: its execution is to be collected once it has ended.
        feed = self._open_at(self._start)
        self._supervisor, self._actors = feed.supervisor, feed.actors
        clocks = self._meter.clocks
        self._batches, self.jpeg_decoder = moved(feed, self._spec, self.device, clocks, self._depth, self.keep)
        closes = (functools.partial(_close, generator) for generator in (feed.batches, self._batches))
        has_actors, unfollow = feed.supervisor is not None, self.chronicle.unfollow
        self._running.begin(has_actors, feed.end, self.exported.end, unfollow, *closes)

    def epochs(self) -> Epochs:
        """The remaining epochs, each once; of the first, the rest of it.

        A `for` loop over them ends the stream when it is left: at its end, by `break`, or by an exception.
        """
        return Epochs(self)

    def _stand_at(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.chronicle.step = self.global_step

    def _each_epoch(self) -> Iterator[tuple[int, list[_Rest]]]:
        """Number of each epoch, and what is left of its training and of its validation."""
        at, total = self.cursor, self.plan.config.epochs * self.plan.steps_per_epoch
        begins = {"workers": self.world_size, "actors": self._actors, "from_step": self.global_step}
        validates = at.step == self.plan.steps_per_epoch and self.plan.has_val(at.epoch)
        self.chronicle.begin(
            validates,
            functools.partial(settings_of, self._spec, **begins, to_step=total),
            self._supervisor,
        )
        for number, segments in groupby(self.plan.segments(self._start), lambda segment: segment.epoch):
            of_split: dict[Split, Segment] = {segment.split: segment for segment in segments}
            both = of_split.get("train"), of_split.get("val")
            # By the class, since a method of a weak reference's would hold the loader.
            rests = [(segment, Loader._deliver(self, segment) if segment else iter(())) for segment in both]
            yield number, rests
            for _, batches in rests:
                self._skip(batches)
        assert self._batches is None or next(self._batches, None) is None, "the stream is longer than the plan"
        self._running.end(EXHAUSTED)

    def _skip(self, batches: Iterator[Batch]) -> None:
        for _ in batches:
            self._meter.skips = True

    def state_dict(self) -> dict[str, Any]:
        """The run's place after the last step of which all batches were handed out; plain numbers and text."""
        return asdict(self.cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, made with any number of workers. All ranks call it, and iterate anew.

        A loader in a train function continues from Ray Train's checkpoint by itself.

        Raises:
            CursorError: this is not a loader's state, or it belongs to a different plan.
        """
        cursor = Cursor.from_dict(state)
        self.plan.check(cursor)
        if cursor != self._start or self.first_batch_s or self._batches is None or self._running.why:
            self.close()
            self._go_to(cursor)
            self._open()

    def report(self, metrics: Mapping[str, Any], **parts: Stateful) -> None:
        """Report metrics to Ray Train, with a checkpoint: the parts' states, and where the run stands.

        All ranks call it, in a train function, after a whole optimizer step or after a validation. It returns once
        Ray Train has noted the checkpoint, which takes up to 0.5 s (`RAY_TRAIN_HEALTH_CHECK_INTERVAL_S`).

        Args:
            metrics: those that are numbers are recorded, and drawn by `raypipe report`.
            parts: what has a `state_dict`, by names of your choice: the model, in DDP or not, the optimizer, …

        Raises:
            ConfigError: a part is sharded.
        """
        with self.saving(lambda: "Ray Train writes it, or other ranks have not reported yet"):
            report(metrics, parts, self.rank, self.cursor)
        self.exported.checkpointed()
        self.chronicle.record("report", values=numbers_in(metrics))
        if self.chronicle.log:
            self.chronicle.log.sync()

    @contextlib.contextmanager
    def saving(self, whom: Callable[[], str]) -> Iterator[None]:
        """Count the time within as waiting for a checkpoint, not as compute; rank 0 tells of a long wait.

        Args:
            whom: names what holds it up.
        """
        with self._meter.checkpoint(), self.chronicle.waiting("the checkpoint", whom):
            yield

    def should_checkpoint(self) -> bool:
        """Tell all ranks alike whether to make a checkpoint now, since a node of the trainers is about to go.

        All ranks call it after each optimizer step, and after a validation. It is True within two seconds or so of
        a notice, and again every 15 s or less. Once there is no time for a further step and its checkpoint, it is
        True for the last time: the next batch ends the train function with an error that Ray Train counts as a
        preemption, and the trainers are started again. Ray gives notices from version 2.60 on; before that, it is
        False.
        """
        return self.notice.agreed(self.rank, at_end=self.cursor.step in (0, self.plan.steps_per_epoch))

    def restore(self, **parts: Stateful) -> None:
        """Load the states of the latest checkpoint into the parts; nothing where there is none.

        It is the latest that `report` made or, before there is one, that of `raypipe.loader(…, start_from=…)`.

        Raises:
            ConfigError: the checkpoint is damaged, lacks a part, or has one of another make.
        """
        if folder := latest_of_train() or self._start_from:
            restore(parts, folder)

    def save(self, folder: str | Path) -> None:
        """Write where the run stands into a checkpoint's folder, for checkpoints that `report` does not make.

        A later `raypipe.loader` continues from there.
        """
        write_text(join(str(folder), CURSOR_FILE), self.cursor.to_json())
        self.exported.checkpointed()

    @property
    def first_batch_s(self) -> float:
        """Seconds from the start of the stream to its first batch; 0 before it."""
        return self._meter.first_batch_s

    @property
    def columns(self) -> SampleColumns:
        """What batches have beside images, and the target where that is no class."""
        return self._spec.columns

    @property
    def accumulation(self) -> int:
        """Micro-batches of this rank in an optimizer step, M / W: divide the loss by it."""
        return self.plan.config.per_step // self.world_size

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole run."""
        return self.plan.config.epochs

    @property
    def global_step(self) -> int:
        """Training steps done, through all epochs, according to the cursor."""
        return self.cursor.epoch * self.plan.steps_per_epoch + self.cursor.step

    def close(self) -> None:
        """End the stream and its record now. One whose loop was left, or that was dropped, needs no closing."""
        self._running.close("the loader was closed")

    def _check_running(self) -> None:
        if why := self._running.why:
            raise RaypipeError(
                f"the stream has ended, since {why}: loader.load_state_dict(loader.state_dict()) starts it anew "
                "after the last whole step"
            )

    def times(self, split: Split = "train") -> StageTimes:
        """What this rank has measured in one split, without the wait for the very first batch.

        Transfers are counted with "train". On CUDA the newest micro-batches may be missing.
        """
        return self._meter.times(split)

    def _export(self) -> None:
        epoch, step = self.cursor.epoch, self.cursor.step
        self.exported.record(
            {split: self.times(split) for split in self._meter.clocks},
            first_batch_s=self.first_batch_s,
            steps=self.global_step - self._start.epoch * self.plan.steps_per_epoch - self._start.step,
            trainer_step=self.global_step,
            trainer_epoch=epoch,
            trainer_augment_strength=self.strength(epoch, step),
        )

    def interval(self, **learnt: float) -> Interval:
        """Record the training since the last call, or since the epoch began; with a loss, also tell it.

        Args:
            learnt: loss, lr, …
        """
        epoch, step, (times, seconds) = self.cursor.epoch, self.cursor.step, self._meter.interval()
        self._meter.begin_interval()
        images, wait = times.images * self.world_size, min(1.0, times.wait_s / seconds)
        line = (
            f"epoch {epoch + 1}/{self.num_epochs}  step {step}/{self.plan.steps_per_epoch}  "
            f"loss {learnt.get('loss', 0.0):.4f}  {images / seconds:,.0f} images/s  waiting for data {wait:.0%}"
        )
        self.chronicle.record(
            "train",
            line if "loss" in learnt else "",
            epoch=epoch,
            **learnt,
            images_per_s=images / seconds,
            wait_fraction=wait,
            **{f"{stage}_s": getattr(times, f"{stage}_s") for stage in STAGES if stage != "wait"},
            **({"strength": self.strength(epoch, step - 1)} if self.augment else {}),
            num_bad=self.num_bad,
            num_fallback=self.num_fallback,
        )
        return Interval(images, seconds, times.wait_s)

    def diagnose(self, epoch: int, times: StageTimes | None = None) -> None:
        """Record at the end of an epoch where the time of the run went, and tell it at the end of the last.

        Args:
            times: sums over all ranks; None = this rank's.
        """
        last, spec = epoch + 1 == self.num_epochs, self._spec
        readers = spec.pool.executions if self._supervisor is not None and "train" in spec.readers() else 0
        times, device = times or self.times(), self.device.type
        sentences = diagnose(
            times, world_size=self.world_size, actors=self._actors, device=device, readers=readers
        )
        text = " ".join(sentences)
        self.chronicle.record("diagnosis", text if last else "", **asdict(times), text=text)

    def strength(self, epoch: int, step: int) -> float:
        """The strength of the augmentation at a training step."""
        if self.augment is None:
            return 0.0
        return self.augment.config.strength.at(self.plan.progress(epoch, step))

    def _deliver(self, segment: Segment) -> Iterator[Batch]:
        """This rank's micro-batches of a segment."""
        split, epoch, per_step = segment.split, segment.epoch, self.plan.config.per_step
        self._meter.skips, records = False, math.isfinite(self.interval_s)
        if split == "train":
            self._meter.begin_interval()
        for step in range(segment.first_step, segment.num_steps):
            self.notice.begin_step()
            for micro in range(self.rank, per_step, self.world_size):
                batch = self._next(MicroBatchId(split, epoch, step, micro))
                ends_step = micro + self.world_size >= per_step
                if ends_step and split == "train":
                    self._stand_at(Cursor(epoch, step + 1, self.plan.fingerprint))
                elif ends_step and step + 1 == segment.num_steps:
                    self._stand_at(Cursor(epoch + 1, 0, self.plan.fingerprint))
                yield replace(batch, ends_step=ends_step)
                is_last = step + 1 == segment.num_steps
                is_due = is_last or self._meter.interval_age_s >= self.interval_s
                if ends_step and split == "train" and is_due and records and not self._meter.skips:
                    self.interval()
        self._export()
        if records and (split == "val" or not self.plan.has_val(epoch)):
            self.diagnose(epoch)

    def _next(self, expected: MicroBatchId) -> Batch:
        if self._batches is None:
            raise CursorError(
                "the latest checkpoint does not say where the stream stands: make checkpoints by loader.report or "
                "loader.save(folder), or call loader.load_state_dict before the first batch; to begin anew all "
                "the same, raypipe.loader(spec, cursor=spec.plan.start())"
            )
        asked = self._meter.asked()
        awaited = functools.partial(self.chronicle.awaited, self._supervisor)
        with self.chronicle.waiting(str(expected) if self.first_batch_s else "the first batch", awaited):
            batch = next(self._batches, None)
        if batch is None:
            self._check_running()
        arrived = self._meter.arrived(expected.split, asked)
        if batch is None or batch.at != expected:
            got = "ended" if batch is None else f"brought {batch.at}"
            raise RaypipeError(
                f"rank {self.rank} expected {expected}, the stream {got}: please report this as a bug"
            )
        log_place(split=expected.split, epoch=expected.epoch, step=self.plan.global_step(expected))
        if self.exported.is_due():
            self._export()
        self.num_bad += batch.num_bad
        self.num_fallback += batch.num_fallback
        judge(batch, self._spec, self._budget)
        if self.plan.sources:
            batch = replace(batch, source=self.plan.source_of(batch.index))
        if self.augment is not None:
            batch = augmented(batch, self.augment, self.strength)
        num_images = int((batch.index >= 0).sum())
        counts = StageTimes(images=num_images, read_s=batch.read_s, work_s=batch.work_s)
        self._meter.handed_out(expected.split, arrived, counts)
        return batch


def _tell_notice(chronicle: Chronicle, exported: TrainerMetrics, text: str) -> None:
    chronicle.record("fault", f"fault: {text}", text=text)
    exported.add({"stream_faults_total": 1}, kind="notice")


def _close(batches: Any) -> None:
    """Close what may be a generator."""
    with contextlib.suppress(ValueError):  # a thread that did not end in time is still in it
        getattr(batches, "close", lambda: None)()


class Epochs(Iterator[Epoch]):
    """The remaining epochs of a loader, each once. A loop over them ends the stream when it is left."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __next__(self) -> Epoch:
        loader = self._loader
        loader._check_running()
        number, (train, val) = next(loader._epochs)
        of_loader = loader._skip, loader.accumulation
        return Epoch(number, Pass(*train, iter(()), *of_loader), Pass(*val, train[1], *of_loader))

    def __iter__(self) -> Iterator[Epoch]:
        try:
            while (epoch := next(self, None)) is not None:
                yield epoch
        finally:
            self._loader._running.end("the loop over its epochs was left")
