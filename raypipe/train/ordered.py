"""Sums over micro-batches that do not depend on the number of workers. Knows torch, not Ray.

Floating-point sums depend on their order, and training doubles the difference of two roundings every few
steps: W=1 and W=2 part at 1e-7 and are 1e-2 apart after 50 steps of AdamW. So a step's M terms are added up in a
tree that every power of two W cuts at its joints:

    S(r, w) = S(r, 2w) + S(r + w, 2w)     the micro-batches m with m mod w = r, while M / w is even,
    S(r, w) = x_r + x_{r+w} + …           in order, once it is odd

Rank r of W holds the micro-batches m mod W = r, so its sum is S(r, W), and S(0, 1) is what all ranks need.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


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
