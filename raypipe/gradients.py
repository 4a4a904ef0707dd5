"""Gradients of a step, summed in one order for every number of workers. Knows torch, not Ray.

Floating-point sums depend on their order, and training doubles the difference of two roundings every few
steps: W=1 and W=2 part at 1e-7 and are 1e-2 apart after 50 steps of AdamW. Here a step's M gradients are added up
in a tree that every power of two W cuts at its joints:

    S(r, w) = S(r, 2w) + S(r + w, 2w)     the micro-batches m with m mod w = r, while M / w is even,
    S(r, w) = g_r + g_{r+w} + …           in order, once it is odd

Rank r of W holds the micro-batches m mod W = r, so its sum is S(r, W), and S(0, 1) is what all ranks need.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


class OrderedGradients:
    """Takes the gradients of a rank's micro-batches one by one, and leaves the sum over all ranks' in `.grad`.

    It holds half as many copies of the gradients as the rank has micro-batches in a step. Use it instead of
    DistributedDataParallel, with loss / M as each micro-batch's loss.

    Args:
        model: whose parameters' gradients are summed.
        num_local: M / W, micro-batches of this rank in a step.
        world_size: W.
    """

    def __init__(self, model: nn.Module, num_local: int, world_size: int) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._world_size = world_size
        even = num_local & -num_local  # the largest power of two that divides it
        # Two micro-batches that are added first share a slot.
        self._num_slots = max(1, even // 2) if even == num_local else even
        self._slots: list[torch.Tensor] = []
        self._taken = 0

    @torch.no_grad()
    def take(self) -> None:
        """After each backward: the gradient of the rank's next micro-batch."""
        flat = torch.cat([_gradient(p).reshape(-1) for p in self._parameters])
        if self._taken < self._num_slots:
            self._slots.append(flat)
        else:
            self._slots[self._taken % self._num_slots] += flat
        self._taken += 1
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """After the last of a step: sum over all ranks; every `.grad` then holds the step's."""
        total = _tree_sum(self._slots)
        if self._world_size & (self._world_size - 1) == 0 and self._world_size > 2:
            gathered = [torch.empty_like(total) for _ in range(self._world_size)]
            dist.all_gather(gathered, total)
            total = _tree_sum(gathered)
        elif self._world_size > 1:
            dist.all_reduce(total)  # of two, a + b is b + a
        parts = total.split([p.numel() for p in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape).clone(memory_format=torch.preserve_format)
        self._slots, self._taken = [], 0


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _tree_sum(sums: list[torch.Tensor]) -> torch.Tensor:
    """S(0, 1) of S(0, n) … S(n - 1, n), n a power of two; the list is used up."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i].add_(sums[i + half]) for i in range(half)]
    return sums[0]
