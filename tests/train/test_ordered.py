from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.train import ordered
from raypipe.train.ordered import OrderedGradients, StepBatchNorm, tree_sum

# The ordered sum: one result, to the bit, for every number of workers


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def backward(net: nn.Module, micro: int) -> None:
    image = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(micro))
    net(image).logsumexp(1).sum().backward()


def local_sum(per_step: int, rank: int, world_size: int) -> torch.Tensor:
    """The flat sum of one rank's micro-batches."""
    net = model()
    summed = OrderedGradients(net, per_step // world_size, 1)
    for micro in range(rank, per_step, world_size):
        backward(net, micro)
        summed.take()
    summed.finish()
    return torch.cat(
        [p.grad.reshape(-1) for p in net.parameters() if p.grad is not None]
    )


@pytest.mark.parametrize("per_step", [1, 2, 3, 4, 6, 8, 12, 16])
def test_every_power_of_two_of_workers_gives_the_same_bits(per_step: int) -> None:
    alone = local_sum(per_step, 0, 1)
    world_size = 2
    while per_step % world_size == 0:
        ranks = [local_sum(per_step, rank, world_size) for rank in range(world_size)]
        assert torch.equal(tree_sum(ranks), alone), world_size
        world_size *= 2


def test_a_parameter_without_a_gradient_has_zeros_and_a_frozen_one_none() -> None:
    net = nn.ModuleList(
        [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)]
    )
    summed = OrderedGradients(net, 1, 1)
    net[0](torch.ones(1, 2)).sum().backward()
    summed.take()
    summed.finish()
    assert net[0].weight.grad is not None and net[0].weight.grad.eq(1).all()
    assert net[1].weight.grad is not None and net[1].weight.grad.eq(0).all()
    assert net[2].weight.grad is None


# BatchNorm


def norms_of(model: nn.Module) -> list[Any]:
    return [
        m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.InstanceNorm1d)
    ]


def running(model: nn.Module) -> torch.Tensor:
    return torch.cat(
        [torch.cat([m.running_mean, m.running_var]) for m in norms_of(model)]
    )


def norms() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3)
    )


class Skipping(nn.Module):
    """Has a block that does not run for half of the batches, as with stochastic depth, and an InstanceNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block = nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=0.3)
        self.instance = nn.InstanceNorm1d(1, track_running_stats=True)
        self.frozen = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.frozen.eval()
        x = self.frozen(self.first(x))
        if x[0, 0] > 0:
            x = self.block(x)
        return self.instance(x[:, None])


def test_running_statistics_of_a_step_by_hand() -> None:
    layer = nn.BatchNorm1d(1, momentum=0.1)
    step = StepBatchNorm(layer, num_local=2, world_size=1)
    step.begin()
    for batch in (
        [[0.0], [2.0]],
        [[4.0], [8.0]],
    ):
        # mean 1, variance 2; mean 6, variance 8
        layer(torch.tensor(batch))
        step.take()
    step.end()
    # Two updates at 0.1 take in 1 - 0.9² = 0.19 of the means, 3.5 and 5, of what was 0 and 1.
    assert running(layer).tolist() == pytest.approx([0.19 * 3.5, 0.81 + 0.19 * 5])


def test_a_step_of_one_micro_batch_is_torchs_own_update() -> None:
    ours, theirs = norms(), norms()
    step = StepBatchNorm(ours, 1, 1)
    for number in range(3):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        step.begin()
        ours(x)
        step.take()
        step.end()
        theirs(x)
    torch.testing.assert_close(running(ours), running(theirs))


class Sent:
    """A collective under way: until someone waits for it, its results are not there."""

    def __init__(self, of_ranks: list[torch.Tensor], out: list[torch.Tensor]) -> None:
        self._of_ranks, self._out = of_ranks, out
        for tensor in out:
            tensor.fill_(float("nan"))

    def wait(self) -> None:
        if len(self._out) == 1:
            self._out[0].copy_(self._of_ranks[0] + self._of_ranks[1])
        else:
            for tensor, each in zip(self._out, self._of_ranks, strict=True):
                tensor.copy_(each)


@pytest.mark.parametrize("make", [norms, Skipping])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_running_statistics_are_bit_identical_for_any_workers(
    world_size: int, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    per_step, num_steps = 8, 3
    x = torch.randn(
        num_steps, per_step, 6, 3, generator=torch.Generator().manual_seed(0)
    )

    alone = make()
    single = StepBatchNorm(alone, per_step, 1)
    for batches in x:
        single.begin()
        for batch in batches:
            alone(batch)
            single.take()
        single.end()

    ranks = [make() for _ in range(world_size)]
    steps = [
        StepBatchNorm(model, per_step // world_size, world_size) for model in ranks
    ]
    sent: list[torch.Tensor] = []

    def gather(out: list[torch.Tensor], term: torch.Tensor, async_op: bool) -> Sent:
        sent.append(term.clone())
        return Sent(sent, out)

    def reduce(term: torch.Tensor, async_op: bool) -> Sent:
        sent.append(term.clone())
        return Sent(sent, [term])

    monkeypatch.setattr(ordered.dist, "all_gather", gather)
    monkeypatch.setattr(ordered.dist, "all_reduce", reduce)
    for batches in x:
        sent.clear()
        for rank, (model, step) in enumerate(zip(ranks, steps, strict=True)):
            step.begin()
            for batch in batches[rank::world_size]:
                model(batch)
                step.take()
            assert len(sent) == rank + 1, (
                "one collective for each step, under way from the last forward on"
            )
        for step in steps:
            step.end()

    for model in ranks:
        assert torch.equal(running(model), running(alone))
        counts = [
            [int(layer.num_batches_tracked) for layer in norms_of(each)]
            for each in (model, alone)
        ]
        assert counts[0] == counts[1] and counts[0][0] == num_steps * per_step


def test_a_model_without_batch_norm_needs_nothing() -> None:
    step = StepBatchNorm(nn.Linear(2, 2), num_local=1, world_size=8)
    step.begin()
    step.take()
    step.end()  # would need a process group if it sent anything
