"""Training loop: one optimizer step per step of the plan, for any number of workers."""

from __future__ import annotations

import contextlib
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
from raypipe.streaming.run_checkpoints import RunCheckpoints
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
        self.stopping = False
        self._checkpoints = RunCheckpoints(
            run_uri, spec.plan, run.train.start_from, lease
        )
        self.device = torch.device(device or ray.train.torch.get_device())
        # The stream comes first, so that its pool starts while the model is built.
        self.loader = self._open_loader(spec, max_actors)
        self._metrics = self.loader.metrics
        self.world_size = self.loader.world_size
        has_classes = spec.columns.target is None
        self.learner = Learner(
            run, num_classes, self.device, self.world_size, has_classes
        )
        self._schedule = build_schedule(run.train)
        self._val_metric = None
        if run.train.metrics:
            self._val_metric = build_metric(run.train.metrics)
        self.metrics: dict[str, Any] = {
            "val_accuracy": None,
            "train_s": 0.0,
            "wait_s": 0.0,
            "images": 0,
        }
        if start_values := self._checkpoints.take_start():
            state, metrics = start_values
            self.learner.load(state)
            self.metrics |= metrics
        self._shown_at = -_LINE_EVERY_S

    def _open_loader(self, spec: StreamSpec, max_actors: int) -> Loader:
        """Start the stream where the run begins; the loop records its training itself."""
        run = self.run
        stream = loader(
            spec,
            max_actors=max_actors or None,
            device=self.device,
            cursor=self._checkpoints.cursor,
            augment=run.augment,
            dtype=amp_dtype(run.train.amp, self.device) or torch.float32,
            run_dir=self.run_uri,
        )
        stream.metrics.interval_s = math.inf
        stream.metrics.is_run = True
        stream.metrics.tell("checkpointed")
        stream.stop_when(self._checkpoints.stop_requested)
        self._described = stream.described(run.train.model)
        return stream

    def epochs(self) -> Iterator[None]:
        """Train the rest of the run; yield after each epoch and its validation."""
        try:
            for epoch in self.loader.epochs():
                if len(epoch.train):
                    self._train(epoch.train)
                if len(epoch.val) and not self.stopping:
                    self._validate(epoch.val)
                self._report()
                if self.stopping:
                    break
                self._metrics.diagnose(epoch.number)
                yield
        except Exception:
            with contextlib.suppress(Exception):  # must not hide the original error
                self.close()
            raise
        self.close()

    def figures(self) -> dict[str, Any]:
        """Return the run's figures so far: sums over its training, the newest validation, and its progress."""
        position = {
            "steps": self.loader.global_step,
            "first_batch_s": self.loader.first_batch_s,
            "stopped": self.stopping,
        }
        return {**self.metrics, **position}

    def close(self) -> None:
        """End the stream and the log, and wait for the checkpoint that is being written."""
        with contextlib.ExitStack() as ends:
            ends.callback(self.loader.close)
            ends.enter_context(self._metrics.saving(self._awaited))
            # also uploads the records to the run's folder
            ends.callback(self._checkpoints.wait)

    def _summed(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(sums)
        return sums

    def _of_all_ranks(self, value: _T) -> list[_T]:
        """Return the values of all ranks, which call this."""
        if self.world_size == 1:
            return [value]
        values = [value] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def _train(self, batches: Batches) -> None:
        config = self.run.train
        plan = self.plan
        assert batches.segment
        total = plan.config.epochs * plan.steps_per_epoch
        warmup = round(config.warmup_epochs * plan.steps_per_epoch)
        losses: list[
            torch.Tensor
        ] = []  # kept on the device, so that the host does not wait
        samples: _Samples = []
        begins_step = True
        first = not self.loader.times().images
        lr = 0.0
        for batch in batches:
            if begins_step:
                lr = self._schedule(
                    plan.global_step(batch.position), total, warmup, self.run.peak_lr
                )
                samples = []
                self.learner.begin_step(lr)
            begins_step = batch.ends_step
            samples.append((batch.position, batch.index.tolist()))
            losses.append(self.learner.backward(batch, last=batch.ends_step))
            if not batch.ends_step:
                continue
            done = self.loader.global_step
            step = batch.position.step + 1
            self.learner.end_step(done)
            if config.log_samples:
                self._log_samples(samples)
            end = step == batches.segment.num_steps
            checkpoint = (
                bool(config.checkpoint_steps) and done % config.checkpoint_steps == 0
            )
            if self._start is not None:
                # after the first step, every rank has its micro-batches
                ray.kill(self._start)
                self._start = None
            # The first step is logged too, which shows a slow run or a bad loss at once.
            if logs := done % config.log_interval == 0 or end or checkpoint or first:
                self._log_train(lr, losses, shows=end)
                losses = []
                first = False
            is_due = self._look(at_once=logs)
            if self.stopping:
                return
            if (checkpoint or is_due) and (not end or self.loader.notice.is_last):
                if not logs:  # the sums in a checkpoint must match the records
                    self._log_train(lr, losses)
                    losses = []
                self._report()

    def _log_samples(self, samples: _Samples) -> None:
        ranks = self._of_all_ranks(samples)
        if log := self._metrics.run_log.log:
            rows = sorted(
                (row for rank in ranks for row in rank), key=lambda row: row[0].micro
            )
            log.write_samples(rows, self.loader.global_step)

    def _log_train(
        self, lr: float, losses: list[torch.Tensor], shows: bool = False
    ) -> None:
        """Record the training since the last call; print it if `shows`, or if the last line is ten seconds old."""
        loss_sum = torch.zeros(1, device=self.device)
        for term in losses:
            loss_sum += term
        loss = self._summed(loss_sum).item() / (len(losses) * self.world_size)
        # This comes after the sums, since the host has waited for them.
        now = time.perf_counter()
        shows = shows or now - self._shown_at >= _LINE_EVERY_S
        self._shown_at = now if shows else self._shown_at
        for name, amount in self._metrics.interval(
            self.loader.cursor, shows, loss=loss, lr=lr
        ).items():
            self.metrics[name] += amount

    def _look(self, at_once: bool = False) -> bool:
        """Check at a step's end for a request to stop, and for an error of the checkpoint writer.

        Returns:
            Whether a checkpoint is due, by the clock or because a node of the trainers is about to go.
        """
        self._checkpoints.check()
        is_due = self.loader.should_checkpoint(self.run.train.checkpoint_s, at_once)
        self.stopping = self.loader.stopping
        if self.stopping and self.loader.rank == 0:
            self._checkpoints.answer_stop()
        return is_due

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
                is_due = self._look()
                if self.stopping:
                    # the checkpoint is before the validation, which a resume repeats
                    return
                if is_due:
                    self._report()
        values, count = validation.result()
        if not count:
            raise BadSamplesError(
                f"no sample of the validation can be read: `raypipe verify {self.run.store.val}` lists why"
            )
        epoch = batches.segment.epoch
        if not self.learner.has_classes:
            del values["accuracy"]
        scores = [
            f"{name} {value:.4f}"
            for name, value in values.items()
            if name != "loss" or not self.learner.has_classes
        ]
        score = ", ".join(scores)
        values["samples"] = count
        self.metrics |= {f"val_{name}": value for name, value in values.items()}
        self._metrics.record(
            "val",
            f"epoch {epoch + 1}/{self.plan.config.epochs}  validation {score} ({count} samples)",
            epoch=epoch,
            **values,
        )

    def _report(self) -> None:
        """Write a checkpoint, on rank 0, and report metrics; all ranks synchronize.

        The state is copied now, and written by a thread. The checkpoint is valid when it is complete; until then,
        a resume uses the previous one.
        """
        with self._metrics.saving(self._awaited):
            self._save()

    def _awaited(self) -> str:
        """Describe why a checkpoint waits."""
        if self._checkpoints.is_writing:
            return f"the previous one is being written to {self.run_uri}"
        if self.world_size == 1:
            return "Ray Train's controller has not noted it yet"
        return "other ranks have not reached it yet, or Ray Train's controller has not noted it"

    def _save(self) -> None:
        metrics = self.figures()
        notice = self.loader.notice

        def after(seconds: float) -> None:
            self._metrics.tell("checkpointed")
            notice.saved_in(seconds)

        if log := self._metrics.run_log.log:  # on rank 0
            self._checkpoints.save(
                self.learner.state(),
                self.loader.cursor,
                metrics,
                self._described,
                log.sync,
                after,
            )
            # After the report below, any rank may end, which ends all.
            if notice.is_last:
                self._checkpoints.wait()
        ray.train.report(metrics)
