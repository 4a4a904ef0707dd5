"""The training loop: one optimizer step per step of the plan, for any number of workers.

Each micro-batch is its own forward and backward; gradients are averaged over the M of a step, over this
rank's by scaling the loss and over ranks by DDP. So one worker with accumulation and M workers without
it follow the same loss curve to rounding; with the sums of learning.py, bit by bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator
from typing import IO, Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2._internal.execution import context as train_context
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from raypipe.config import RunConfig
from raypipe.device.mixing import mixed_cross_entropy
from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError, RaypipeError
from raypipe.logs import STAGES, progress
from raypipe.metrics.timing import StageTimes, diagnose
from raypipe.plan.schedule import MicroBatchId
from raypipe.storage.lease import is_held
from raypipe.streaming.handover import feed
from raypipe.streaming.rank_stream import Feed, SegmentFeed
from raypipe.streaming.spec import StreamSpec
from raypipe.train import learning
from raypipe.train.checkpoints import Checkpoint, find_newest, write_checkpoint
from raypipe.train.run_folder import RunLog, stop_requested

logger = logging.getLogger(__name__)


def train_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Runs on each Ray Train worker; returns the run's figures.

    Args:
        config: the arguments of `Trainer`.
    """
    # Ray Train would log every checkpoint and its metrics, between the lines of progress.
    for name in ("ray.train", train_context.__file__):
        logging.getLogger(name).setLevel(logging.WARNING)
    trainer = Trainer(**config)
    for _ in trainer.epochs():
        pass
    return trainer.figures()


class Trainer:
    """One worker's training of one run, from the beginning or from the newest checkpoint.

    Args:
        run: the configuration.
        spec: the stream.
        num_classes: of the classifier.
        max_actors: transform actors that the pool may grow to.
        run_uri: the run's folder.
        lease: by which the run has its folder; empty = it needs none.
        device: where it trains; empty = the device that Ray Train gave this worker.
    """

    def __init__(
        self,
        run: RunConfig,
        spec: StreamSpec,
        num_classes: int,
        max_actors: int,
        run_uri: str,
        lease: str = "",
        device: str = "",
    ) -> None:
        self.run_uri, self.stopping, self._begun = run_uri, False, False
        self._lease = lease
        self._check_lease()
        found = self._newest(spec)
        # First of all the stream: its pool starts while the model is built.
        self.device = torch.device(device) if device else ray.train.torch.get_device()
        self.amp_dtype = _amp_dtype(run.train.amp, self.device)
        self.feed: Feed = feed(
            spec,
            max_actors=max_actors,
            device=self.device,
            cursor=found.cursor if found else spec.plan.start(),
            augment=run.augment,
            dtype=self.amp_dtype or torch.float32,
            depth=run.train.prefetch,
        )
        self.max_actors = max_actors
        self.run, self.plan, self.num_classes = run, spec.plan, num_classes
        self.rank, self.world_size = self.feed.rank, self.feed.world_size
        torch.manual_seed(run.plan.seed)
        self.model = learning.build_model(run.train.model, num_classes).to(self.device)
        if self.device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            torch.backends.cudnn.benchmark = True
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = run.train.tf32
        per_rank = self.plan.config.per_step // self.world_size
        self.batch_norm = learning.StepBatchNorm(self.model, per_rank, self.world_size)
        self.optimizer = learning.build_optimizer(self.model, run.train, fused=self.device.type == "cuda")
        self.ema = learning.Ema(self.model, run.train.ema_decay) if run.train.ema_decay else None
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.amp_dtype is torch.float16 and self.device.type == "cuda"
        )
        self.metrics: dict[str, Any] = {"val_accuracy": None, "train_s": 0.0, "wait_s": 0.0, "images": 0}
        if found:
            self._load(found)
        if run.train.compile:
            self.model.compile()
        self.parallel: nn.Module = self.model
        self.gradients: learning.OrderedGradients | None = None
        if run.train.ordered_sum == "yes" or (run.train.ordered_sum == "auto" and self.device.type == "cpu"):
            self.gradients = learning.OrderedGradients(self.model, per_rank, self.world_size)
        elif self.world_size > 1:
            # StepBatchNorm keeps the only buffers that training changes the same on all ranks.
            self.parallel = DistributedDataParallel(
                self.model, broadcast_buffers=False, gradient_as_bucket_view=True
            )
        self.log: RunLog | None = None
        if self.rank == 0:
            at = self.feed.cursor
            validates = at.step == self.plan.steps_per_epoch and self.plan.has_val(at.epoch)
            self.log = RunLog(run_uri, self.global_step, self.world_size, validates)
        # Not at lines of progress, of which there is none before the first micro-batch, or when it does not come.
        self._follower = self.feed.follow(self._log_event) if self.log else None

    @property
    def global_step(self) -> int:
        """Optimizer steps that are done, as the cursor has it."""
        return self.feed.global_step

    def epochs(self) -> Iterator[None]:
        """Train what is left; stands still after each epoch and its validation."""
        try:
            yield from self._epochs()
        except Exception:
            with contextlib.suppress(Exception):  # what has failed is not to be hidden by what follows from it
                self.close()
            raise
        self.close()

    def figures(self) -> dict[str, Any]:
        """What a run comes to, so far: sums over its training, the newest validation, and where it stands."""
        first = self.feed.first_batch_s
        return {**self.metrics, "steps": self.global_step, "first_batch_s": first, "stopped": self.stopping}

    def _epochs(self) -> Iterator[None]:
        self.stopping = self._asked_to_stop()  # while it started
        for segment in () if self.stopping else self.feed:
            if segment.split == "train":
                self._train(segment)
            else:
                self._validate(segment)
            if self.stopping:
                break
            if segment.split == "val" or not self.plan.has_val(segment.epoch):
                self._report()
                self._diagnose(segment)
                yield
        if self.stopping:
            self._report()

    def _asked_to_stop(self) -> bool:
        """Whether the run was asked to end; all ranks meet here."""
        return self._summed(torch.tensor(float(self._sees_stop()), device=self.device)).item() > 0

    def _sees_stop(self) -> bool:
        return self.log is not None and stop_requested(self.run_uri)

    def _summed(self, sums: torch.Tensor) -> torch.Tensor:
        """Over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(sums)
        return sums

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.amp_dtype, enabled=self.amp_dtype is not None)

    def close(self) -> None:
        """End the stream and the log where they stand."""
        try:
            self.feed.close()
        finally:
            if self.log and self._follower:
                self._follower.stop()
                self.log.close()
                self.log = None

    def _train(self, segment: SegmentFeed) -> None:
        config, plan = self.run.train, self.plan
        total = plan.config.epochs * plan.steps_per_epoch
        warmup = round(config.warmup_epochs * plan.steps_per_epoch)
        self.model.train()
        meter = _Meter(self.feed, self.device)
        for step in segment:
            lr = learning.learning_rate(self.global_step, total, warmup, config.lr)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.batch_norm.begin()
            seen = []
            for number, batch in enumerate(step):
                seen.append((batch.at, batch.index.tolist()))
                meter.add(self._backward(batch, len(step), last=number + 1 == len(step)))
            self.batch_norm.end()
            self._update()
            if config.log_samples:
                self._log_samples(seen)
            end = step.number + 1 == segment.num_steps
            checkpoint = config.checkpoint_every and self.global_step % config.checkpoint_every == 0
            if self.global_step % config.log_every == 0 or end or checkpoint:
                self._log_train(segment, step.number + 1, lr, meter)
            if not self._begun:  # while it waited for its first batch
                self._begun, self.stopping = True, self.stopping or self._asked_to_stop()
            if self.stopping:
                return
            if checkpoint and not end:
                self._report()

    def _update(self) -> None:
        """One optimizer step from the gradients of a step's micro-batches."""
        if self.gradients:
            self.gradients.finish()
        if self.run.train.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.run.train.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema:
            self.ema.update(self.global_step)

    def _backward(self, batch: Batch, per_rank: int, last: bool) -> torch.Tensor:
        """Accumulate the gradient of one micro-batch; returns its detached loss."""
        self._check_labels(batch)
        torch.manual_seed(batch.seed)  # dropout, too, is a function of the micro-batch
        synchronise = last or self.parallel is self.model
        with contextlib.nullcontext() if synchronise else self.parallel.no_sync():  # type: ignore[operator]
            with self._autocast():
                logits = self.parallel(batch.image)
            smoothing = self.run.train.label_smoothing
            losses = mixed_cross_entropy(logits.float(), batch.target, batch.mixed, smoothing)
            loss = (losses * batch.weight).sum() / len(losses)
            # DDP averages over ranks, the ordered sum adds.
            share = self.plan.config.per_step if self.gradients else per_rank
            self.scaler.scale(loss / share).backward()
            if self.gradients:
                self.gradients.take()
        self.batch_norm.take()
        return loss.detach()

    def _log_samples(self, seen: list[tuple[MicroBatchId, list[int]]]) -> None:
        ranks = [seen]
        if self.world_size > 1:
            ranks = [[] for _ in range(self.world_size)]
            dist.all_gather_object(ranks, seen)
        if self.log:
            rows = sorted((row for rank in ranks for row in rank), key=lambda row: row[0].micro)
            self.log.write_samples(rows, self.global_step)
            for at, indices in rows:
                progress(logger, f"samples {at}: {' '.join(map(str, indices))}")

    def _check_labels(self, batch: Batch) -> None:
        # On the host: a label out of range would otherwise end a GPU run in a device-side assertion.
        outside = (batch.label < 0) | (batch.label >= self.num_classes)
        if outside.any():
            raise ConfigError(
                f"sample {batch.index[outside][0]} has label {batch.label[outside][0]}, outside "
                f"[0, {self.num_classes}): set train.num_classes, or mend the store"
            )

    def _log_train(self, segment: SegmentFeed, step: int, lr: float, meter: _Meter) -> None:
        stop = torch.tensor(float(self._sees_stop()), device=self.device)
        loss, stops = self._summed(torch.stack([meter.loss, stop])).tolist()
        self.stopping = stops > 0
        loss /= meter.count * self.world_size
        times, seconds = meter.read()  # after the sums, for which the host has waited
        images, wait = times.images * self.world_size, times.wait_s / seconds
        self.metrics["images"] += images
        self.metrics["train_s"] += seconds
        self.metrics["wait_s"] += times.wait_s
        self.feed.exported.learnt(trainer_loss=loss, trainer_learning_rate=lr)
        if self.log is None:
            return
        values = {"epoch": segment.epoch, "loss": loss, "lr": lr}
        values |= {"images_per_s": images / seconds, "wait_fraction": wait}
        self.log.write(
            "train",
            self.global_step,
            **values,
            **{f"{stage}_s": getattr(times, f"{stage}_s") for stage in STAGES if stage != "wait"},
            strength=self.feed.strength(segment.epoch, step - 1),
            num_bad=self.feed.num_bad,
            num_fallback=self.feed.num_fallback,
        )
        progress(
            logger,
            f"epoch {segment.epoch + 1}/{self.plan.config.epochs}  step {step}/{segment.num_steps}  "
            f"loss {loss:.4f}  {images / seconds:,.0f} images/s  waiting for data {wait:.0%}",
            step=self.global_step,
            **values,
        )

    def _log_event(self, kind: str, text: str) -> None:
        progress(logger, f"{'pool' if kind == 'scale' else kind}: {text}", step=self.global_step, kind=kind)
        if self.log:
            self.log.write(kind, self.global_step, text=text)

    @torch.no_grad()
    def _validate(self, segment: SegmentFeed) -> None:
        """Exact: every sample counts once, padding and unreadable samples have weight 0."""
        model = self.ema.model if self.ema else self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for step in segment:
            for batch in step:
                with self._autocast():
                    logits = model(batch.image).float()
                losses = cross_entropy(logits, batch.target, reduction="none")
                correct = (logits.argmax(1) == batch.target).float()
                # Bad samples and padding: their pixels are zeros, their losses must not even be NaN.
                real = batch.weight > 0
                sums += torch.stack([torch.where(real, x, 0.0).sum() for x in (losses, correct, batch.weight)])
        loss, accuracy, count = self._summed(sums).tolist()
        loss, accuracy = loss / max(count, 1.0), accuracy / max(count, 1.0)
        values = {"accuracy": accuracy, "loss": loss, "samples": int(count)}
        self.metrics |= {f"val_{name}": value for name, value in values.items()}
        self.feed.exported.learnt(validation_accuracy=accuracy, validation_loss=loss)
        if self.log:
            self.log.write("val", self.global_step, epoch=segment.epoch, **values)
            progress(
                logger,
                f"epoch {segment.epoch + 1}/{self.plan.config.epochs}  validation accuracy {accuracy:.4f} "
                f"({int(count)} samples)",
                step=self.global_step,
                **values,
            )

    def _diagnose(self, segment: SegmentFeed) -> None:
        """At the end of an epoch: where the time of the run went; all ranks meet here."""
        sums = torch.tensor(dataclasses.astuple(self.feed.times()), dtype=torch.float64, device=self.device)
        images, *seconds = self._summed(sums).tolist()
        times = StageTimes(int(images), *seconds)
        sentences = diagnose(times, world_size=self.world_size, actors=self.max_actors, device=self.device.type)
        if self.log:
            self.log.write("diagnosis", self.global_step, **dataclasses.asdict(times), text=" ".join(sentences))
            if segment.epoch + 1 == self.plan.config.epochs:
                progress(logger, "\n".join(sentences), step=self.global_step)

    def _report(self) -> None:
        """Checkpoint, on rank 0, and metrics; all ranks meet here."""
        metrics = self.figures()
        if self.log is not None:
            self.log.sync()
            self._check_lease()
            write_checkpoint(self.run_uri, self.feed.cursor, self._save, metrics)
        ray.train.report(metrics)

    def _save(self, file: IO[bytes]) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.model.state_dict() if self.ema else None,
            "metrics": self.metrics,
        }
        torch.save(state, file)

    def _check_lease(self) -> None:
        if self._lease and not is_held(self.run_uri, self._lease):
            raise RaypipeError(
                f"{self.run_uri} is not, or no more, this run's: either another run has taken it, or this machine "
                "does not see it. Where trainers run on several machines, set runs to a folder that all of them "
                "share, or to a bucket"
            )

    def _newest(self, spec: StreamSpec) -> Checkpoint | None:
        """What all ranks start from: rank 0 looks, so that no two of them find different ones."""
        context = ray.train.get_context()
        found = None
        if context.get_world_rank() == 0:
            found = find_newest(self.run_uri, spec.plan.check).checkpoint
        return broadcast_from_rank_zero(found) if context.get_world_size() > 1 else found

    def _load(self, checkpoint: Checkpoint) -> None:
        with checkpoint.state() as file:
            state = torch.load(file, map_location=self.device, weights_only=True)
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise ConfigError(f"checkpoint {checkpoint.name} is of another model: {error}") from error
        learning.restore_optimizer(self.optimizer, self.scaler, state["optimizer"], state["scaler"])
        if self.ema:
            self.ema.model.load_state_dict(state["ema"] or state["model"])
        self.metrics = state["metrics"]


def _amp_dtype(name: str, device: torch.device) -> torch.dtype | None:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


class _Meter:
    """Loss and throughput since the last reading; sums stay on the device, so nothing waits for it.

    Attributes:
        loss: the sum over `count` micro-batches of this rank.
    """

    def __init__(self, feed: Feed, device: torch.device) -> None:
        self._feed, self.loss, self.count = feed, torch.zeros((), device=device), 0
        self._times, self._since = feed.times(), time.perf_counter()

    def add(self, loss: torch.Tensor) -> None:
        if self.count == 0 and self._times.images == 0:
            self._since = time.perf_counter()  # the run's start-up, reported apart
        self.loss += loss
        self.count += 1

    def read(self) -> tuple[StageTimes, float]:
        """This rank's times, and seconds in all; begins anew."""
        times, now = self._feed.times(), time.perf_counter()
        found = times - self._times, now - self._since
        self.loss, self.count, self._times, self._since = torch.zeros_like(self.loss), 0, times, now
        return found
