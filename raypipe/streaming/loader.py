"""Loader of one rank: takes the stream in the order of the plan, and tracks the run's place.

If a micro-batch is not the one that the plan expects, the run ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch

from raypipe.config import AugmentConfig
from raypipe.device.augment import settings_of_device
from raypipe.device.prefetcher import Batch, facts_of, on_device
from raypipe.device.stage import DeviceStage
from raypipe.errors import ConfigError, RaypipeError
from raypipe.logs import configure_logs, log_place
from raypipe.metrics.flags import write_flag
from raypipe.metrics.records import RunFolder
from raypipe.metrics.timing import StageTimes
from raypipe.mistakes import Unlike
from raypipe.plan.places import (
    CURSOR_FILE,
    PADDING,
    Cursor,
    MicroBatchId,
    Split,
    TrainStep,
)
from raypipe.plan.schedule import Segment
from raypipe.rayext.agreement import Agreement, in_train_function, processes
from raypipe.rayext.trainer_notice import Notice
from raypipe.section import check
from raypipe.storage.files import write_text
from raypipe.storage.filesystem import join_address
from raypipe.stores.base import name_of
from raypipe.streaming.decoding import Decoding
from raypipe.streaming.digest import plain_settings
from raypipe.streaming.epochs import Batches, Epoch
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.loop_progress import Progress
from raypipe.streaming.metrics import LoaderMetrics
from raypipe.streaming.rank_stream import HostSource, RankStream
from raypipe.streaming.record.digest_log import DigestLog
from raypipe.streaming.record.opened import stream_record
from raypipe.streaming.saving.checkpoints import Checkpoint, read_whole_checkpoint
from raypipe.streaming.saving.run_checkpoints import RunCheckpoints
from raypipe.streaming.saving.saved_model import (
    SavedModel,
    input_of,
    saved_model,
    val_of,
)
from raypipe.streaming.saving.stateful import (
    IN_CHECKPOINT,
    NUMBERS,
    Stateful,
    as_plain_numbers,
    latest_of_train,
    of_kind,
    report,
    restore,
    states_of,
)
from raypipe.streaming.shares import ALONE, Share
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.columns import SampleColumns
from raypipe.transform.fields import MicroBatch

_logger = logging.getLogger(__name__)

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
    after its last epoch, with the block of `with raypipe.loader(spec) as loader:`, by `close`, when the last
    reference to the loader and its epochs is gone, and at exit.

    Attributes:
        plan: the run's plan.
        rank: number of this process's share; with a mesh, several processes have one.
        world_size: W, the number of shares.
        device: where batches are.
        keep_batches: batches that stay valid besides the newest.
        augment: the augmentation on the device; None = there is none.
        metrics: measurements, metrics and records of this rank; a training loop may add its loss.
        notice: notices that nodes of the trainers will go.
        stopping: whether the run was asked to stop, as `should_checkpoint` has seen it: by `raypipe stop RUN_DIR`,
            or see `stop_when`.
        model_name: name of the model that the loop trains, for its checkpoints.
    """

    def __init__(
        self,
        spec: StreamSpec,
        source: HostSource,
        share: Share = ALONE,
        device: torch.device | None = None,
        *,
        cursor: Cursor | None = None,
        begins: bool = True,
        augment: AugmentConfig | None = None,
        dtype: torch.dtype | None = None,
        prefetch_factor: int = 2,
        keep_batches: int = 0,
        folder: RunFolder | None = None,
        start: Checkpoint | RunFolder | None = None,
        checkpoints: RunCheckpoints | None = None,
        digest_log: DigestLog | None = None,
        trace: str = "",
        trace_s: float = 60.0,
    ) -> None:
        """
        Args:
            source: the stream in host memory.
            share: this process's share of it.
            cursor: the place where it starts; None = the run's beginning.
            begins: whether it starts now; otherwise `load_state_dict` says where.
            folder: where rank 0 records the run; None = nowhere.
            start: the checkpoint that `restore` loads until there is a newer one.
            checkpoints: those that `checkpoint` makes; None = nowhere.
            digest_log: this rank's record of hashes; None = none is written.
            device, augment, dtype, prefetch_factor, keep_batches, trace, trace_s: see `raypipe.loader`.
        """
        self._process = share.process
        configure_logs(spec.log_format, run=spec.run, rank=self._process)
        self.plan = spec.plan
        self.device = device or torch.device("cpu")
        self.rank = share.rank
        self.world_size = share.world_size
        self.keep_batches = keep_batches
        self._spec = spec
        self._user_augment = augment
        self._dtype = dtype
        self.model_name = ""
        self._start = start
        self._lacks_weights = start is not None
        self._folder = folder
        self._checkpoints = checkpoints
        self._device_stage = DeviceStage(
            augment, self.device, dtype, spec.device_input, tells=self._process == 0
        )
        self._has_told_label = False
        self._digest_log = digest_log
        self.metrics = self._observed(trace, trace_s)
        to_device = self._to_device(prefetch_factor, source.draws_globally)
        self._stream = RankStream(self.plan, share, source, to_device, self.metrics)
        # at exit all streams are closed before, with Ray still there
        weakref.finalize(self, self._stream.drop).atexit = False
        self.notice = Notice()
        self.stopping = False
        # The loop over the epochs that runs; None = none.
        self._loop: object | None = None
        self._go_to(cursor)
        if begins:
            self._begin()
        try:
            self.augment = self._device_stage.augment  # the pool starts meanwhile
        except BaseException:
            self.close()  # the error's traceback refers to it
            raise

    def _to_device(
        self, prefetch_factor: int, draws_globally: bool
    ) -> functools.partial[Iterator[Batch]]:
        """The way of a stream's micro-batches to the device, as batches."""
        return functools.partial(
            on_device,
            device=self.device,
            seed_of=self.plan.micro_batch_seed,
            depth=prefetch_factor,
            keep=self.keep_batches,
            ring=False if draws_globally else None,
            on_copied=functools.partial(self.metrics.clock.add, "train", "transfer"),
            decode=self._decoding(),
            facts_of=functools.partial(facts_of, self.plan, self.world_size),
            hash_of=batch_hash if self._digest_log else None,
        )

    def _observed(self, trace: str, trace_s: float) -> LoaderMetrics:
        """The metrics of this rank, with the observers that were asked for."""
        metrics = LoaderMetrics(
            self._spec.run,
            self.plan,
            self.device,
            self._process,
            self.world_size,
            self._device_stage.config,
            self._folder,
        )
        if self._digest_log:
            metrics.observers.insert(0, self._digest_log)
        if trace:
            metrics.trace(trace, trace_s, self._spec.run, self._process)
        return metrics

    def _decoding(self) -> Callable[[MicroBatch], MicroBatch] | None:
        """The decoder of images on the device; None = the CPU decodes."""
        if self._spec.resident is not None:
            return self._spec.resident
        if self._spec.transform.decode != "device":
            return None
        return Decoding(self._spec, self.device, self.metrics.clock.add)

    def _go_to(self, cursor: Cursor | None) -> None:
        self._progress = Progress(self.plan, self.plan.start(cursor))
        self._is_recorded = False
        # What the loader holds refers to it weakly, or not at all: a ring would keep a dropped one running.
        self._training: weakref.ref[Batches] | None = None

    def _begin(self) -> None:
        """Start the stream at the loader's place."""
        start = self._progress.start
        if self._process == 0 and self._progress.is_at_end:
            _logger.warning(
                "all %d epochs are done, and nothing is left to train; to go on, set a larger plan.epochs",
                self.num_epochs,
            )
        self.metrics.begin(self._progress)
        self._stream.open(next(self.plan.micro_batches(start), None))

    # Epochs and their batches

    def epochs(self) -> Iterator[Epoch]:
        """Iterate over the remaining epochs; the first may be the rest of one.

        Each call begins after the last whole step, also where an earlier loop was left. The stream stays open for
        as long as the loader, an epoch or its batches are referred to.
        """
        self._stream.check()
        self._progress.leave_loop()
        self._loop = loop = object()
        try:
            while (epoch := self._next_epoch()) is not None:
                yield epoch
        finally:
            if self._loop is loop:
                self._loop = None

    def validation(self) -> Batches:
        """Return the validation, for a loop that validates when the plan does not: before the training, in the
        middle of an epoch, or after the last one.

        All ranks iterate it. Where actors make the stream, they start again for it, and then for the training.
        """
        if not self.plan.val_steps:
            return Batches(None, self)
        epoch = max(0, self._progress.epoch)
        return Batches(Segment("val", epoch, 0, self.plan.val_steps), self)

    def close(self) -> None:
        """End the stream and its record now, once the checkpoint under way is whole. A loader that was dropped
        needs no closing.

        Raises:
            RaypipeError: that checkpoint cannot be written.
        """
        try:
            if self._checkpoints and self._checkpoints.is_writing:
                with self.metrics.saving(self._name_awaited):
                    self._checkpoints.wait()
            if self._checkpoints:
                self._checkpoints.check()
        finally:
            self._stream.close("the loader was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(Exception):  # must not hide the original error
            self.close()

    @functools.cached_property
    def _agreement(self) -> Agreement:
        """The agreement of the run's processes, which may know of each other only after the loader was made."""
        return Agreement(*(processes() or (0, 1)))

    def _next_epoch(self) -> Epoch | None:
        """Leave the epoch that was handed out last, and hand out the next; None = there is none."""
        self._stream.check()
        progress = self._progress
        if progress.segments:
            self.metrics.settle()
            progress.leave_epoch()
            self.metrics.move()
            self.metrics.end_epoch(progress.epoch)
        if not self._is_recorded:
            self._is_recorded = True
            if isinstance(self._start, Checkpoint):
                self._start = self._start._replace(state=b"")  # its memory
            self._begin_record()
        self._training = None
        if not progress.next_epoch():
            self._stream.finish()
            return None
        train = Batches(progress.segments.get("train"), self)
        val = Batches(progress.segments.get("val"), self)
        self._training = weakref.ref(train)
        return Epoch(progress.epoch, train, val)

    def _begin_record(self) -> None:
        cursor = self.cursor
        total = self.plan.config.epochs * self.plan.steps_per_epoch
        is_at_end = cursor.step == self.plan.steps_per_epoch

        def described() -> dict[str, dict[str, Any]]:
            settings = plain_settings(
                self._spec,
                workers=self.world_size,
                actors=self.metrics.actors,
                from_step=self.global_step,
                to_step=total,
            )
            if self._user_augment:
                settings |= settings_of_device(self._user_augment)
            stream = stream_record(
                self._spec, self._user_augment, self._dtype, self.device
            )
            return {"settings": settings, "stream": stream}

        validates = is_at_end and self.plan.has_val(cursor.epoch)
        self.metrics.run_log.begin(validates, described, self._stream.supervisor)

    def _deliver(self, batches: Batches, place: MicroBatchId) -> Batch:
        """The batch of a place of an epoch's training or of a validation."""
        is_train = place.split == "train"
        if is_train and not self._is_of_epoch(batches):
            raise RaypipeError(
                f"the rest of epoch {place.epoch}'s train batches was skipped when the next epoch was asked "
                "for, or load_state_dict was called: take an epoch's training before the next epoch"
            )
        is_at_end = not is_train and self._is_at_end(batches)
        self.metrics.begin_batch(place)
        if place.micro == self.rank:
            self.notice.begin_step()
        with self._stream.failing():
            batch = self._finished(self._stream.take(place))
        self._progress.take(batch, is_at_end)
        self.metrics.end_batch(batch)
        if self._digest_log:
            self._digest_log.add(batch)
        return batch

    def _finished(self, batch: Batch) -> Batch:
        """A batch that has arrived, augmented; its compute begins."""
        position = batch.position
        log_place(
            split=position.split,
            epoch=position.epoch,
            step=self.plan.step_of_split(position),
        )
        self.metrics.export()
        self.metrics.num_bad += batch.num_bad
        strength = self.metrics.strength(self.plan.global_step(position))
        batch = self._device_stage(batch, strength)
        if self._digest_log and self.device.type == "cpu":
            batch = replace(batch, finished_hash=batch_hash(batch))
        num_images = int((batch.index >= 0).sum())
        amounts = {
            "images": num_images,
            "remembered": num_images * batch.num_remembered,
            "read_s": batch.read_s,
            "work_s": batch.work_s,
            "outage_s": batch.outage_s,
        }
        self.metrics.tell("handed_out", position, amounts)
        if not self._has_told_label:
            self._warn_of_labels(batch)
        return batch

    def _warn_of_labels(self, batch: Batch) -> None:
        """Warn once of a class that a loss does not take: on a GPU it ends the process, far from its cause."""
        target = batch.target_host
        if target.dtype != np.int64 or target.ndim != 1:
            return
        is_negative = (target < 0) & (batch.index >= 0)
        if is_negative.any():
            row = int(is_negative.argmax())
            self._has_told_label = True
            _logger.warning(
                f"{batch.position.split} sample {int(batch.index[row])} has label {target[row]}: losses take "
                "classes from 0. Give it a class, leave such samples out with store.exclude, or pass the loss "
                f"ignore_index={target[row]}"
            )

    def _is_in(self, epoch: Epoch) -> bool:
        """Return whether an epoch was handed out last, and the loader was not told to continue elsewhere since."""
        return self._training is not None and self._training() is epoch.train

    def _is_of_epoch(self, batches: Batches) -> bool:
        """Return whether batches are the training or the validation of the epoch under way."""
        segments = self._progress.segments.values()
        return any(batches.segment is segment for segment in segments)

    def _is_at_end(self, batches: Batches) -> bool:
        """Return whether a validation comes after its epoch's training, of which no loop takes more."""
        training = self._training() if self._training else None
        segment = batches.segment
        is_of_epoch = segment is not None and segment.epoch == self._progress.epoch
        return is_of_epoch and not (training and training.is_open)

    def _leave_early(self, batches: Batches) -> None:
        """A loop has left batches before their end; a forgotten loop may end at any later time."""
        segment = batches.segment
        if segment is None or not self._is_of_epoch(batches):
            return
        if segment.split == "train" or self._is_at_end(batches):
            self._progress.leave_early(segment.split)

    def _finish(self, batches: Batches) -> None:
        """Batches were taken to their end."""
        self.metrics.settle()
        self.metrics.export(at_once=True)
        segment = batches.segment
        if segment is None or not self._is_of_epoch(batches):
            return
        if segment.split == "val":
            is_end = self._is_at_end(batches)
        else:
            is_end = not self.plan.has_val(segment.epoch)
        if is_end:
            self.metrics.end_epoch(segment.epoch)

    # The run's place, and checkpoints

    @property
    def cursor(self) -> Cursor:
        """Place after the last fully delivered step."""
        return self._progress.cursor

    @property
    def place(self) -> Cursor:
        """Place from which a resume does what the loop would do next.

        It is the cursor. Once a loop has left an epoch's batches before their end (by `break`, not by an
        exception that is being handled, nor by leaving the loop over the epochs), it is after them.
        """
        is_in_loop = self._loop is not None and sys.exc_info()[0] is None
        return self._progress.place(is_in_loop)

    @property
    def num_beyond(self) -> int:
        """Batches that this rank was handed beyond `place`: some of a training step's."""
        last = self._progress.in_step
        if last is None or self.place != self.plan.normalized(self.cursor):
            return 0
        return last.micro // self.world_size + 1

    def state_dict(self) -> dict[str, Any]:
        """The run's place after the last step of which all batches were handed out; plain numbers and text.

        Inside of the loop over an epoch's batches that is between them. After it, also after a `break`, it is
        behind them: a resumed run begins with what the loop would have done next.
        """
        if self._digest_log:
            self._digest_log.flush()
        return asdict(self.place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, made with any number of workers. All ranks call it, and iterate again.

        A loader in a train function continues from Ray Train's checkpoint by itself.

        Raises:
            CursorError: this is not a loader's state, or it belongs to a different plan.
        """
        cursor = Cursor.from_dict(state)
        self.plan.check(cursor)
        was_used = bool(self.first_batch_s) or self._is_recorded
        is_there = cursor == self._progress.start and not was_used
        if not (is_there and self._stream.is_running):
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
        metrics = as_plain_numbers(metrics)
        with self.metrics.saving(
            lambda: "Ray Train writes it, or other ranks have not reported yet"
        ):
            report(metrics, parts, self._process, self.place, self._described())
        self._start = None  # Ray Train has a newer one
        self._note_report(metrics)

    def checkpoint(
        self, metrics: Mapping[str, Any] | None = None, /, **parts: Stateful | None
    ) -> None:
        """Write a checkpoint into the loader's `run_dir`, in the background: states and the run's place.

        All ranks call it, after a whole optimizer step or after a validation. The states are copied now, and a
        thread of rank 0 writes them while the loop continues; until it has, a resume begins with the checkpoint
        before. It returns only then if the run ends or stops here. Older checkpoints are removed.

        Args:
            metrics: numbers are kept in it, and recorded; in a train function, Ray Train gets them all.
            parts: see `report`; None = a part that this run lacks.

        Raises:
            ConfigError: see `report`; or the loader has no `run_dir`.
            RaypipeError: the checkpoint before could not be written.
        """
        if self._checkpoints is None:
            raise ConfigError(
                "loader.checkpoint writes into the run's folder: name one, raypipe.loader(spec, run_dir=…), or "
                "call loader.report in a train function"
            )
        numbers = as_plain_numbers(metrics or {})
        with self.metrics.saving(self._name_awaited):
            state = states_of(parts)
            if self._process == 0:
                self._write(self._checkpoints, state, numbers)
            if in_train_function():
                import ray.train

                ray.train.report(numbers)  # all ranks wait for each other
        self._note_report(numbers)

    def _write(
        self,
        checkpoints: RunCheckpoints,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any],
    ) -> None:
        tell = self.metrics.tell
        notice = self.notice

        def after(seconds: float) -> None:
            tell("checkpointed")
            notice.saved_in(seconds)

        place = self.place
        checkpoints.save(
            state,
            place,
            of_kind(metrics, IN_CHECKPOINT),
            self._described(),
            self.metrics.run_log.sync,
            after,
        )
        is_end = next(self.plan.segments(place), None) is None
        # When rank 0 has reported, any rank may end, which ends all.
        if notice.is_last or self.stopping or is_end:
            checkpoints.wait()

    def _name_awaited(self) -> str:
        """Name what a checkpoint waits for."""
        if self._checkpoints and self._checkpoints.is_writing:
            return f"the previous one is being written to {self._checkpoints.run_uri}"
        if self.world_size == 1:
            return "Ray Train's controller has not noted it yet"
        return "other ranks have not reached it yet, or Ray Train's controller has not noted it"

    def _note_report(self, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a checkpoint, unless the loop records its own."""
        if self._lacks_weights and self._process == 0:
            _logger.warning(
                "the stream continued from a checkpoint, and loader.restore was not called: unless you loaded its "
                "states yourself, new weights are trained from the middle of the run on"
            )
        self._lacks_weights = False
        if not self.metrics.is_run:
            self.metrics.record("report", values=of_kind(metrics, NUMBERS))
            self.metrics.run_log.sync()

    def _described(self) -> dict[str, Any]:
        """Describe the inputs of the model that the loop trains, for its checkpoints."""
        augment = self._user_augment
        endings = self._spec.endings
        ending = endings.get("val", endings.get("train"))
        if self.augment and not (ending and ending.normalizes):
            # It has the normalization of its module.
            augment = self.augment.config
        return input_of(self._spec, augment, self.model_name)

    def should_checkpoint(
        self, every_s: float = math.inf, at_once: bool = False
    ) -> bool:
        """Return, on all ranks alike, whether to make a checkpoint now: a node of the trainers will go, the last
        checkpoint is old, or the run was asked to stop, which `stopping` then says.

        All ranks call it after each optimizer step, and after a validation; they wait for each other about once
        a second. It is True within about two seconds of a notice, and again at least every 15 s. Once the time is
        too short for another step and its checkpoint, it is True for the last time: the next batch ends the train
        function with an error that Ray Train counts as a preemption, and the trainers are started again. Ray gives
        notices from version 2.60 on.

        Args:
            every_s: age of the last checkpoint, in seconds, at which one is made in any case.
            at_once: whether the ranks wait for each other now in any case; the same on all ranks.

        Raises:
            RaypipeError: rank 0 could not write the last `checkpoint`.
        """
        if self._checkpoints:
            self._checkpoints.check()
        is_end = self._progress.ended_split

        def decide() -> tuple[tuple[bool, bool, bool], bool]:
            stops = self.metrics.run_log.stops
            is_old = self.metrics.checkpoint_age_s >= every_s
            is_noticed = self.notice.is_due(self.metrics.tell_notice, at_end=is_end)
            is_due = is_noticed or is_old or stops
            return (is_due, self.notice.is_last, stops), self.notice.is_near()

        decision = self._agreement.on(decide, at_once or is_end)
        if decision is None:
            return False
        is_due, self.notice.is_last, self.stopping = decision
        if self.stopping:
            self.metrics.run_log.answer_stop()
        return is_due

    def stop_when(self, asked: Callable[[], bool]) -> None:
        """Let a thread of rank 0 call a function once a second, until it says that the run was asked to stop.

        All ranks see it at the same step: `should_checkpoint` is True, and then `stopping`. `raypipe stop` on the
        run's folder works besides.
        """
        run_log = self.metrics.run_log
        by_file = run_log.stop_requested
        run_log.stop_requested = lambda: asked() or by_file()

    def restore(self, **parts: Stateful | None) -> SavedModel | None:
        """Load the states of the latest checkpoint into the parts; nothing where there is none.

        It is the one at whose place this loader began, or one that `report` has made since.

        Returns:
            The checkpoint: its metrics, and the states of all parts; None = there is none.

        Raises:
            ConfigError: the checkpoint is damaged, lacks a part, or has one of another make.
        """
        self._lacks_weights = False
        start = self._start or latest_of_train()
        if start is None:
            return None
        checkpoint = read_whole_checkpoint(start)
        # the user's own stream may name the same code
        is_named = checkpoint.input.get("val") == val_of(self._spec)
        saved = saved_model(checkpoint, is_named)
        restore(parts, saved.state, saved.address)
        return saved

    def save(self, folder: str | Path) -> None:
        """Write the run's place into a checkpoint's folder, for checkpoints that `report` does not make.

        A later `raypipe.loader` continues from there: by itself from Ray Train's checkpoint, else by `start_from`.
        """
        with self.metrics.saving(lambda: f"{folder} is written"):
            write_text(join_address(str(folder), CURSOR_FILE), self.place.to_json())
        self.metrics.tell("checkpointed")

    def flag(self, batch: Batch, reason: str) -> None:
        """Record in the run's folder that a batch needs a look: its place, its samples' names, and your reason.

        Any rank may call it, at any time after the batch was handed out. `raypipe when RUN --flagged` lists all
        flags, and `raypipe replay` shows the batch. Storage that fails is a warning.

        Raises:
            ConfigError: the loader has no `run_dir`.
        """
        if self._folder is None:
            raise ConfigError(
                "loader.flag writes into the run's folder: name one, raypipe.loader(spec, run_dir=…)"
            )
        place = batch.position
        store = self._spec.stores[place.split]
        indices = batch.index[batch.index != PADDING].tolist()
        samples = [{"index": index, "name": name_of(store, index)} for index in indices]
        # metrics.jsonl counts steps from 1
        step = self.plan.global_step(place) + (place.split == "train")
        flag = {
            "place": str(place),
            "epoch": place.epoch,
            "step": step,
            "rank": self.rank,
            "micro": place.micro,
            "reason": check("loader.flag: reason", reason, str),
            "time": time.time(),
            "samples": samples,
        }
        try:
            write_flag(self._folder, place, flag)
        except (pa.ArrowException, OSError, RaypipeError) as error:
            _logger.warning("the flag of %s cannot be written: %s", place, error)

    @property
    def first_batch_s(self) -> float:
        """Seconds from the start of the stream to its first batch; 0 before it."""
        return self.metrics.clock.first_batch_s

    @property
    def pool_has_begun(self) -> bool:
        """True once the pool makes batches; before that, this rank makes them itself, see `pool.head_start`."""
        return self._stream.has_begun

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

    def times(self, split: Split = "train") -> StageTimes:
        """Measurements of this rank in one split, without the wait for the very first batch.

        Transfers are counted with "train". On CUDA the newest micro-batches may be missing.
        """
        return self.metrics.clock.times(split)
