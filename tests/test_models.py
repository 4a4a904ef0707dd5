from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from raypipe import models
from raypipe.config import TrainConfig
from raypipe.errors import ConfigError
from raypipe.models import StepBatchNorm, build_model, build_optimizer, learning_rate


@pytest.mark.parametrize("side", [8, 32])
def test_the_small_model_takes_tiny_images(side: int) -> None:
    model = build_model("small", 7)
    out = model(torch.zeros(2, 3, side, side))
    assert out.shape == (2, 7)
    assert 0.25e6 < sum(p.numel() for p in model.parameters()) < 0.35e6


def test_torchvision_models_are_built_by_name() -> None:
    model = build_model("squeezenet1_1", 5).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 5)


def test_an_unknown_model_is_named_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"train\.model='resnet51' is neither 'small' nor .*alexnet"):
        build_model("resnet51", 5)


# The learning rate


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert [learning_rate(step, 100, 4, 0.8) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])


def test_half_a_cosine_leads_from_the_peak_to_near_zero() -> None:
    rates = [learning_rate(step, 104, 4, 1.0) for step in range(4, 104)]
    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.0, abs=1e-3) and rates[-1] > 0
    assert rates == sorted(rates, reverse=True)


def test_schedules_without_or_with_nothing_but_warm_up() -> None:
    assert learning_rate(0, 10, 0, 1.0) == 1.0
    assert [learning_rate(step, 2, 2, 1.0) for step in range(2)] == [0.5, 1.0]
    assert learning_rate(1, 2, 8, 1.0) == 0.25


# The optimizer


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_biases_and_norms_do_not_decay(name: str) -> None:
    model = build_model("small", 10)
    optimizer = build_optimizer(model, TrainConfig(optimizer=name, weight_decay=0.3))  # type: ignore[arg-type]
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay.keys() == {id(p) for p in model.parameters()}
    for module in model.modules():
        for kind, parameter in module.named_parameters(recurse=False):
            plain = isinstance(module, nn.BatchNorm2d) or kind == "bias"
            assert decay[id(parameter)] == (0.0 if plain else 0.3)


def test_sgd_is_nesterov_unless_there_is_no_momentum() -> None:
    model = nn.Linear(2, 2)
    assert build_optimizer(model, TrainConfig(momentum=0.8)).defaults["nesterov"]
    assert not build_optimizer(model, TrainConfig(momentum=0.0)).defaults["nesterov"]


# BatchNorm


def running(model: nn.Module) -> torch.Tensor:
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    return torch.cat([torch.cat([m.running_mean, m.running_var]) for m in layers])


def norms() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3))


def test_running_statistics_of_a_step_by_hand() -> None:
    layer = nn.BatchNorm1d(1, momentum=0.1)
    step = StepBatchNorm(layer, per_step=2)
    step.begin()
    layer(torch.tensor([[0.0], [2.0]]))  # mean 1, variance 2
    layer(torch.tensor([[4.0], [8.0]]))  # mean 6, variance 8
    step.end(world_size=1)
    # Two updates at 0.1 take in 1 - 0.9² = 0.19 of the means, 3.5 and 5, of what was 0 and 1.
    assert running(layer).tolist() == pytest.approx([0.19 * 3.5, 0.81 + 0.19 * 5])


def test_a_step_of_one_micro_batch_is_torchs_own_update() -> None:
    ours, theirs = norms(), norms()
    step = StepBatchNorm(ours, per_step=1)
    for number in range(3):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
        step.begin()
        ours(x)
        step.end(world_size=1)
        theirs(x)
    torch.testing.assert_close(running(ours), running(theirs))


@pytest.mark.parametrize("world_size", [2, 4])
def test_running_statistics_do_not_depend_on_the_number_of_workers(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_step, num_steps = 4, 3
    x = torch.randn(num_steps, per_step, 6, 3, generator=torch.Generator().manual_seed(0))

    alone = norms()
    single = StepBatchNorm(alone, per_step)
    for batches in x:
        single.begin()
        for batch in batches:
            alone(batch)
        single.end(world_size=1)

    ranks = [copy.deepcopy(norms()) for _ in range(world_size)]
    steps = [StepBatchNorm(model, per_step) for model in ranks]
    for batches in x:
        for rank, (model, step) in enumerate(zip(ranks, steps, strict=True)):
            step.begin()
            for batch in batches[rank::world_size]:
                model(batch)
        # What each rank would send: the mean over its own micro-batches.
        total = torch.stack([running(model) for model in ranks]).sum(0)
        monkeypatch.setattr(models.dist, "all_reduce", lambda means, total=total: means.copy_(total))
        for step in steps:
            step.end(world_size)

    for model in ranks:
        torch.testing.assert_close(running(model), running(alone))


def test_a_model_without_batch_norm_needs_nothing() -> None:
    step = StepBatchNorm(nn.Linear(2, 2), per_step=4)
    step.begin()
    step.end(world_size=8)  # would need a process group if it sent anything
