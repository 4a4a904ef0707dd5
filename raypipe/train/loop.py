"""Training loop: one optimizer step per step of the plan, for any number of workers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist

from raypipe import StreamSpec, loader
from raypipe.config import RunConfig
from raypipe.errors import BadSamplesError
from raypipe.streaming.epochs import Batches
from raypipe.streaming.loader import Loader
from raypipe.train.learning import Learner, amp_dtype
from raypipe.train.models import build_metric, build_schedule
from raypipe.train.validation import Validation

_T = TypeVar("_T")

_Samples = list[tuple[Any, list[int]]]
"""Positions of a step's micro-batches, with their samples."""

# Period of lines of progress between those that end an epoch.
_LINE_EVERY_S = 10.0


class Trainer:
    """Training of a run on one worker, from the beginning or from the newest checkpoint.

    Args:
        run: the configuration.
        spec: the stream.
        num_classes: classes of the classifier.
        max_actors: most transform actors of the pool; 0 = this process makes the stream.
        run_uri: the run's folder.
        lease: token of the lease of the run's folder; empty = not needed.
        start: an actor to kill once every rank has its resources; None = none.
        device: the device to train on; empty = the device that Ray Train assigned to this worker.
    """

    def __init__(
        self,
        run: RunConfig,
        spec: StreamSpec,
        num_classes: int,
        max_actors: int,
        run_uri: str,
        lease: str = "",
        start: Any = None,
        device: str = "",
    ) -> None:
        self.run = run
        self.plan = spec.plan
        self._start = start
        self.run_uri = run_uri
        self.device = torch.device(device or ray.train.torch.get_device())
        # The stream comes first, so that its pool starts while the model is built.
        self.loader = self._open_loader(spec, max_actors, lease)
        self._metrics = self.loader.metrics
        self.world_size = self.loader.world_size
        has_classes = spec.columns.target is None
        torch.manual_seed(spec.plan.model_seed)
        self.learner = Learner(
            run, num_classes, self.device, self.world_size, has_classes
        )
        self._schedule = build_schedule(run.train)
        self._val_metric = build_metric(run.train)
        self.metrics: dict[str, Any] = {
            "val_accuracy": None,
            "train_s": 0.0,
            "wait_s": 0.0,
            "images": 0,
        }
        if saved := self.loader.restore():
            self.learner.load(saved.state)
            self.metrics |= saved.metrics
        self._shown_at = -_LINE_EVERY_S
        self._lr = 0.0
        # Since the last record, on the device, so that the host does not wait.
        self._losses: list[torch.Tensor] = []

    def _open_loader(self, spec: StreamSpec, max_actors: int, lease: str) -> Loader:
        """Start the stream where the run begins; the loop records its training itself."""
        run = self.run
        trace: dict[str, Any] = {}
        if run.train.trace_s:
            file = f"{self.run_uri.rstrip('/')}/trace.json"
            trace = {"trace": file, "trace_s": run.train.trace_s}
        stream = loader(
            spec,
            max_actors=max_actors or None,
            device=self.device,
            augment=run.augment,
            dtype=amp_dtype(run.train.amp, self.device) or torch.float32,
            run_dir=self.run_uri,
            start_from=run.train.start_from,
            lease=lease,
            log_digest="digest" in run.train.log,
            **trace,
        )
        stream.model_name = run.train.model_name
        stream.metrics.interval_s = math.inf
        stream.metrics.is_run = True
        stream.metrics.run_log.keeps_stop = True
        stream.metrics.tell("checkpointed")
        return stream

    def epochs(self) -> Iterator[None]:
        """Train the rest of the run; yield after each epoch and its validation."""
        with self.loader:
            for epoch in self.loader.epochs():
                if len(epoch.train):
                    self._train(epoch.train)
                if len(epoch.val) and not self.loader.stopping:
                    self._validate(epoch.val)
                if self.loader.stopping:
                    break
                self._save()
                self._metrics.diagnose(epoch.number)
                yield

    def figures(self) -> dict[str, Any]:
        """Return the run's figures so far: sums over its training, the newest validation, and its progress."""
        position = {
            "steps": self.loader.global_step,
            "first_batch_s": self.loader.first_batch_s,
            "stopped": self.loader.stopping,
        }
        return {**self.metrics, **position}

    def _of_all_ranks(self, value: _T) -> list[_T]:
        """Return the values of all ranks, which call this."""
        if self.world_size == 1:
            return [value]
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def _train(self, batches: Batches) -> None:
        samples: _Samples = []
        begins_step = True
        for batch in batches:
            if begins_step:
                samples = []
                steps_per_epoch = self.plan.steps_per_epoch
                self._lr = self._schedule(
                    self.plan.global_step(batch.position),
                    self.plan.config.epochs * steps_per_epoch,
                    round(self.run.train.warmup_epochs * steps_per_epoch),
                    self.run.peak_lr,
                )
                self.learner.begin_step(self._lr)
            begins_step = batch.ends_step
            samples.append((batch.position, batch.index.tolist()))
            self._losses.append(self.learner.backward(batch, last=batch.ends_step))
            if batch.ends_step:
                self._end_step(samples, ends_epoch=batch.ends_split)
                if self.loader.stopping:
                    return

    def _end_step(self, samples: _Samples, ends_epoch: bool) -> None:
        """Update the weights, and make the records and the checkpoint that are due."""
        config = self.run.train
        done = self.loader.global_step
        self.learner.end_step(done)
        if "samples" in config.log:
            ranks = self._of_all_ranks(samples)
            if log := self._metrics.run_log.log:
                rows = [row for rank in ranks for row in rank]
                rows.sort(key=lambda row: row[0].micro)
                log.write_samples(rows, self.plan.global_step(rows[0][0]) + 1)
        if self._start is not None and self.loader.pool_has_begun:
            # every rank has its micro-batches, and the pool its CPUs
            ray.kill(self._start)
            self._start = None
        saves = bool(config.checkpoint_steps) and done % config.checkpoint_steps == 0
        # The first step is logged too, which shows a slow run or a bad loss at once.
        is_first = self._shown_at < 0
        logs = done % config.log_interval == 0 or ends_epoch or saves or is_first
        if logs:
            self._log_train(shows=ends_epoch)
        saves |= self.loader.should_checkpoint(config.checkpoint_s, logs)
        is_last = self.loader.stopping or self.loader.notice.is_last
        # At an epoch's end one is made after the validation.
        if saves and (not ends_epoch or is_last):
            if not logs:  # the sums in a checkpoint must match the records
                self._log_train()
            self._save()

    def _log_train(self, shows: bool = False) -> None:
        """Record the training since the last call; print it if `shows`, or if the last line is ten seconds old."""
        loss_sum = torch.zeros(1, device=self.device)
        for term in self._losses:
            loss_sum += term
        if self.world_size > 1:
            dist.all_reduce(loss_sum)
        loss = loss_sum.item() / (len(self._losses) * self.world_size)
        self._losses = []
        # This comes after the sums, since the host has waited for them.
        now = time.perf_counter()
        shows = shows or now - self._shown_at >= _LINE_EVERY_S
        if shows:
            self._shown_at = now
        amounts = self._metrics.interval(shows, loss=loss, lr=self._lr)
        for name, amount in amounts.items():
            self.metrics[name] += amount

    @torch.no_grad()
    def _validate(self, batches: Batches) -> None:
        """Validate exactly: every sample counts once, padding and unreadable samples have weight 0."""
        assert batches.segment
        validation = Validation(self._val_metric, self._of_all_ranks)
        for batch in batches:
            logits = self.learner.evaluate(batch)
            losses = self.learner.val_losses(logits, batch)
            correct = torch.zeros_like(batch.weight)
            if self.learner.has_classes:
                correct = (logits.argmax(1) == batch.target).float()
            position = batch.position
            validation.add(
                (position.step, position.micro),
                losses,
                correct,
                batch.weight,
                logits,
                batch.target,
            )
            if batch.ends_step and position.step + 1 < batches.segment.num_steps:
                if self.loader.should_checkpoint(self.run.train.checkpoint_s):
                    self._save()
                if self.loader.stopping:
                    # the checkpoint is before the validation, which a resume repeats
                    return
        self._record_validation(batches.segment.epoch, *validation.result())

    def _record_validation(
        self, epoch: int, values: dict[str, float], count: int
    ) -> None:
        """Record the values of a validation of so many samples."""
        if not count:
            raise BadSamplesError(
                f"no sample of the validation can be read: `raypipe verify {self.run.store.val}` lists why"
            )
        if self.learner.has_classes:
            shown = {name: value for name, value in values.items() if name != "loss"}
        else:
            del values["accuracy"]
            shown = values
        score = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
        values = {**values, "samples": count}
        self.metrics |= {f"val_{name}": value for name, value in values.items()}
        self._metrics.record(
            "val",
            f"epoch {epoch + 1}/{self.plan.config.epochs}  validation {score} ({count} samples)",
            epoch=epoch,
            **values,
        )

    def _save(self) -> None:
        """Make a checkpoint, in the background, of the run's place and figures; all ranks synchronize."""
        self.loader.checkpoint(self.figures(), **self.learner.parts())
