"""The ordered sum: one result, to the bit, for every number of workers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypipe import gradients as module
from raypipe.gradients import OrderedGradients


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


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
    return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("per_step", [1, 2, 3, 4, 6, 8, 12, 16])
def test_every_power_of_two_of_workers_gives_the_same_bits(per_step: int) -> None:
    alone = local_sum(per_step, 0, 1)
    world_size = 2
    while per_step % world_size == 0:
        ranks = [local_sum(per_step, rank, world_size) for rank in range(world_size)]
        assert torch.equal(module._tree_sum(ranks), alone), world_size
        world_size *= 2


def test_the_plain_order_would_differ() -> None:
    net = model()
    for micro in range(8):
        backward(net, micro)
    plain = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
    ordered = local_sum(8, 0, 1)
    assert not torch.equal(plain, ordered)
    torch.testing.assert_close(plain, ordered, rtol=1e-4, atol=1e-4)


def test_steps_do_not_add_up() -> None:
    net = model()
    summed = OrderedGradients(net, 4, 1)
    results = []
    for _ in range(2):
        for micro in range(4):
            backward(net, micro)
            summed.take()
        summed.finish()
        results.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        net.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_parameter_without_a_gradient_has_zeros_and_a_frozen_one_none() -> None:
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)])
    summed = OrderedGradients(net, 1, 1)
    net[0](torch.ones(1, 2)).sum().backward()
    summed.take()
    summed.finish()
    assert net[0].weight.grad is not None and net[0].weight.grad.eq(1).all()
    assert net[1].weight.grad is not None and net[1].weight.grad.eq(0).all()
    assert net[2].weight.grad is None
