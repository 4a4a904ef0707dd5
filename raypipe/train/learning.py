"""Learner: a model, its optimizer and averages; `ddp` brings the gradients of all ranks together.

Imports torch, not Ray.
"""

from __future__ import annotations

import copy
import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raypipe.config import RunConfig
from raypipe.device import mixed_losses
from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.train.ddp import RankGradients
from raypipe.train.models import (
    build_loss,
    build_model,
    build_optimizer,
    fit_state,
)
from raypipe.train.ordered import StepBatchNorm

NO_VIEWS = (
    "makes views, and a run trains a classifier of one image: choose another transform, or write a loop of "
    "your own around raypipe.loader, as docs/transforms.md does"
)


class Ema:
    """An exponential moving average of a model's weights and running statistics.

    The decay is min(decay, (1 + n) / (10 + n)) at update n, as in TensorFlow's ExponentialMovingAverage, so that
    a short run's average does not stay near the first weights. Updates never wait for the device, unlike those of
    torch's AveragedModel, whose counter is a tensor.

    Attributes:
        model: the average, in evaluation mode.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay
        self._own, self._theirs = (
            [
                state
                for state in (*module.parameters(), *module.buffers())
                if state.is_floating_point()
            ]
            for module in (self.model, model)
        )

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after optimizer step `step`, which counts from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._own, self._theirs, 1 - decay)


class Learner:
    """A model with its optimizer and averages, equal on all ranks after each step.

    Its weights are drawn from torch's generator, which ranks seed alike before.

    Args:
        run: the configuration.
        num_classes: number of classes, or of the model's outputs.
        device: the device to train on.
        world_size: W.
        has_classes: whether targets are classes.

    Attributes:
        dtype: dtype of autocast; None = off.
        has_classes: whether targets are classes.
        val_loss: logits and targets → losses (B,), for validation.
    """

    def __init__(
        self,
        run: RunConfig,
        num_classes: int,
        device: torch.device,
        world_size: int,
        has_classes: bool = True,
    ) -> None:
        self.has_classes = has_classes
        config = dataclasses.replace(run.train, lr=run.peak_lr)
        on_cuda = device.type == "cuda"
        self._num_classes = num_classes
        self._config = config
        self._device = device
        self.dtype = amp_dtype(config.amp, device)
        model = build_model(
            config.model_name,
            num_classes,
            len(run.augment.mean),
            **config.model_arguments,
        )
        self._model = model.to(device)
        if on_cuda:  # the layout that is fastest there, and fast kernels
            torch.backends.cudnn.benchmark = True
            torch.backends.cudnn.allow_tf32 = True
            torch.backends.cuda.matmul.allow_tf32 = True
            self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._batch_norm = StepBatchNorm(
            self._model, run.plan.per_step // world_size, world_size
        )
        self._optimizer = build_optimizer(self._model, config, fused=on_cuda)
        self._loss = build_loss(config)
        self.val_loss = build_loss(config, smooth=False)
        self._ema = Ema(self._model, config.ema_decay) if config.ema_decay else None
        self._scaler = torch.amp.GradScaler(
            device.type, enabled=self.dtype is torch.float16 and on_cuda
        )
        if config.compiles:
            self._model.compile()
        is_ordered = config.deterministic_reduce
        if is_ordered == "auto":
            is_ordered = not on_cuda
        self._gradients = RankGradients(
            self._model, run.plan.per_step, world_size, is_ordered
        )

    def begin_step(self, lr: float) -> None:
        """Begin a step; call before its first micro-batch."""
        self._model.train()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._batch_norm.begin()

    def backward(self, batch: Batch, last: bool) -> torch.Tensor:
        """Accumulate the gradient of one micro-batch, possibly the last of a step; return its detached loss."""
        if batch.views:  # only the output of a user's function shows its views
            raise ConfigError(f"transform.train {NO_VIEWS}")
        torch.manual_seed(batch.seed)  # makes dropout a function of the micro-batch
        with self._gradients.of_micro_batch(last):
            logits = self._logits(self._gradients.model, batch)
            self._batch_norm.take()  # its communication overlaps with the backward
            losses = self._checked(
                mixed_losses(self._loss, logits, batch.target, batch.mix),
                len(batch.weight),
            )
            loss = (losses * batch.weight).sum() / len(losses)
            self._scaler.scale(loss / self._gradients.divisor).backward()
            self._gradients.take()
        return loss.detach()

    def end_step(self, global_step: int) -> None:
        """Update the weights after a step's last micro-batch; `global_step` counts the run's steps from 1."""
        self._batch_norm.end()
        self._gradients.finish()
        if self._config.max_grad_norm:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(
                self._model.parameters(), self._config.max_grad_norm
            )
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        if self._ema:
            self._ema.update(global_step)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Return logits (B, classes) of the average, or of the model if there is no average."""
        return self._logits(self._ema.model if self._ema else self._model.eval(), batch)

    def val_losses(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return validation losses (B,) of the logits from `evaluate`."""
        return self._checked(self.val_loss(logits, batch.target), len(batch.weight))

    def _checked(self, losses: torch.Tensor, num_samples: int) -> torch.Tensor:
        if _shape_of(losses) != (num_samples,):
            raise ConfigError(
                f"train.loss={self._config.loss} returned {_shape_of(losses)} for {num_samples} samples: it must "
                "return one loss per sample (reduction='none')"
            )
        return losses

    def _logits(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        config = self._config
        num = self._num_classes
        # Checked on the host: a label out of range would end a GPU run in a device-side assertion.
        if self.has_classes:
            batch.check_labels(num)
        with torch.autocast(
            self._device.type, self.dtype, enabled=self.dtype is not None
        ):
            logits = model(batch.image)
        rows = len(batch.weight)
        ok = isinstance(logits, torch.Tensor) and logits.shape[:1] == (rows,)
        if ok and self.has_classes:
            ok = logits.ndim == 2 and (
                logits.shape[1] >= num or config.named("loss")[0] != "cross_entropy"
            )
        if not ok:
            raise ConfigError(
                f"train.model={config.model_name} returned {_shape_of(logits)} for {rows} images: it must return "
                f"a tensor ({rows}, {num})"
            )
        return logits.float()

    def parts(self) -> dict[str, Any]:
        """Return the parts of a checkpoint, by name; see `Loader.checkpoint`."""
        return {
            "model": self._model,
            "optimizer": self._optimizer,
            "scaler": self._scaler,
            "ema": self._ema.model if self._ema else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the states of the parts of another run, from any kind of device; this run's settings stay.

        Raises:
            ConfigError: the state lacks a model or an optimizer, or has those of another kind.
        """
        if missing := {"model", "optimizer"} - state.keys():
            raise ConfigError(
                f"the checkpoint has {', '.join(state)}, but no {' and '.join(sorted(missing))}: pass them under "
                "these names to loader.report"
            )
        try:
            self._model.load_state_dict(state["model"])
        except RuntimeError as error:
            # torch names every parameter
            raise ConfigError(
                f"the checkpoint's model is not that of train.model={self._config.model_name} with "
                f"{self._num_classes} outputs: leave train.model and its num_classes as they were, or start a "
                f"new run ({textwrap.shorten(str(error), 200, placeholder=' …')})"
            ) from error
        self._load_optimizer(state["optimizer"])
        if state.get("scaler"):  # empty if it was disabled
            self._scaler.load_state_dict(state["scaler"])
        if self._ema:
            self._ema.model.load_state_dict(state.get("ema") or state["model"])

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        saved = state["state"]
        name, _ = self._config.named("optimizer")
        is_known = name in ("sgd", "adamw")
        was_adamw = any("exp_avg" in of_parameter for of_parameter in saved.values())
        if is_known and any(saved.values()) and was_adamw != (name == "adamw"):
            raise ConfigError(
                "the checkpoint has the state of a different optimizer: set train.optimizer to "
                f"{'adamw' if was_adamw else 'sgd'}"
            )
        groups = self._optimizer.state_dict()["param_groups"]
        saved_sizes = [len(group["params"]) for group in state["param_groups"]]
        sizes = [len(group["params"]) for group in groups]
        if saved_sizes != sizes:
            raise ConfigError(
                f"the checkpoint's optimizer has groups of {saved_sizes} parameters, but this run's has {sizes}: "
                "make them as in docs/training-loop.md, or set train.optimizer"
            )
        self._optimizer.load_state_dict({"state": saved, "param_groups": groups})
        if is_known:
            fit_state(self._optimizer)


def _shape_of(result: object) -> tuple[int, ...] | str:
    """Return the shape of a tensor, or the type of anything else that a user's code returned."""
    if isinstance(result, torch.Tensor):
        return tuple(result.shape)
    return type(result).__name__


def amp_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast for `train.amp`; None = off."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
