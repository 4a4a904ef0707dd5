"""Loader of one rank: takes the stream in the order of the plan, and tracks the run's place.

If a micro-batch is not the one that the plan expects, the run ends.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
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
from raypipe.device.augment import DeviceAugment, settings_of_device
from raypipe.device.finish import Finish, check_floats, check_module
from raypipe.device.mixing import check_mixable
from raypipe.device.prefetcher import Batch, on_device
from raypipe.errors import CursorError, RaypipeError
from raypipe.logs import configure_logs, log_place
from raypipe.metrics.records import Folder
from raypipe.metrics.timing import StageTimes
from raypipe.mistakes import Unlike
from raypipe.plan.places import CURSOR_FILE, Cursor, MicroBatchId, Split, TrainStep
from raypipe.plan.schedule import Plan, Segment
from raypipe.progress import print_progress
from raypipe.rayext.trainer_notice import Notice
from raypipe.rayext.watchdog import SupervisorWatchdog
from raypipe.storage.files import write_text
from raypipe.storage.filesystem import join_address
from raypipe.streaming.account import Account
from raypipe.streaming.course import Course
from raypipe.streaming.decoding import Decoding
from raypipe.streaming.digest import settings_of
from raypipe.streaming.epochs import Epoch, Pass
from raypipe.streaming.moves import END, Move, place_of
from raypipe.streaming.running import EXHAUSTED, GOES_ON, LEFT, Feed, Running
from raypipe.streaming.saved_model import input_of
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.stateful import (
    Stateful,
    latest_of_train,
    numbers_in,
    report,
    restore,
)
from raypipe.transform.columns import SampleColumns
from raypipe.transform.views import makes_views

_logger = logging.getLogger(__name__)


_INTERVAL_S = 10.0
_LEAVE_S = 5.0  # time for another thread to leave its wait for a batch
_INSTEAD = (
    "write `for epoch in loader.epochs():` and `for batch in epoch.train:`; it batches, shuffles and shards, so "
    "no DataLoader goes around it"
)


class Loader(Unlike, instead=_INSTEAD):
    """Loader of this rank's share of the stream: the rest of the run, once, in the order of the plan.

        for epoch in loader.epochs():
            for batch in epoch.train:
                ...                       # forward and backward of one micro-batch
                if batch.ends_step:
                    ...                   # optimizer.step(); from now on state_dict() counts this step
            for batch in epoch.val:
                ...

    `raypipe.loader` makes one. If a loop stops in the middle of an epoch's training, the next epoch skips the rest
    of it, without making it. Each loop over a validation gets all of it. The stream's processes and threads end
    when the loop over the epochs ends in any way, when the last reference to the loader and its epochs is gone, by
    `close`, and at exit; only after the last two does a further batch fail.

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
        open_at: Callable[..., Feed],
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | None = None,
        *,
        cursor: Cursor | None = None,
        augment: AugmentConfig | None = None,
        dtype: torch.dtype | None = None,
        prefetch_factor: int = 2,
        keep_batches: int = 0,
        folder: Folder | None = None,
        start_from: Folder | None = None,
    ) -> None:
        """
        Args:
            open_at: starts the stream at a place; a second argument is the only segment that it shall bring.
            cursor: that place; None = `load_state_dict` will set it.
            folder: where rank 0 records the run; None = nowhere.
            start_from: folder of a checkpoint that `restore` loads while Ray Train has none.
            device, augment, dtype, prefetch_factor, keep_batches: see `raypipe.loader`.
        """
        configure_logs(spec.log_format, run=spec.run, rank=rank)
        self.plan = spec.plan
        self.device = device or torch.device("cpu")
        self._user_augment = augment
        self._ending = Finish(spec.endings, augment, self.device, dtype)
        augment = self._ending.config if augment else None
        if augment and (target := spec.columns.target):
            check_mixable(augment, target.dtype, target.shape)
        self.augment: DeviceAugment | None = None
        self.rank = rank
        self.world_size = world_size
        self._spec = spec
        self._open_at = open_at
        self._start_from = start_from
        self._looked_at = set[Split]()
        self._lacks_weights = start_from is not None
        self._prefetch_factor = prefetch_factor
        self.keep_batches = keep_batches
        self.account = Account(spec, self.device, rank, world_size, augment, folder)
        self._decoding: Decoding | None = None
        if spec.transform.decode == "device":
            self._decoding = Decoding(spec, self.device, self.account.decoded)
        self._running = Running(self.account.chronicle.close)
        self._running.close_with(self)
        self.interval_s = _INTERVAL_S
        self._supervisor: Any = None
        self._turn = 0
        self.notice = Notice(self.account.tell_notice)
        self._go_to(cursor or self.plan.start())
        if cursor:
            self._begin()
        if augment:  # its imports take a second, in which the pool starts
            try:
                views = makes_views(spec.transforms["train"])
                targets = spec.transform.target_columns
                has_target = spec.columns.has_target
                dtype = self._ending.dtype
                self.augment = DeviceAugment(
                    augment, self.device, dtype, targets, views, has_target
                )
                check_module(spec.endings.get("train"), self.augment)
            except BaseException:  # its traceback refers to the loader
                self.close()
                raise
        if rank == 0:
            for line in self._ending.described():
                print_progress(_logger, line)

    def _go_to(self, cursor: Cursor) -> None:
        self.plan.check(cursor)
        self._start = cursor = self.plan.normalized(cursor)
        self._in_step = 0  # batches of the training step under way, behind the cursor
        self._stand_at(cursor)
        # the split that the loop has left early, of the epoch that was handed out last
        self._left: Split | None = None
        self._turn += 1  # the number of the epoch that was handed out last
        self._has_begun = self._was_left = False
        self._epoch = cursor.epoch - 1
        self._diagnosed = cursor.epoch - 1
        # What the loader holds refers to it weakly, or not at all: a ring would keep a dropped one running.
        self._training: weakref.ref[Pass] | None = None
        self._segments = _by_epoch(self.plan, cursor)
        # turn and split of the last batch
        self._delivered: tuple[int, Split] | None = None
        # Whether the last batch was the epoch's last, if it ended a step of the training.
        self._ended_step: bool | None = None
        self._batches: Any = None  # an iterator of Batch

    def _begin(self) -> None:
        """Start the stream at the loader's place."""
        if self.rank == 0 and next(self.plan.segments(self._start), None) is None:
            _logger.warning(
                "all %d epochs are done, and nothing is left to train; to go on, set a larger plan.epochs",
                self.num_epochs,
            )
        self.account.begin(self._start)
        self._open(self._start)

    def _open(self, start: Cursor, only: Segment | None = None) -> None:
        """Open the stream.

        Args:
            start: its first place.
            only: the one segment that it brings; None = all from there on.
        """
        # Of the feed no more is held than these: its execution is to be collected once it has ended.
        if only:
            feed = self._open_at(start, only)
        else:
            feed = self._open_at(start)
        self._supervisor = feed.supervisor
        account = self.account
        spec = self._spec
        plan = self.plan.only(only) if only else self.plan
        self._course = Course(
            plan.segments(start), plan.config.per_step, self.rank, self.world_size
        )
        self._start_images = feed.start_images
        self._moves = feed.moves
        account.actors = feed.actors
        account.readers = int(feed.supervisor is not None and "train" in spec.readers())
        self._batches = on_device(
            feed.batches,
            self.device,
            spec.plan.micro_batch_seed,
            self._prefetch_factor,
            self.keep_batches,
            ring=False if feed.draws_globally else None,
            on_copied=functools.partial(account.clocks["train"].add, "transfer"),
            decode=self._decoding,
        )
        close = functools.partial(_close, self._running, feed.stop)
        closes = (
            functools.partial(close, generator)
            for generator in (feed.batches, self._batches)
        )
        ends: list[Callable[[], object]] = [
            feed.end,
            account.exported.end,
            account.chronicle.unfollow,
            *closes,
        ]
        if feed.supervisor is not None:
            sentry = SupervisorWatchdog(
                feed.supervisor, self.rank, account.chronicle.waited_s
            )
            sentry.start()
            # before its Supervisor ends, and after the last wait for a batch
            ends.insert(1, sentry.stop)
        self._running.begin(feed.supervisor, *ends)
        account.chronicle.follow(self._supervisor)

    def epochs(self) -> Epochs:
        """Iterate once over the remaining epochs; the first may be the rest of one.

        A `for` loop over them ends the stream's processes when it is left: at its end, by `break`, or by an
        exception. A later batch, from its last epoch or from `epochs`, starts them again.
        """
        return Epochs(self)

    def validation(self) -> Pass:
        """Return the validation, for a loop that validates when the plan does not: before the training, in the
        middle of an epoch, or after the last one.

        All ranks iterate it. Where actors make the stream, they start again for it, and then for the training.
        """
        epoch = max(0, self._epoch)
        if self.plan.val_steps:
            segment = Segment("val", epoch, 0, self.plan.val_steps)
        else:
            segment = None
        return Pass(segment, self, -1)

    def _stand_at(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self._in_step = 0
        self.account.chronicle.step = self.global_step

    def _next_epoch(self) -> Epoch:
        """Leave the epoch that was handed out last, if there is one, and hand out the next."""
        if self._was_left:
            self._was_left = False
            self._segments = _by_epoch(self.plan, self.cursor)
        elif self._has_begun:
            self._leave_epoch()
        else:
            self._has_begun = True
            self._begin_record()
        self._turn += 1
        # nothing of the new epoch was left, and no step of it has begun
        self._left = None
        self._in_step = 0
        number, of_split = next(self._segments, (-1, {}))
        if number < 0:
            self._end()
            raise StopIteration
        self._epoch = number
        self._segments_of_epoch = of_split
        train = Pass(of_split.get("train"), self, self._turn)
        self._training = weakref.ref(train)
        return Epoch(number, train, Pass(of_split.get("val"), self, self._turn))

    def _leave_epoch(self) -> None:
        self._settle()
        if self.cursor.epoch <= self._epoch:
            train = self._segments_of_epoch.get("train")
            if train:
                last = train.num_steps
            else:
                last = self.plan.steps_per_epoch
            if "val" in self._segments_of_epoch:
                after = (self._epoch + 1, 0)
            else:
                after = (self._epoch, last)
            self._stand_at(Cursor(*after, self.plan.fingerprint))
        self._diagnose(self._epoch)

    def _end(self) -> None:
        """End the stream: all epochs were handed out, and the last one was left."""
        if self._running.why is None:
            stands = self._course.next
            if stands is None:
                assert next(self._batches, None) is None, (
                    "the stream is longer than the plan"
                )
                if self._moves:
                    self._moves(Move(END, END))
            elif self._moves and not self._moves(
                Move(place_of(stands), END, leaves=True)
            ):
                while self._course.next:
                    self._discard()
            self._running.end(EXHAUSTED)

    def _leave(self) -> None:
        """Note that the loop over the epochs was left: the next batch starts the stream again."""
        self._was_left = True
        self._running.end(LEFT)

    def _begin_record(self) -> None:
        at = self.cursor
        total = self.plan.config.epochs * self.plan.steps_per_epoch
        begins = {
            "workers": self.world_size,
            "actors": self.account.actors,
            "from_step": self.global_step,
        }
        validates = at.step == self.plan.steps_per_epoch and self.plan.has_val(at.epoch)

        def settings() -> dict[str, Any]:
            of_stream = settings_of(self._spec, **begins, to_step=total)
            return of_stream | (
                settings_of_device(self._user_augment) if self._user_augment else {}
            )

        self.account.chronicle.begin(validates, settings, self._supervisor)

    def _left_early(self, of: Pass) -> None:
        # a forgotten loop may end at any later time
        is_now = of.segment is not None and of.turn == self._turn
        if (
            of.segment
            and is_now
            and (of.segment.split == "train" or self._is_at_end(of))
        ):
            self._left = of.segment.split

    @property
    def place(self) -> Cursor:
        """Place from which a resume does what the loop would do next.

        It is the cursor. Once a loop has left an epoch's batches before their end (by `break`, not by an
        exception that is being handled, nor by leaving the loop over the epochs), it is after them.
        """
        cursor = self.cursor
        if (
            self._left
            and cursor.epoch == self._epoch
            and not self._was_left
            and sys.exc_info()[0] is None
        ):
            is_val = self._left == "val"
            cursor = Cursor(
                cursor.epoch + is_val,
                0 if is_val else self.plan.steps_per_epoch,
                cursor.fingerprint,
            )
        return self.plan.normalized(cursor)

    @property
    def num_beyond(self) -> int:
        """Batches that this rank was handed beyond `place`: some of a training step's."""
        if self.place == self.plan.normalized(self.cursor):
            return self._in_step
        return 0

    def state_dict(self) -> dict[str, Any]:
        """The run's place after the last step of which all batches were handed out; plain numbers and text.

        Inside of the loop over an epoch's batches that is between them. After it, also after a `break`, it is
        behind them: a resumed run begins with what the loop would have done next.
        """
        return asdict(self.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, made with any number of workers. All ranks call it, and iterate again.

        A loader in a train function continues from Ray Train's checkpoint by itself.

        Raises:
            CursorError: this is not a loader's state, or it belongs to a different plan.
        """
        cursor = Cursor.from_dict(state)
        self.plan.check(cursor)
        is_there = cursor == self._start and not (self.first_batch_s or self._has_begun)
        if not is_there or self._batches is None or self._running.why:
            self.close()
            self._go_to(cursor)
            self._begin()

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
        metrics = {
            name: value.item() if hasattr(value, "item") else value
            for name, value in metrics.items()
        }
        with self.account.saving(
            lambda: "Ray Train writes it, or other ranks have not reported yet"
        ):
            report(metrics, parts, self.rank, self.place, self.described())
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

    def described(self, model: str = "") -> dict[str, Any]:
        """Describe the inputs of a model of this name that the loop trains, for its checkpoints."""
        augment = self._user_augment
        if (
            self.augment and not self._spec.endings
        ):  # with the normalization of its module
            augment = self.augment.config
        return input_of(self._spec, augment, model)

    def should_checkpoint(self) -> bool:
        """Return, on all ranks alike, whether to make a checkpoint now, since a node of the trainers will go.

        All ranks call it after each optimizer step, and after a validation. It is True within about two seconds
        of a notice, and again at least every 15 s. Once the time is too short for another step and its
        checkpoint, it is True for the last time: the next batch ends the train function with an error that Ray
        Train counts as a preemption, and the trainers are started again. Ray gives notices from version 2.60
        on; before that, it is False.
        """
        return self.notice.agreed(
            self.rank, at_end=self.cursor.step in (0, self.plan.steps_per_epoch)
        )

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
        write_text(join_address(str(folder), CURSOR_FILE), self.place.to_json())
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
        """Return the number of epochs of the whole run."""
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
        if (why := self._running.why) and why not in GOES_ON:
            raise RaypipeError(
                f"the stream has ended, since {why}: loader.load_state_dict(loader.state_dict()) restarts "
                "it after the last whole step"
            )

    def times(self, split: Split = "train") -> StageTimes:
        """Measurements of this rank in one split, without the wait for the very first batch.

        Transfers are counted with "train". On CUDA the newest micro-batches may be missing.
        """
        return self.account.times(split)

    def _deliver(self, of: Pass, number: int) -> Batch:
        """A pass's micro-batch of a number."""
        segment = of.segment
        assert segment
        split = segment.split
        epoch = segment.epoch
        if split == "train" and of.turn != self._turn:
            raise RaypipeError(
                f"the rest of epoch {epoch}'s train batches was skipped when the next epoch was asked for, or "
                "load_state_dict was called: take an epoch's training before the next epoch"
            )
        steps, turn = divmod(number, self.accumulation_steps)
        at = MicroBatchId(
            split, epoch, segment.first_step + steps, self.rank + turn * self.world_size
        )
        ends_step = turn + 1 == self.accumulation_steps
        is_last = number + 1 == len(of)
        is_at_end = split == "val" and self._is_at_end(of)
        self._settle()
        self._begin_pass(of.turn, split)
        if turn == 0:
            self.notice.begin_step()
        try:
            batch = self._next(at, is_at_end and of.turn == self._turn)
        except BaseException as error:  # it may be Ctrl-C
            self._running.end(f"its next batch failed with {type(error).__name__}")
            # another thread could not
            _close(self._running, lambda: None, self._batches)
            raise
        if split == "train":
            self._left = None
            self._in_step = 0 if ends_step else turn + 1
        elif self._left and is_at_end:
            self._left = "train"
        if ends_step and split == "train":
            self._stand_at(Cursor(epoch, at.step + 1, self.plan.fingerprint))
            self._ended_step = is_last
        elif is_last and is_at_end and self.cursor.epoch <= epoch:
            self._stand_at(Cursor(epoch + 1, 0, self.plan.fingerprint))
        return replace(batch, ends_step=ends_step)

    def _is_at_end(self, of: Pass) -> bool:
        """Return whether a validation comes after its epoch's training, of which no loop takes more."""
        training = self._training() if self._training else None
        is_of_epoch = of.segment is not None and of.segment.epoch == self._epoch
        return is_of_epoch and not (training and training.is_open)

    def _begin_pass(self, turn: int, split: Split) -> None:
        """Begin an interval of the training where its batches come after something else."""
        if self._delivered != (turn, split):
            self._delivered = turn, split
            if split == "train":
                self.account.begin_interval()

    def _settle(self) -> None:
        """Record the training up to the batch that was handed out last, if due: its compute has ended."""
        is_last, self._ended_step = self._ended_step, None
        if is_last is None or math.isinf(self.interval_s):
            return
        if is_last or self.account.interval_age_s >= self.interval_s:
            self.account.interval(self.cursor)

    def _finish(self, of: Pass) -> None:
        """A pass was taken to its end."""
        self._settle()
        self.account.export(self.cursor)
        if of.segment and of.turn == self._turn:
            if of.segment.split == "val":
                is_end = self._is_at_end(of)
            else:
                is_end = not self.plan.has_val(of.segment.epoch)
            if is_end:
                self._diagnose(of.segment.epoch)

    def _diagnose(self, epoch: int) -> None:
        if math.isfinite(self.interval_s) and epoch > self._diagnosed:
            self._diagnosed = epoch
            self.account.diagnose(epoch)

    def _next(self, expected: MicroBatchId, goes_on: bool) -> Batch:
        self._check_running()
        account = self.account
        self._running.reader = threading.get_ident()
        asked = account.asked()
        if self.first_batch_s:
            thing = str(expected)
        else:
            thing = "the first batch"
        # It is kept a little longer than the wait, and must not hold the loader.
        awaited = functools.partial(Loader._awaited, weakref.proxy(self))
        with account.chronicle.waiting(thing, awaited, is_batch=True):
            self._reach(expected, goes_on)
            batch = next(self._batches, None)
        if batch is None:
            self._check_running()
        arrived = account.arrived(expected.split, asked)
        if batch is None or batch.position != expected:
            if batch is None:
                got = "ended"
            else:
                got = f"brought {batch.position}"
            raise RaypipeError(
                f"rank {self.rank} expected {expected}, the stream {got}: please report this as a bug"
            )
        self._course.take()
        log_place(
            split=expected.split,
            epoch=expected.epoch,
            step=self.plan.step_of_split(expected),
        )
        if self.account.exported.is_due():
            account.export(self.cursor)
        account.num_bad += batch.num_bad
        if self.plan.sources:
            batch = replace(batch, source=self.plan.source_of(batch.index))
        if expected.split not in self._looked_at:
            self._look_at(batch)
        is_recorded = self.augment is not None and self.augment.config.differentiable
        if self._ending.does(expected.split) and not is_recorded:
            batch = self._ending(batch)
        elif self.augment is not None:
            batch = self.augment.of_batch(
                batch, account.strength(self.plan.global_step(expected))
            )
        num_images = int((batch.index >= 0).sum())
        account.handed_out(
            expected.split,
            arrived,
            images=num_images,
            read_s=batch.read_s,
            work_s=batch.work_s,
            outage_s=batch.outage_s,
        )
        return batch

    def _look_at(self, batch: Batch) -> None:
        """Check the dtype of a split's images, at its first batch, and say where floats travel."""
        split = batch.position.split
        self._looked_at.add(split)
        if (
            not batch.image.is_floating_point()
            or self._spec.transform.decode_as == "array"
        ):
            return
        ending = self._spec.endings.get(split)
        check_floats(ending, split)
        if self.rank == 0 and not (ending and ending.is_own):
            _logger.warning(
                "transform.%s returns float images, which are taken as they are: float32 travels, four times the "
                "bytes of uint8%s",
                split,
                ", and augment.mean and augment.std apply to them"
                if self.augment and not ending
                else "",
            )

    def _awaited(self) -> str:
        """Name what holds up a batch."""
        if self._running.why is not None:
            return "the stream starts again for it"
        return self.account.chronicle.awaited(self._supervisor)

    def _reach(self, at: MicroBatchId, goes_on: bool) -> None:
        """Go to a place of the schedule, so that its micro-batch comes next.

        A stream can start anywhere. It is read on where that costs less than a start.

        Args:
            goes_on: whether the next epoch comes after a validation.
        """
        if self._running.why is None:
            num = self._course.before(at)
        else:
            num = None
        if num is None or not self._reads_on(at, num):
            self._seek(at, goes_on)
            num = self._course.before(at)
            assert num is not None, "a stream begins at the step that it was opened for"
        for _ in range(num):
            self._discard()

    def _reads_on(self, at: MicroBatchId, num: int) -> bool:
        """Return whether to read on, over a number of batches, and not to start again behind them."""
        is_far = (
            num * self.world_size * self.plan.config.micro_batch_size
            > self._start_images
        )
        stands = self._course.next
        if not self._moves or stands is None:
            return not is_far
        if (
            num or self._course.is_at_start
        ):  # where batches come one after the other, nobody needs to know
            return not self._moves(Move(place_of(stands), place_of(at), leaves=is_far))
        return True

    def _seek(self, at: MicroBatchId, goes_on: bool) -> None:
        """Start the stream again, at the step of a micro-batch."""
        self._running.end(LEFT)
        fingerprint = self.plan.fingerprint
        num_steps = self.plan.steps_per_epoch
        if at.split == "train":
            self._open(Cursor(at.epoch, at.step, fingerprint))
        elif goes_on and at.step == 0:
            self._open(Cursor(at.epoch, num_steps, fingerprint))
        else:
            self._open(
                Cursor(at.epoch, num_steps, fingerprint),
                Segment("val", at.epoch, at.step, self.plan.val_steps),
            )

    def _discard(self) -> None:
        if next(self._batches, None) is None:
            self._check_running()
            raise RaypipeError(
                f"rank {self.rank}: the stream ended early: please report this as a bug"
            )
        self._course.take()


def _by_epoch(plan: Plan, cursor: Cursor) -> Iterator[tuple[int, dict[Split, Segment]]]:
    """The segments from a place on, by epoch."""
    for number, segments in groupby(
        plan.segments(cursor), lambda segment: segment.epoch
    ):
        yield number, {segment.split: segment for segment in segments}


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
        self._loader._check_running()
        return self._loader._next_epoch()

    def __iter__(self) -> Iterator[Epoch]:
        try:
            while (epoch := next(self, None)) is not None:
                yield epoch
        finally:
            self._loader._leave()
