"""Models by name, and what data-parallel training needs beside them. Knows torch, not Ray."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from raypipe.config import TrainConfig
from raypipe.errors import ConfigError


def build_model(name: str, num_classes: int) -> nn.Module:
    """A classifier: "small", or a torchvision model by name, with new weights.

    Raises:
        ConfigError: there is no model of that name.
    """
    if name == "small":
        return small_model(num_classes)
    import torchvision

    # One output and one loss for every model. What the heads at half depth were for, BatchNorm does (Szegedy et
    # al. 2015 found the lower one to change nothing), and that of inception_v3 takes no small images.
    more = {"aux_logits": False, "init_weights": True} if name.lower() in ("googlenet", "inception_v3") else {}
    try:
        return torchvision.models.get_model(name, weights=None, num_classes=num_classes, **more)
    except ValueError:
        known = ", ".join(torchvision.models.list_models(module=torchvision.models)[:6])
        raise ConfigError(
            f"train.model={name!r} is neither 'small' nor a torchvision classification model ({known}, …)"
        ) from None


def small_model(num_classes: int, width: int = 32) -> nn.Module:
    """A convolutional net for tiny images, 8 to 64 pixels a side: about 0.3 M parameters at width 32."""

    def block(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
        )

    return nn.Sequential(
        block(3, width, 1),
        block(width, 2 * width, 2),
        block(2 * width, 2 * width, 1),
        block(2 * width, 4 * width, 2),
        block(4 * width, 4 * width, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(4 * width, num_classes),
    )


def build_optimizer(model: nn.Module, config: TrainConfig, fused: bool = False) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, or AdamW; no weight decay on biases and normalisation layers.

    Args:
        model: on its device.
        config: the settings.
        fused: one kernel for all parameters; for CUDA.
    """
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer
    if config.optimizer == "sgd":
        nesterov = config.momentum > 0
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=fused)
    else:
        optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=fused)
    _fit_state(optimizer)
    return optimizer


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    saved: dict[str, Any],
    saved_scaler: dict[str, Any],
) -> None:
    """Take over what another run's optimizer and scaler have learnt, on whatever kind of device that run was.

    The settings, of the groups and of the kernels, stay those of this run's optimizer.

    Args:
        optimizer: from `build_optimizer`.
        scaler: enabled or not.
        saved, saved_scaler: their `state_dict()` in the other run.

    Raises:
        ConfigError: the saved state is another kind of optimizer's.
    """
    names = {name for state in saved["state"].values() for name in state}
    if names and ("exp_avg" in names) != isinstance(optimizer, torch.optim.AdamW):
        raise ConfigError(
            "the checkpoint has the state of another optimizer: set train.optimizer to what it was "
            f"({'adamw' if 'exp_avg' in names else 'sgd'})"
        )
    optimizer.load_state_dict({**saved, "param_groups": optimizer.state_dict()["param_groups"]})
    _fit_state(optimizer)
    if saved_scaler:  # empty where it was not enabled
        scaler.load_state_dict(saved_scaler)


def _fit_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the state of an optimizer of this module the form that its kernels rely on and do not check.

    - Each tensor has its parameter's strides: the fused kernels walk through both in the order of memory.
    - `step` is on the device for the fused kernels and on the host for the others, which else wait for the device.
    - The fused SGD has its momentum from the start. It would make it of uninitialised memory at the first step,
      and leave it so where that step's gradients are not finite. Of zeros the first momentum is the gradient, too.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if group["fused"] and group.get("momentum"):
                state.setdefault("momentum_buffer", torch.zeros_like(parameter))
            for name, value in state.items():
                if name == "step":
                    state[name] = value.to(parameter.device if group["fused"] else "cpu")
                else:
                    state[name] = torch.empty_like(parameter).copy_(value)


def learning_rate(step: int, total_steps: int, warmup_steps: int, peak: float) -> float:
    """Linear warm-up to `peak`, then half a cosine to zero (Loshchilov & Hutter 2017); step in [0, total)."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


class Ema:
    """An exponential moving average of a model's weights and running statistics.

    The decay is min(decay, (1 + n) / (10 + n)) at update n, as in TensorFlow's ExponentialMovingAverage, so that
    a short run's average does not stay near the first weights. Nothing waits for the device (which the update
    counter of torch's AveragedModel, a tensor, would make it do).

    Args:
        model: what is averaged; copied.
        decay: in (0, 1).

    Attributes:
        model: the average, in evaluation mode.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay
        pairs = zip(self._state(self.model), self._state(model), strict=True)
        self._pairs = [(own, theirs) for own, theirs in pairs if own.is_floating_point()]

    @staticmethod
    def _state(model: nn.Module) -> list[torch.Tensor]:
        return [*model.parameters(), *model.buffers()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the model's state in, after optimizer step `step`, from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        own, theirs = (list(side) for side in zip(*self._pairs, strict=True))
        torch._foreach_lerp_(own, theirs, 1 - decay)
