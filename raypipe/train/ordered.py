"""Sums over micro-batches that do not depend on the number of workers. Imports torch, not Ray.

Floating-point sums depend on their order, and training doubles the difference of two roundings every few
steps: W=1 and W=2 diverge at 1e-7 and differ by 1e-2 after 50 steps of AdamW. So a step's M terms are added in a
tree whose subtrees match the ranks for every power of two W:

    S(r, w) = S(r, 2w) + S(r + w, 2w)     the micro-batches m with m mod w = r, while M / w is even,
    S(r, w) = x_r + x_{r+w} + …           in order, once it is odd

Rank r of W has the micro-batches m mod W = r, so its sum is S(r, W). All ranks need S(0, 1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


class OrderedSum:
    """Sum of one flat tensor per micro-batch, over this rank's micro-batches and over all ranks.

    It keeps half as many tensors as the rank has micro-batches in a step. The communication between ranks starts
    at the last term, and overlaps with other work until `finish`.

    Args:
        num_local: M / W, number of this rank's micro-batches in a step.
        world_size: W.
    """

    def __init__(self, num_local: int, world_size: int) -> None:
        self._num_local = num_local
        self._world_size = world_size
        even = num_local & -num_local  # the largest power of two that divides num_local
        # The two terms that are added first share a slot.
        if even == num_local:
            self._num_slots = max(1, even // 2)
        else:
            self._num_slots = even
        self._slots: list[torch.Tensor] = []
        self._num_terms = 0
        self._ranks: list[torch.Tensor] = []  # the sum of each rank, or one of all
        self._sent: Any = None

    def add(self, term: torch.Tensor) -> None:
        """Add the term of the rank's next micro-batch, in place. All ranks must reach the last term of a step."""
        if self._num_terms < self._num_slots:
            self._slots.append(term)
        else:
            self._slots[self._num_terms % self._num_slots] += term
        self._num_terms += 1
        if self._num_terms == self._num_local:
            self._send(tree_sum(self._slots))
            self._slots = []
            self._num_terms = 0

    def _send(self, total: torch.Tensor) -> None:
        self._ranks = [total]
        if self._world_size & (self._world_size - 1) == 0 and self._world_size > 2:
            self._ranks = [torch.empty_like(total) for _ in range(self._world_size)]
            self._sent = dist.all_gather(self._ranks, total, async_op=True)
        elif self._world_size > 1:
            # the order of two terms does not matter
            self._sent = dist.all_reduce(total, async_op=True)

    def finish(self) -> torch.Tensor:
        """Return the sum over all ranks, on each rank; call after the last term of a step."""
        if self._sent is not None:
            self._sent.wait()  # on CUDA only the stream waits, not the host
        total, self._ranks, self._sent = tree_sum(self._ranks), [], None
        return total


def tree_sum(sums: list[torch.Tensor]) -> torch.Tensor:
    """Return S(0, 1) from S(0, n) … S(n - 1, n), which are overwritten; n is a power of two."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i].add_(sums[i + half]) for i in range(half)]
    return sums[0]


class OrderedGradients:
    """Sums the gradients of all ranks' micro-batches into `.grad`.

    It replaces DistributedDataParallel, with loss / M as the loss of each micro-batch. See `OrderedSum` for
    arguments.
    """

    def __init__(self, model: nn.Module, num_local: int, world_size: int) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sum = OrderedSum(num_local, world_size)

    @torch.no_grad()
    def take(self) -> None:
        """Take the gradient of the rank's next micro-batch; call after each backward."""
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters
        ]
        self._sum.add(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Set every `.grad` to the sum over all ranks; call after the last micro-batch of a step."""
        sums = self._sum.finish().split([p.numel() for p in self._parameters])
        # Gradients get the parameters' strides, as after a backward, since fused optimizers on CUDA need them.
        gradients = [torch.empty_like(parameter) for parameter in self._parameters]
        torch._foreach_copy_(
            gradients,
            [flat.view_as(p) for flat, p in zip(sums, gradients, strict=True)],
        )
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


class StepBatchNorm:
    """Running statistics of BatchNorm and InstanceNorm that do not depend on the number of workers.

    torch updates them once per forward, so they would depend on a rank's micro-batches. This class averages the
    statistics of the n micro-batches of a step in which a layer ran, which are all M unless the model skips it,
    and updates once per step, with the momentum of n single updates: 1 - (1 - p)^n. `num_batches_tracked` counts
    all ranks' forwards. The statistics of all layers are one flat tensor, so a step takes few operations. See
    `OrderedSum` for arguments.
    """

    def __init__(self, model: nn.Module, num_local: int, world_size: int) -> None:
        kinds = _BatchNorm, _InstanceNorm
        self._layers = [
            m for m in model.modules() if isinstance(m, kinds) and m.track_running_stats
        ]
        self._is_alone = world_size == 1
        self._sum = OrderedSum(num_local, world_size)
        self._before = self._begun = self._counted = self._momenta = self._layer_of = (
            torch.empty(0)
        )
        if not self._layers:
            return
        momenta = [
            0.1 if layer.momentum is None else layer.momentum for layer in self._layers
        ]
        kept = torch.tensor(momenta, dtype=torch.float64).neg_().add_(1)
        by_num = [
            kept.pow(num).neg_().add_(1) for num in range(num_local * world_size + 1)
        ]
        flat = self._flat()
        self._momenta = torch.stack(by_num).to(flat)  # (M + 1, layers)
        layer_of = [
            number
            for number, layer in enumerate(self._layers)
            for _ in range(2 * layer.num_features)
        ]
        self._layer_of = torch.tensor(layer_of, device=flat.device)
        for layer in self._layers:
            layer.momentum = 1.0  # a forward then sets its own statistics
            if layer.num_batches_tracked is None:
                layer.num_batches_tracked = torch.zeros(
                    (), dtype=torch.int64, device=flat.device
                )
            if isinstance(layer, _InstanceNorm):  # BatchNorm counts by itself
                layer.register_forward_hook(_count)

    def begin(self) -> None:
        """Begin a step; call before its first forward."""
        if self._layers:
            self._before = self._flat()
            self._begun = self._counted = self._counters()

    def take(self) -> None:
        """Take the statistics of the rank's next micro-batch; call after its forward."""
        if not self._layers:
            return
        counted = self._counters()
        num_forwards = counted - self._counted
        self._counted = counted
        ran = num_forwards > 0
        flat = self._flat()
        # a layer that was skipped has those of an earlier one
        statistics = torch.where(ran[self._layer_of], flat, 0)
        self._sum.add(
            torch.cat([statistics, ran.to(flat.dtype), num_forwards.to(flat.dtype)])
        )

    def end(self) -> None:
        """Update the running statistics; call after a step's last forward."""
        if not self._layers:
            return
        num_layers = len(self._layers)
        total, num_ran, num_forwards = self._sum.finish().split(
            [len(self._layer_of), num_layers, num_layers]
        )
        num = num_ran[self._layer_of]
        momenta = self._momenta.gather(0, num_ran.long()[None])[0, self._layer_of]
        blended = torch.lerp(self._before, total / num.clamp(min=1), momenta)
        live = self._live()
        torch._foreach_copy_(
            live, blended.split([statistic.numel() for statistic in live])
        )
        if not self._is_alone:
            counters: list[Any] = [layer.num_batches_tracked for layer in self._layers]
            torch._foreach_copy_(
                counters, list((self._begun + num_forwards.long()).unbind())
            )

    def _live(self) -> list[torch.Tensor]:
        """Return running mean and variance of each layer: their current tensors, which `model.to` replaces."""
        statistics = (
            statistic
            for m in self._layers
            for statistic in (m.running_mean, m.running_var)
        )
        return [statistic for statistic in statistics if statistic is not None]

    def _flat(self) -> torch.Tensor:
        return torch.cat(self._live())

    def _counters(self) -> torch.Tensor:
        """The number of forwards of each layer, int64 (layers,)."""
        counters: list[Any] = [layer.num_batches_tracked for layer in self._layers]
        return torch.stack(counters)


def _count(layer: Any, *_: Any) -> None:
    """Count a forward in training, as BatchNorm does."""
    if layer.training:
        layer.num_batches_tracked.add_(1)
