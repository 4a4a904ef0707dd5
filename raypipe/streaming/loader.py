"""Loader of one rank: takes the stream in the order of the plan, and tracks the run's place.

If a micro-batch is not the one that the plan expects, the run ends.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from raypipe.config import AugmentConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.mixing import check_mixable
from raypipe.device.prefetcher import Batch, on_device
from raypipe.errors import CursorError, RaypipeError
from raypipe.logs import configure_logs, log_place
from raypipe.metrics.records import Folder
from raypipe.metrics.timing import StageTimes
from raypipe.mistakes import Unlike
from raypipe.plan.places import CURSOR_FILE, Cursor, MicroBatchId, Split, TrainStep
from raypipe.plan.schedule import Segment
from raypipe.rayext.sentry import Sentry
from raypipe.rayext.trainer_notice import Notice
from raypipe.storage.files import write_text
from raypipe.storage.filesystem import join
from raypipe.streaming.account import Account
from raypipe.streaming.digest import settings_of
from raypipe.streaming.epochs import Epoch, Pass
from raypipe.streaming.running import EXHAUSTED, Feed, Running
from raypipe.streaming.saved_model import input_of
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.stateful import Stateful, latest_of_train, numbers_in, report, restore
from raypipe.transform.columns import SampleColumns
from raypipe.transform.views import makes_views

_logger = logging.getLogger(__name__)


_INTERVAL_S = 10.0
_LEAVE_S = 5.0  # time for another thread to leave its wait for a batch
_INSTEAD = (
    "write `for epoch in loader.epochs():` and `for batch in epoch.train:`; it batches, shuffles and shards, so "
    "no DataLoader goes around it"
)
_Rest = tuple[Segment | None, Iterator[Batch]]


class Loader(Unlike, instead=_INSTEAD):
    """This rank's share of the stream: the rest of the run, once, in the order of the plan.

        for epoch in loader.epochs():
            for batch in epoch.train:
                ...                       # forward and backward of one micro-batch
                if batch.ends_step:
                    ...                   # optimizer.step(); from now on state_dict() counts this step
            for batch in epoch.val:
                ...

    `raypipe.loader` makes one. If a loop stops in the middle of an epoch's training or validation, the next one
    skips the rest of it. The stream ends, with all its processes and threads, when the loop over the epochs
    ends in any way, when the last reference to the loader and its epochs is gone, by `close`, and at exit.

    Attributes:
        plan: the run's plan.
        rank: this process's rank.
        world_size: W, the number of ranks.
        keep_batches: batches that stay valid besides the newest.
        cursor: place after the last fully delivered step.
        account: measurements, metrics and records of this rank; a training loop may add its loss.
        notice: notices that nodes of the trainers will go.
        interval_s: seconds between two records of the training; infinity = the loop makes them, by
            `Account.interval` and `Account.diagnose`.
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
        prefetch_factor: int = 2,
        keep_batches: int = 0,
        folder: Folder | None = None,
        start_from: Folder | None = None,
    ) -> None:
        """
        Args:
            open_at: starts the stream at a place.
            cursor: that place; None = `load_state_dict` will set it.
            folder: where rank 0 records the run; None = nowhere.
            start_from: folder of a checkpoint that `restore` loads while Ray Train has none.
            device, augment, dtype, prefetch_factor, keep_batches: see `raypipe.loader`.
        """
        configure_logs(spec.log_format, run=spec.run, rank=rank)
        self.plan = spec.plan
        self.device = device or torch.device("cpu")
        targets, views = bool(spec.transform.target_columns), makes_views(spec.transforms["train"])
        if augment and (target := spec.columns.target):
            check_mixable(augment, target.dtype, target.shape)
        self.augment: DeviceAugment | None = None
        self.rank, self.world_size = rank, world_size
        self._spec, self._open_at, self._start_from = spec, open_at, start_from
        self._described = input_of(spec, augment)
        self._lacks_weights = start_from is not None
        self._prefetch_factor, self.keep_batches = prefetch_factor, keep_batches
        self.account = Account(spec, self.device, rank, world_size, augment, folder)
        self._running = Running(self.account.chronicle.close)
        self._running.close_with(self)
        self.interval_s = _INTERVAL_S
        self._supervisor: Any = None
        self.notice = Notice(self.account.tell_notice)
        self._go_to(cursor or self.plan.start())
        if cursor:
            self._open()
        if augment:  # its imports take a second, in which the pool starts
            try:
                self.augment = DeviceAugment(augment, self.device, dtype, targets, views)
            except BaseException:  # its traceback refers to the loader
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
        self.account.begin(self._start)
        # Of the feed no more is held than these: its execution is to be collected once it has ended.
        feed = self._open_at(self._start)
        self._supervisor, has_actors = feed.supervisor, feed.supervisor is not None
        account, spec = self.account, self._spec
        account.actors = feed.actors
        account.readers = int(has_actors and "train" in spec.readers())
        self._batches = on_device(
            feed.batches,
            self.device,
            spec.plan.micro_batch_seed,
            self._prefetch_factor,
            self.keep_batches,
            ring=False if feed.draws_globally else None,
            on_copied=functools.partial(account.clocks["train"].add, "transfer"),
        )
        close = functools.partial(_close, self._running, feed.stop)
        closes = (functools.partial(close, generator) for generator in (feed.batches, self._batches))
        ends = [feed.end, account.exported.end, account.chronicle.unfollow, *closes]
        if has_actors:
            sentry = Sentry(feed.supervisor, self.rank, account.chronicle.waited_s)
            sentry.start()
            ends.insert(1, sentry.stop)  # before its Supervisor ends, and after the last wait for a batch
        self._running.begin(has_actors, *ends)

    def epochs(self) -> Epochs:
        """Iterate once over the remaining epochs; the first may be the rest of one.

        A `for` loop over them ends the stream when it is left: at its end, by `break`, or by an exception.
        """
        return Epochs(self)

    def _stand_at(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.account.chronicle.step = self.global_step

    def _each_epoch(self) -> Iterator[tuple[int, list[_Rest]]]:
        """Yield each epoch's number, and the rest of its training and validation."""
        at, total = self.cursor, self.plan.config.epochs * self.plan.steps_per_epoch
        begins = {"workers": self.world_size, "actors": self.account.actors, "from_step": self.global_step}
        validates = at.step == self.plan.steps_per_epoch and self.plan.has_val(at.epoch)
        self.account.chronicle.begin(
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
            self.account.skips = True

    def state_dict(self) -> dict[str, Any]:
        """The run's place after the last step of which all batches were handed out; plain numbers and text."""
        return asdict(self.cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, made with any number of workers. All ranks call it, and iterate again.

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
        """Report metrics to Ray Train, with a checkpoint: the parts' states, and the run's place.

        All ranks call it, in a train function, after a whole optimizer step or after a validation. It returns once
        Ray Train has noted the checkpoint, which takes up to 0.5 s (`RAY_TRAIN_HEALTH_CHECK_INTERVAL_S`).

        Args:
            metrics: numbers are recorded; tensors and arrays of one element become numbers.
            parts: objects with a `state_dict`, by names that you choose: the model, in DDP or not, the
                optimizer, …

        Raises:
            ConfigError: a part is sharded, or its state has other things than tensors and plain values.
        """
        # Ray Train refuses a tensor, and its controller would end the run at a number of NumPy's.
        metrics = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        with self.account.saving(lambda: "Ray Train writes it, or other ranks have not reported yet"):
            report(metrics, parts, self.rank, self.cursor, self._described)
        if self._lacks_weights and self.rank == 0:
            _logger.warning(
                "the stream continued from a checkpoint, and loader.restore was not called: unless you loaded its "
                "states yourself, new weights are trained from the middle of the run on"
            )
        self._lacks_weights = False
        self.account.exported.checkpointed()
        chronicle = self.account.chronicle
        chronicle.record("report", values=numbers_in(metrics))
        if chronicle.log:
            chronicle.log.sync()

    def should_checkpoint(self) -> bool:
        """Return, on all ranks alike, whether to make a checkpoint now, since a node of the trainers will go.

        All ranks call it after each optimizer step, and after a validation. It is True within about two seconds
        of a notice, and again at least every 15 s. Once the time is too short for another step and its
        checkpoint, it is True for the last time: the next batch ends the train function with an error that Ray
        Train counts as a preemption, and the trainers are started again. Ray gives notices from version 2.60
        on; before that, it is False.
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
        self._lacks_weights = False

    def save(self, folder: str | Path) -> None:
        """Write the run's place into a checkpoint's folder, for checkpoints that `report` does not make.

        A later `raypipe.loader` continues from there.
        """
        write_text(join(str(folder), CURSOR_FILE), self.cursor.to_json())
        self.account.exported.checkpointed()

    @property
    def first_batch_s(self) -> float:
        """Seconds from the start of the stream to its first batch; 0 before it."""
        return self.account.first_batch_s

    @property
    def columns(self) -> SampleColumns:
        """Columns of batches besides images, and the target if it is not a class."""
        return self._spec.columns

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of this rank in an optimizer step, M / W: divide the loss by it."""
        return self.plan.config.per_step // self.world_size

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole run."""
        return self.plan.config.epochs

    @property
    def global_step(self) -> TrainStep:
        """Training steps done, through all epochs, according to the cursor."""
        return self.plan.global_step(self.cursor)

    def close(self) -> None:
        """End the stream and its record now. One whose loop was left, or that was dropped, needs no closing."""
        self._running.close("the loader was closed")

    def _check_running(self) -> None:
        if self._batches is None:
            raise CursorError(
                "the latest checkpoint has no place of the stream: make checkpoints with loader.report or "
                "loader.save(folder), or call loader.load_state_dict before the first batch; to start over "
                "anyway, raypipe.loader(spec, cursor=spec.plan.start())"
            )
        if why := self._running.why:
            raise RaypipeError(
                f"the stream has ended, since {why}: loader.load_state_dict(loader.state_dict()) restarts "
                "it after the last whole step"
            )

    def times(self, split: Split = "train") -> StageTimes:
        """Measurements of this rank in one split, without the wait for the very first batch.

        Transfers are counted with "train". On CUDA the newest micro-batches may be missing.
        """
        return self.account.times(split)

    def _deliver(self, segment: Segment) -> Iterator[Batch]:
        """This rank's micro-batches of a segment."""
        split, epoch, per_step = segment.split, segment.epoch, self.plan.config.per_step
        account, records = self.account, math.isfinite(self.interval_s)
        account.skips = False
        if split == "train":
            account.begin_interval()
        for step in range(segment.first_step, segment.num_steps):
            self.notice.begin_step()
            for micro in range(self.rank, per_step, self.world_size):
                try:
                    batch = self._next(MicroBatchId(split, epoch, step, micro))
                except BaseException as error:  # this generator yields no more; it may be Ctrl-C
                    self._running.end(f"its next batch failed with {type(error).__name__}")
                    _close(self._running, lambda: None, self._batches)  # another thread could not
                    raise
                ends_step = micro + self.world_size >= per_step
                if ends_step and split == "train":
                    self._stand_at(Cursor(epoch, step + 1, self.plan.fingerprint))
                elif ends_step and step + 1 == segment.num_steps:
                    self._stand_at(Cursor(epoch + 1, 0, self.plan.fingerprint))
                yield replace(batch, ends_step=ends_step)
                is_last = step + 1 == segment.num_steps
                is_due = is_last or account.interval_age_s >= self.interval_s
                if ends_step and split == "train" and is_due and records and not account.skips:
                    account.interval(self.cursor)
        account.export(self.cursor)
        if records and (split == "val" or not self.plan.has_val(epoch)):
            account.diagnose(epoch)

    def _next(self, expected: MicroBatchId) -> Batch:
        self._check_running()
        account = self.account
        self._running.reader = threading.get_ident()
        asked = account.asked()
        awaited = functools.partial(self.account.chronicle.awaited, self._supervisor)
        thing = str(expected) if self.first_batch_s else "the first batch"
        with account.chronicle.waiting(thing, awaited, is_batch=True):
            batch = next(self._batches, None)
        if batch is None:
            self._check_running()
        arrived = account.arrived(expected.split, asked)
        if batch is None or batch.position != expected:
            got = "ended" if batch is None else f"brought {batch.position}"
            raise RaypipeError(
                f"rank {self.rank} expected {expected}, the stream {got}: please report this as a bug"
            )
        log_place(split=expected.split, epoch=expected.epoch, step=self.plan.step_of_split(expected))
        if self.account.exported.is_due():
            account.export(self.cursor)
        account.num_bad += batch.num_bad
        if self.plan.sources:
            batch = replace(batch, source=self.plan.source_of(batch.index))
        if self.augment is not None:
            batch = self.augment.of_batch(batch, account.strength(self.plan.global_step(expected)))
        num_images = int((batch.index >= 0).sum())
        account.handed_out(expected.split, arrived, images=num_images, read_s=batch.read_s, work_s=batch.work_s)
        return batch


def _close(running: Running, stop: Callable[[], None], batches: Any) -> None:
    """Close what may be a generator. If a thread is in it, stop that, and wait a little for it to leave."""
    deadline = time.monotonic() + _LEAVE_S
    while True:
        try:
            getattr(batches, "close", lambda: None)()
            return
        except ValueError:
            stop()
            if running.reader == threading.get_ident() or time.monotonic() > deadline:
                return
            time.sleep(0.02)


class Epochs(Iterator[Epoch]):
    """The remaining epochs of a loader, each once. A loop over them ends the stream when it is left."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __next__(self) -> Epoch:
        loader = self._loader
        loader._check_running()
        number, (train, val) = next(loader._epochs)
        check, skip, steps = loader._check_running, loader._skip, loader.accumulation_steps
        return Epoch(number, Pass(*train, iter(()), check, skip, steps), Pass(*val, train[1], check, skip, steps))

    def __iter__(self) -> Iterator[Epoch]:
        try:
            while (epoch := next(self, None)) is not None:
                yield epoch
        finally:
            self._loader._running.end("the loop over its epochs was left")
