"""What learns: models, their optimizer and averages, and sums that do not depend on W. Knows torch, not Ray.

Floating-point sums depend on their order, and training doubles the difference of two roundings every few
steps: W=1 and W=2 part at 1e-7 and are 1e-2 apart after 50 steps of AdamW. So a step's M terms are added up in a
tree that every power of two W cuts at its joints:

    S(r, w) = S(r, 2w) + S(r + w, 2w)     the micro-batches m with m mod w = r, while M / w is even,
    S(r, w) = x_r + x_{r+w} + …           in order, once it is odd

Rank r of W holds the micro-batches m mod W = r, so its sum is S(r, W), and S(0, 1) is what all ranks need.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raypipe.config import RunConfig, TrainConfig
from raypipe.errors import ConfigError
from raypipe.streaming.spec import StreamSpec


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

    Attributes:
        model: the average, in evaluation mode.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay
        self._own, self._theirs = (
            [state for state in (*each.parameters(), *each.buffers()) if state.is_floating_point()]
            for each in (self.model, model)
        )

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the model's state in, after optimizer step `step`, from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._own, self._theirs, 1 - decay)


class OrderedSum:
    """The sum of one flat tensor per micro-batch, over this rank's and over all ranks.

    It holds half as many tensors as the rank has micro-batches in a step.

    Args:
        num_local: M / W, micro-batches of this rank in a step.
        world_size: W.
    """

    def __init__(self, num_local: int, world_size: int) -> None:
        self._world_size = world_size
        even = num_local & -num_local  # the largest power of two that divides it
        # Two terms that are added first share a slot.
        self._num_slots = max(1, even // 2) if even == num_local else even
        self._slots: list[torch.Tensor] = []
        self._taken = 0

    def add(self, term: torch.Tensor) -> None:
        """The term of the rank's next micro-batch; it is written to."""
        if self._taken < self._num_slots:
            self._slots.append(term)
        else:
            self._slots[self._taken % self._num_slots] += term
        self._taken += 1

    def finish(self) -> torch.Tensor:
        """After the last term of a step: the sum over all ranks, on each."""
        total = tree_sum(self._slots)
        self._slots, self._taken = [], 0
        if self._world_size & (self._world_size - 1) == 0 and self._world_size > 2:
            gathered = [torch.empty_like(total) for _ in range(self._world_size)]
            dist.all_gather(gathered, total)
            total = tree_sum(gathered)
        elif self._world_size > 1:
            dist.all_reduce(total)  # of two, a + b is b + a
        return total


def tree_sum(sums: list[torch.Tensor]) -> torch.Tensor:
    """S(0, 1) of S(0, n) … S(n - 1, n), n a power of two; they are written to."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i].add_(sums[i + half]) for i in range(half)]
    return sums[0]


class OrderedGradients:
    """Takes the gradients of a rank's micro-batches one by one, and leaves the sum over all ranks' in `.grad`.

    Use it instead of DistributedDataParallel, with loss / M as each micro-batch's loss. `OrderedSum` has the
    arguments.
    """

    def __init__(self, model: nn.Module, num_local: int, world_size: int) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sum = OrderedSum(num_local, world_size)

    @torch.no_grad()
    def take(self) -> None:
        """After each backward: the gradient of the rank's next micro-batch."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        self._sum.add(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """After the last of a step: sum over all ranks; every `.grad` then holds the step's."""
        parts = self._sum.finish().split([p.numel() for p in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            # The parameter's strides, as backward has them: fused optimizers on CUDA ask for it.
            parameter.grad = torch.empty_like(parameter).copy_(part.view(parameter.shape))


class StepBatchNorm:
    """Running statistics of BatchNorm that do not depend on the number of workers.

    torch updates them once per forward, so their values would depend on which micro-batches a rank has
    seen. Here the statistics of a step's M micro-batches are averaged, and taken in once per step, with the
    momentum that M single updates amount to: 1 - (1 - p)^M. `num_batches_tracked` counts all M. `OrderedSum`
    has the arguments.
    """

    def __init__(self, model: nn.Module, num_local: int, world_size: int) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._per_step = num_local * world_size
        self._of_others = self._per_step - num_local
        self._momenta = [
            1 - (1 - (0.1 if m.momentum is None else m.momentum)) ** self._per_step for m in self._layers
        ]
        self._before: list[torch.Tensor] = []
        self._sum = OrderedSum(num_local, world_size)
        for layer in self._layers:
            layer.momentum = 1.0  # a forward leaves its own statistics

    def begin(self) -> None:
        """Before a step's first forward."""
        self._before = [_statistics(layer) for layer in self._layers]

    def take(self) -> None:
        """After the forward of the rank's next micro-batch."""
        if self._layers:
            self._sum.add(torch.cat([_statistics(layer) for layer in self._layers]))

    def end(self) -> None:
        """After a step's last forward."""
        if not self._layers:
            return
        means = self._sum.finish() / self._per_step
        sizes = [before.numel() for before in self._before]
        parts = zip(self._layers, self._momenta, self._before, means.split(sizes), strict=True)
        for layer, momentum, before, mean in parts:
            blended = torch.lerp(before, mean, momentum)
            half = blended.numel() // 2
            layer.running_mean.copy_(blended[:half])  # type: ignore[union-attr]
            layer.running_var.copy_(blended[half:])  # type: ignore[union-attr]
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked += self._of_others


def _statistics(layer: _BatchNorm) -> torch.Tensor:
    return torch.cat([layer.running_mean, layer.running_var])  # type: ignore[list-item]


def num_classes_of(run: RunConfig, spec: StreamSpec) -> int:
    """Classes of the classifier that a run trains."""
    if run.transform.target_columns:
        raise ConfigError(
            "a run trains a classifier, which has no use for transform.mask_column and transform.boxes_column: "
            "leave them out, or write a loop of your own around raypipe.feed, as docs/targets.md does"
        )
    classes = spec.stores["train"].classes
    if run.train.num_classes:
        return run.train.num_classes
    if classes is None:
        raise ConfigError(f"{run.store.train} does not name its classes: set train.num_classes")
    val = spec.stores.get("val")
    if val is not None and val.classes is not None and val.classes != classes:
        raise ConfigError(
            f"{run.store.train} has {len(classes)} classes and {run.store.val} has {len(val.classes)} others, "
            "or in another order: their labels mean different things. Ingest both with the same classes"
        )
    return len(classes)
