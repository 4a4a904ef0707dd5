"""Model, optimizer, schedule and loss of a run, by its settings. Imports torch, not Ray."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from raypipe.config import TrainConfig
from raypipe.errors import ConfigError
from raypipe.train.validation import UserMetric

_MAX_RATE = 1e30  # within float32

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Outputs (B, num_classes), targets int64 (B,), or (B, …) for other columns → losses (B,)."""

Schedule = Callable[[int, int, int, float], float]
"""Step in [0, total), total steps, warm-up steps, peak → learning rate."""


def build_model(
    name: str, num_classes: int, channels: int = 3, **arguments: Any
) -> nn.Module:
    """Make a classifier with new weights: "small", a torchvision model, or `module:function(num_classes=…)`.

    Args:
        channels: channels of the images of "small"; torchvision's models take three.
        arguments: more arguments of the model.

    Raises:
        ConfigError: the model does not exist, or does not take the arguments.
    """
    if ":" in name:
        make = TrainConfig(model=name).imported("model")
        model = make(num_classes=num_classes, **arguments)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"train.model={name} must return a torch.nn.Module, got {type(model).__name__}"
            )
        return model
    if name == "small":
        return small_model(num_classes, channels=channels)
    import torchvision

    # Every model has one output and one loss. BatchNorm makes auxiliary heads unnecessary (Szegedy et al. 2015
    # found that the lower one had no effect), and inception_v3's rejects small images.
    if name.lower() in ("googlenet", "inception_v3"):
        arguments |= {"aux_logits": False, "init_weights": True}
    try:
        return torchvision.models.get_model(name, num_classes=num_classes, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"train.model={name!r}: {error}") from error


def small_model(num_classes: int, channels: int = 3) -> nn.Module:
    """Make a convolutional net for tiny images, 8 to 64 pixels a side: about 0.3 M parameters."""

    def block(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
        )

    return nn.Sequential(
        block(channels, 32, 1),
        block(32, 64, 2),
        block(64, 64, 1),
        block(64, 128, 2),
        block(128, 128, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(128, num_classes),
    )


def _without_compiler(kind: type[torch.optim.Optimizer]) -> Any:
    """Return a class of optimizers whose methods do not import torch's compiler at their first call.

    That import takes more than a second of CPU time, before the first step of every trainer. The methods are
    torch's own, without the decorators that keep a compiler out of them.
    """
    names = ("step", "add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(kind.__name__, (kind,), methods)


def build_optimizer(
    model: nn.Module, config: TrainConfig, fused: bool = False
) -> torch.optim.Optimizer:
    """Make SGD with Nesterov momentum, AdamW, or `module:function(two groups of parameters, lr=…)`.

    Biases and normalization layers have no weight decay.

    Args:
        model: the model, on its device.
        config: the settings.
        fused: use one kernel for all parameters; for CUDA, where fp16 would otherwise wait for the device in each
            step.
    """
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    name, arguments = config.named("optimizer")
    for of_step in ("max_grad_norm", "ema_decay"):
        arguments.pop(of_step, None)
    groups = [
        {"params": decay, "weight_decay": arguments.pop("weight_decay", 5e-5)},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    if ":" in name:
        optimizer = config.imported("optimizer")(groups, lr=config.lr, **arguments)
        if not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise ConfigError(
                f"train.optimizer={name} must return a torch.optim.Optimizer, got {kind}"
            )
        return optimizer
    if name == "sgd":
        momentum = arguments.setdefault("momentum", 0.9)
        arguments.setdefault("nesterov", momentum > 0)
    made_of = torch.optim.SGD if name == "sgd" else torch.optim.AdamW
    try:
        optimizer = _without_compiler(made_of)(
            groups, lr=config.lr, fused=fused, **arguments
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"train.optimizer {config.optimizer}: {error}") from None
    fit_state(optimizer)
    return optimizer


def fit_state(optimizer: torch.optim.Optimizer) -> None:
    """Convert an optimizer's state to the form that its kernels need but do not check.

    - Each tensor gets its parameter's strides, since fused kernels walk through both in memory order.
    - `step` is on the device for fused kernels, and on the host for others, which would wait for the device.
    - Fused SGD gets a momentum of zeros. At its first step it would allocate uninitialized memory, and leave it so
      if the gradients are not finite. With zeros, the first momentum is the gradient too.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if group["fused"] and group.get("momentum"):
                state.setdefault("momentum_buffer", torch.zeros_like(parameter))
            for name, value in state.items():
                if name == "step":
                    state[name] = value.to(
                        parameter.device if group["fused"] else "cpu"
                    )
                else:
                    state[name] = torch.empty_like(parameter).copy_(value)


def build_schedule(config: TrainConfig) -> Schedule:
    name, arguments = config.named("lr_schedule")
    arguments.pop("warmup_epochs", None)
    if name == "cosine":
        return learning_rate
    schedule = config.imported("lr_schedule")

    def checked(step: int, *bounds: float) -> float:
        rate = schedule(step, *bounds, **arguments)
        try:
            number = float(rate)  # a checkpoint cannot hold a number of NumPy's
        except (TypeError, ValueError):
            number = math.nan
        if not abs(number) <= _MAX_RATE:
            raise ConfigError(
                f"train.lr_schedule={name} at step {step} must be a finite number, got {rate!r}"
            )
        return number

    return checked


def build_loss(config: TrainConfig, *, smooth: bool = True) -> Loss:
    """Return the loss of `train.loss`; `smooth=False` omits label smoothing, for validation."""
    name, arguments = config.named("loss")
    if name != "cross_entropy":
        return functools.partial(config.imported("loss"), **arguments)
    if arguments.keys() - {"label_smoothing"}:
        raise ConfigError(
            f"train.loss: cross_entropy takes label_smoothing, got {', '.join(arguments)}"
        )
    smoothing = config.label_smoothing if smooth else 0.0
    return functools.partial(cross_entropy, reduction="none", label_smoothing=smoothing)


def build_metric(config: TrainConfig) -> UserMetric | None:
    """Import the metric of `train.metrics`; None = there is none."""
    if not config.metrics:
        return None
    return UserMetric(config.metrics, config.imported("metrics"))


def learning_rate(step: int, total_steps: int, warmup_steps: int, peak: float) -> float:
    """Return a linear warm-up to `peak`, then half a cosine to zero (Loshchilov & Hutter 2017), at a step."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))
