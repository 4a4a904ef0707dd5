from __future__ import annotations

import pytest
import torch
from torch import nn

from raypipe.config import TrainConfig
from raypipe.errors import ConfigError
from raypipe.models import Ema, build_model, build_optimizer, learning_rate


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


# The average


def test_the_average_follows_by_the_warmed_up_decay() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    nn.init.constant_(model[0].weight, 0.0)
    ema = Ema(model, decay=0.9)
    expected = 0.0
    for step in range(1, 120):
        nn.init.constant_(model[0].weight, float(step))
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert ema.model[0].weight.item() == pytest.approx(expected, rel=1e-5)
    assert not ema.model.training and not ema.model[0].weight.requires_grad
    assert model[0].weight.item() == 119


def test_running_statistics_are_averaged_and_counters_left_alone() -> None:
    model = nn.BatchNorm1d(2)
    ema = Ema(model, decay=0.5)
    model.running_mean.fill_(4.0)  # type: ignore[union-attr]
    model.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
    ema.update(1)  # (1 + 1) / (10 + 1)
    assert ema.model.running_mean.tolist() == pytest.approx([4 * 9 / 11] * 2)  # type: ignore[union-attr]
    assert int(ema.model.num_batches_tracked) == 0  # type: ignore[arg-type]
