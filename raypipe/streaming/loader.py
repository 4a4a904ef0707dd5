"""One rank's loader: rows → micro-batches on the device, augmented, epoch by epoch.

It checks the stream against the plan: if a micro-batch is not the one that the plan expects, the run ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from raypipe import __version__
from raypipe.config import AugmentConfig, TransformConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.device_decode import DeviceDecoder
from raypipe.device.mixing import check_mixable
from raypipe.device.prefetcher import Batch, asked_for_here, decoded_on_device, on_device
from raypipe.errors import CursorError, RaypipeError, SampleError
from raypipe.logs import STAGES, configure_logs, log_place
from raypipe.metrics.prometheus import TrainerMetrics
from raypipe.metrics.run_log import Folder
from raypipe.metrics.timing import StageClock, StageTimes, has_drained, mark
from raypipe.plan.cursor import CURSOR_FILE, Cursor
from raypipe.plan.places import MicroBatchId, Split
from raypipe.plan.schedule import Plan, Segment
from raypipe.rayext.trainer_notice import Notice
from raypipe.storage.files import write_text
from raypipe.storage.filesystem import join
from raypipe.stores.base import name_of, title_of
from raypipe.streaming.bad_samples import BadSampleBudget, record_bad
from raypipe.streaming.chronicle import Chronicle
from raypipe.streaming.digest import settings_of
from raypipe.streaming.running import EXHAUSTED, Running
from raypipe.streaming.spec import StreamSpec
from raypipe.streaming.stateful import Stateful, latest_of_train, numbers_in, report, restore
from raypipe.transform.columns import SampleColumns
from raypipe.transform.fields import IMAGE, VIEW, MicroBatch
from raypipe.transform.sizes import Size, size_in
from raypipe.transform.views import makes_views

_logger = logging.getLogger(__name__)


class Source(NamedTuple):
    """What a rank's batches are made of.

    Attributes:
        batches: micro-batches in host memory.
        supervisor: handle of who supervises the stream, if anybody does.
        actors: transform actors that the pool has at most, where this rank knows it.
        draws_globally: who asks for a batch makes it, and draws from the generators of the process: that thread
            must be the consumer's.
        end: ends what else was started for it, once the batches are closed.
    """

    batches: Iterator[MicroBatch]
    supervisor: Any = None
    draws_globally: bool = False
    actors: int = 0
    end: Callable[[], None] = lambda: None


_INTERVAL_S = 10.0


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
        first_batch_s: seconds from the start of the stream to its first batch; 0 before it.
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
        open_at: Callable[[Cursor], Source],
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
        self._clocks: dict[Split, StageClock] = {"train": StageClock(), "val": StageClock()}
        self._counts: dict[Split, StageTimes] = {"train": StageTimes(), "val": StageTimes()}
        # Where the compute of the micro-batch that was handed out last began, and its split.
        self._computing: tuple[Split, Any] | None = None
        self._budget = BadSampleBudget(spec.transform.max_bad_fraction, spec.transform.bad_grace)
        self.chronicle = Chronicle(world_size, rank, folder)
        self._running = Running(self.chronicle.close)
        self._running.close_with(self)
        self.interval_s, self._actors, self._skips = _INTERVAL_S, 0, False
        self._supervisor: Any = None
        self._awaited: Callable[[], str] = str
        self.notice = Notice(functools.partial(_tell_notice, self.chronicle, self.exported))
        self._begin_interval()
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
        self._epochs, self.first_batch_s = Loader._each_epoch(weakref.proxy(self)), 0.0
        self._batches: Any = None  # an iterator of Batch

    def _open(self) -> None:
        """Start the stream."""
        move: Callable[[Iterable[MicroBatch]], Iterator[Batch]]
        if self.rank == 0 and next(self.plan.segments(self._start), None) is None:
            _logger.warning(
                "all %d epochs are done, and nothing is left to train; to go on, set a larger plan.epochs",
                self.num_epochs,
            )
        self._created = time.perf_counter()
        self.exported.begin()
        source = self._open_at(self._start)
        self._supervisor, self._actors = source.supervisor, source.actors
        self._awaited = functools.partial(self.chronicle.awaited, self._supervisor)
        seed_of, transform = self.plan.micro_batch_seed, self._spec.transform
        on_gpu = transform.decode == "gpu"
        if on_gpu:
            decoder = DeviceDecoder(transform.final_size, self.device, transform.apply_exif)
            self.jpeg_decoder = decoder.library
            move = functools.partial(
                decoded_on_device,
                decoder=decoder,
                seed_of=seed_of,
                depth=self._depth,
                on_decoded=functools.partial(_add_decode, self._clocks),
                size_of=functools.partial(_size_at, transform, self.plan),
            )
        else:
            move = functools.partial(
                on_device,
                device=self.device,
                seed_of=seed_of,
                depth=self._depth,
                keep=self.keep,
                on_copied=functools.partial(self._clocks["train"].add, "transfer"),
            )
        in_thread = on_gpu or self.device.type == "cuda"
        if source.draws_globally and in_thread:
            self._batches = asked_for_here(source.batches, move, self._depth)
        else:
            self._batches = move(source.batches)
        closes = (functools.partial(_close, generator) for generator in (source.batches, self._batches))
        has_actors, unfollow = self._supervisor is not None, self.chronicle.unfollow
        self._running.begin(has_actors, source.end, self.exported.end, unfollow, *closes)

    def epochs(self) -> Epochs:
        """The remaining epochs, each once; of the first, the rest of it.

        A `for` loop over them ends the stream when it is left: at its end, by `break`, or by an exception.
        """
        return Epochs(self)

    def _stand_at(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.chronicle.step = self.global_step

    def _each_epoch(self) -> Iterator[tuple[int, _Part, _Part]]:
        """Number, training and validation of each epoch."""
        at, total = self.cursor, self.plan.config.epochs * self.plan.steps_per_epoch
        begins = {"workers": self.world_size, "actors": self._actors, "from_step": self.global_step}
        validates = at.step == self.plan.steps_per_epoch and self.plan.has_val(at.epoch)
        self.chronicle.begin(
            validates, functools.partial(settings_of, self._spec, **begins, to_step=total), self._supervisor
        )
        for number, segments in groupby(self.plan.segments(self._start), lambda segment: segment.epoch):
            parts: dict[Split, Segment] = {segment.split: segment for segment in segments}
            train = _Part(self, parts.get("train"))
            val = _Part(self, parts.get("val"), after=train)
            yield number, train, val
            val.skip()
        assert self._batches is None or next(self._batches, None) is None, "the stream is longer than the plan"
        self._running.end(EXHAUSTED)

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
        begun = mark(self.device)
        if computing := self._computing:
            self._clocks[computing[0]].add("compute", computing[1], begun)
        with self.chronicle.waiting("the checkpoint", whom):
            yield
        ended = mark(self.device)
        self._clocks["train"].add("checkpoint", begun, ended)
        if computing:
            self._computing = computing[0], ended

    def should_checkpoint(self) -> bool:
        """Tell all ranks alike whether to make a checkpoint now, since a node of the trainers is about to go.

        All ranks call it after each optimizer step. It is True within a second or so of a notice, and again every
        15 s or less until the node goes. Ray gives notices from version 2.60 on; before, it is False.
        """
        return self.notice.agreed(self.rank)

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

    def _begin_interval(self) -> None:
        self._interval = self.times(), time.perf_counter()

    def interval(self, **learnt: float) -> Interval:
        """Record the training since the last call, or since the epoch began; with a loss, also tell it.

        Args:
            learnt: loss, lr, …
        """
        (before, since), epoch, step = self._interval, self.cursor.epoch, self.cursor.step
        self._begin_interval()
        times, seconds = self._interval[0] - before, self._interval[1] - since
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
        last = epoch + 1 == self.num_epochs
        spec = self._spec
        readers = spec.pool.executions if self._supervisor is not None and "train" in spec.readers() else 0
        times, device = times or self.times(), self.device.type
        self.chronicle.diagnose(times, last, actors=self._actors, device=device, readers=readers)

    def strength(self, epoch: int, step: int) -> float:
        """The strength of the augmentation at a training step."""
        if self.augment is None:
            return 0.0
        return self.augment.config.strength.at(self.plan.progress(epoch, step))

    def _deliver(self, segment: Segment) -> Iterator[Batch]:
        """This rank's micro-batches of a segment."""
        split, epoch, per_step = segment.split, segment.epoch, self.plan.config.per_step
        self._skips, records = False, math.isfinite(self.interval_s)
        if split == "train":
            self._begin_interval()
        for step in range(segment.first_step, segment.num_steps):
            for micro in range(self.rank, per_step, self.world_size):
                batch = self._next(MicroBatchId(split, epoch, step, micro))
                ends_step = micro + self.world_size >= per_step
                if ends_step and split == "train":
                    self._stand_at(Cursor(epoch, step + 1, self.plan.fingerprint))
                elif ends_step and step + 1 == segment.num_steps:
                    self._stand_at(Cursor(epoch + 1, 0, self.plan.fingerprint))
                yield replace(batch, ends_step=ends_step)
                is_last = step + 1 == segment.num_steps
                is_due = is_last or time.perf_counter() - self._interval[1] >= self.interval_s
                if ends_step and split == "train" and is_due and records and not self._skips:
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
        asked = mark(self.device)
        if self._computing:
            split, since = self._computing
            self._clocks[split].add("compute", since, asked)
            self._computing = None
        is_first = self.first_batch_s == 0.0
        with self.chronicle.waiting("the first batch" if is_first else str(expected), self._awaited):
            batch = next(self._batches, None)
        if batch is None:
            self._check_running()
        drained = has_drained(asked)
        ready = mark(self.device)
        if is_first:
            self.first_batch_s = time.perf_counter() - self._created
            self._begin_interval()  # the start of the run is reported apart
        else:
            self._clocks[expected.split].add("wait", asked, ready)
            self._counts[expected.split] += StageTimes(micro_batches=1, drained=drained)
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
        if self.plan.sources:
            batch = replace(batch, source=self.plan.source_of(batch.index))
        num_images = int((batch.index >= 0).sum())
        self._counts[split] += StageTimes(images=num_images, read_s=batch.read_s, work_s=batch.work_s)
        if self.augment is not None:
            batch = self._augmented(batch, self.augment)
        augmented = mark(self.device)
        self._clocks[split].add("augment", ready, augmented)
        self._computing = (split, augmented)
        return batch

    def _judge(self, batch: Batch) -> None:
        """Handle bad samples that only the device's decoder found: too late for substitutes, they get weight 0."""
        store = self._spec.stores[batch.at.split]
        bad = []
        for row, error in batch.failed.items():
            index = int(batch.index[row])
            where = {"store": store.address, "index": index, "name": name_of(store, index)}
            bad.append({**where, "substitute": None, "error": error, "fault": SampleError.fault})
        if bad:
            record_bad(self._spec.quarantine, batch.at, bad, by="device")
            if self._spec.transform.on_bad_sample == "raise":
                title = title_of(store.address, bad[0]["index"], bad[0]["name"])
                raise SampleError(f"{title}: {bad[0]['error']}")
        self._budget.spend(bad, len(batch.index))

    def _augmented(self, batch: Batch, augment: DeviceAugment) -> Batch:
        if batch.views:
            if batch.at.split == "train":
                strength = self.strength(batch.at.epoch, batch.at.step)
                views = augment.of_views(batch.views, seed=batch.seed, strength=strength)
            else:
                views = {name: augment.normalize(view) for name, view in batch.views.items()}
            return batch.with_fields({f"{VIEW}.{name}": view for name, view in views.items()})
        if batch.at.split != "train":
            return batch.with_fields({IMAGE: augment.normalize(batch.image)})
        counts = batch.index >= 0
        counts[list(batch.failed)] = False
        image, mixed = augment(
            batch.image,
            batch.target,
            counts,
            seed=batch.seed,
            strength=self.strength(batch.at.epoch, batch.at.step),
        )
        return batch.with_fields({IMAGE: image}, mixed=mixed)


def _tell_notice(chronicle: Chronicle, exported: TrainerMetrics, text: str) -> None:
    chronicle.record("fault", f"fault: {text}", text=text)
    exported.add({"stream_faults_total": 1}, kind="notice")


def _close(batches: Any) -> None:
    """Close what may be a generator."""
    with contextlib.suppress(ValueError):  # a thread that did not end in time is still in it
        getattr(batches, "close", lambda: None)()


def _add_decode(clocks: Mapping[Split, StageClock], at: MicroBatchId, since: Any, until: Any) -> None:
    clocks[at.split].add("decode", since, until)


def _size_at(transform: TransformConfig, plan: Plan, at: MicroBatchId) -> Size:
    return size_in(transform, at.split, at.epoch, plan.bucket_of(at))


class _Part:
    """What is left of an epoch's training, or of its validation, for this rank.

    Args:
        loader: a weak reference to it.
        segment: its place in the plan; None = it is empty.
        after: what comes before it.
    """

    def __init__(self, loader: Any, segment: Segment | None, after: _Part | None = None) -> None:
        self.segment, self.begun = segment, False
        self._batches = Loader._deliver(loader, segment) if segment else iter(())
        self._loader, self._after, self._skipped = loader, after, False

    def take(self) -> Batch:
        """The next batch, see `Pass`."""
        self.begun = True
        if self._after:
            self._after.skip()
        if self._skipped:
            assert self.segment
            raise RaypipeError(
                f"the rest of epoch {self.segment.epoch}'s {self.segment.split} batches was skipped when what "
                "comes after them was asked for: a stream has one order, so validate at the end of an epoch"
            )
        return next(self._batches)

    def skip(self) -> None:
        """Skip what was not taken, here and before it."""
        if self._after:
            self._after.skip()
        for _ in self._batches:
            self._skipped = self._loader._skips = True


class Pass(Iterator[Batch]):
    """This rank's micro-batches of an epoch's training, or of its validation: each once, in order.

    After a resume only the rest of them, possibly none.

    Attributes:
        segment: its place in the plan; None = it is empty.
    """

    def __init__(self, loader: Loader, part: _Part) -> None:
        self._loader, self._part, self.segment = loader, part, part.segment
        segment = self.segment
        self._len = (segment.num_steps - segment.first_step) * loader.accumulation if segment else 0

    @property
    def begun(self) -> bool:
        """Whether any batch was asked for."""
        return self._part.begun

    def __len__(self) -> int:
        """Micro-batches in all, those that were taken included."""
        return self._len

    def __next__(self) -> Batch:
        return self._part.take()


@dataclass(frozen=True)
class Epoch:
    """One epoch, or the rest of it after a resume.

    Attributes:
        number: the epoch's number, from 0.
        train: its training batches.
        val: the batches of the validation after it; empty if the plan has none.
    """

    number: int
    train: Pass
    val: Pass


class Epochs(Iterator[Epoch]):
    """The remaining epochs of a loader, each once. A loop over them ends the stream when it is left."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __next__(self) -> Epoch:
        self._loader._check_running()
        number, train, val = next(self._loader._epochs)
        return Epoch(number, Pass(self._loader, train), Pass(self._loader, val))

    def __iter__(self) -> Iterator[Epoch]:
        try:
            while (epoch := next(self, None)) is not None:
                yield epoch
        finally:
            self._loader._running.end("the loop over its epochs was left")
