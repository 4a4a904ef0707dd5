from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raypipe.config import PlanConfig, RunConfig, TrainConfig
from raypipe.device.prefetcher import Batch
from raypipe.errors import ConfigError
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.saving.stateful import states_of
from raypipe.train.learning import Ema, Learner
from raypipe.train.models import (
    build_model,
    build_optimizer,
    build_schedule,
    learning_rate,
)


@pytest.mark.parametrize("name", ["googlenet", "GoogLeNet", "inception_v3"])
def test_a_model_with_auxiliary_heads_gives_logits_alone_in_training(name: str) -> None:
    with torch.device("meta"):
        # where nothing is computed, their initial weights neither
        model = build_model(name, 5).train()
        logits = model(torch.rand(2, 3, 96, 96))
        assert isinstance(logits, torch.Tensor) and logits.shape == (2, 5)
        logits.float().square().mean().backward()
    # else DistributedDataParallel would wait for some
    assert all(p.grad is not None for p in model.parameters())


# The learning rate


def test_the_rate_warms_up_linearly_and_falls_by_half_a_cosine() -> None:
    rates = [learning_rate(step, 104, 4, 0.8) for step in range(104)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert rates[54] == pytest.approx(0.4) and 0 < rates[-1] < 1e-3
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert [learning_rate(step, 2, 2, 1.0) for step in range(2)] == [0.5, 1.0]
    assert learning_rate(0, 10, 0, 1.0) == 1.0
    assert learning_rate(1, 2, 8, 1.0) == 0.25


# The optimizer


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_biases_and_norms_do_not_decay(name: str) -> None:
    model = build_model("small", 10)
    optimizer = build_optimizer(
        model, TrainConfig(optimizer={"name": name, "weight_decay": 0.3}, lr=0.1)
    )  # type: ignore[arg-type]
    decay = {
        id(p): group["weight_decay"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert decay.keys() == {id(p) for p in model.parameters()}
    for module in model.modules():
        for kind, parameter in module.named_parameters(recurse=False):
            plain = isinstance(module, nn.BatchNorm2d) or kind == "bias"
            assert decay[id(parameter)] == (0.0 if plain else 0.3)


CPU = torch.device("cpu")


# Code of the user's


def linear(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))


def hinge(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.multi_margin_loss(logits, target, reduction="none")


def mean_hinge(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return hinge(logits, target).mean()


def plain_sgd(groups: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr)


def half(step: int, total: int, warmup: int, peak: float) -> float:
    return peak / 2


def lost(step: int, *others: float) -> float:
    return math.nan


class Pair(nn.Module):
    """A model with a second output."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = linear(num_classes)

    def forward(self, image: torch.Tensor) -> Any:
        return self.net(image), image


def three_outputs(num_classes: int) -> nn.Module:
    return linear(3)


def a_map_of_logits(num_classes: int) -> nn.Module:
    return nn.Conv2d(3, num_classes, 3)


def a_list_of_losses(logits: torch.Tensor, target: torch.Tensor) -> Any:
    return list(hinge(logits, target))


def no_optimizer(groups: Any, lr: float) -> None: ...


def own(name: str) -> str:
    return f"{__name__}:{name}"


def test_model_loss_optimizer_and_schedule_may_be_code_of_the_users() -> None:
    config = {
        "model": own("linear"),
        "loss": own("hinge"),
        "optimizer": {"name": own("plain_sgd"), "weight_decay": 0.0},
    }
    first = states_of(learner(**config).parts())["model"]
    found = learn(learner(**config), range(3))
    net = linear(5)
    net.load_state_dict(first)
    for step in range(3):  # the same by hand
        for micro in range(2):
            image = torch.randn(
                4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + micro)
            )
            (hinge(net(image), torch.arange(4)).mean() / 2).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.01 * parameter.grad
        net.zero_grad()
    for name, value in net.state_dict().items():
        assert torch.allclose(found["model"][name], value, atol=1e-6), name
    learner(**config).load(found)
    assert build_schedule(TrainConfig(lr_schedule=own("half")))(3, 10, 2, 0.4) == 0.2


def test_a_validation_has_the_users_loss_or_plain_cross_entropy() -> None:
    logits, target = torch.tensor([[2.0, -1, 0, 0, 1]]), torch.tensor([3])
    assert torch.equal(
        learner(loss=own("hinge")).val_loss(logits, target), hinge(logits, target)
    )
    plain = nn.functional.cross_entropy(logits, target, reduction="none")
    assert torch.equal(
        learner(loss={"name": "cross_entropy", "label_smoothing": 0.5}).val_loss(
            logits, target
        ),
        plain,
    )


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"model": own("nothing")}, r"train\.model '.*:nothing' cannot be imported"),
        (
            {"model": "builtins:dict"},
            r"train\.model=builtins:dict must return a torch\.nn\.Module, got dict",
        ),
        (
            {"model": own("Pair")},
            r"Pair returned tuple for 4 images: it must return a tensor \(4, 5\)",
        ),
        (
            {"model": own("three_outputs")},
            r"returned \(4, 3\) for 4 images: it must return a tensor \(4, 5\)",
        ),
        (
            {"model": own("a_map_of_logits"), "loss": own("hinge")},
            r"returned \(4, 5, 6, 6\) for 4 images",
        ),
        (
            {"loss": own("mean_hinge")},
            r"returned \(\) for 4 samples: .*reduction='none'",
        ),
        (
            {"loss": own("a_list_of_losses")},
            r"returned list for 4 samples: .*reduction='none'",
        ),
        (
            {"optimizer": own("no_optimizer")},
            r"must return a torch\.optim\.Optimizer, got NoneType",
        ),
        (
            {"loss": "hinge"},
            r"train\.loss must be module:function or one of \['cross_entropy'\]",
        ),
        (
            {"optimizer": "adam"},
            r"train\.optimizer must be module:function or one of \['sgd', 'adamw'\]",
        ),
    ],
)
def test_what_is_wrong_with_it_is_told(train: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        learn(learner(**train), range(1))


def learner(num_classes: int = 5, **train: Any) -> Learner:
    config = TrainConfig(**{"model": "small", **train})
    run = RunConfig(plan=PlanConfig(global_batch_size=128), train=config)
    torch.manual_seed(0)
    return Learner(run, num_classes, CPU, 1)


def batch_of(at: MicroBatchId, seed: int) -> Batch:
    host, image = (
        np.arange(4),
        torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)),
    )
    return Batch(
        at,
        seed,
        {"image": image, "label": torch.arange(4)},
        torch.ones(4),
        host,
        host,
        0,
    )


def learn(learner: Learner, steps: range) -> dict[str, Any]:
    """Its state after some steps, each on two given micro-batches, as a checkpoint gives it back."""
    for step in steps:
        learner.begin_step(0.01)
        for micro in range(2):
            batch = batch_of(MicroBatchId("train", 0, step, micro), 2 * step + micro)
            learner.backward(batch, last=micro == 1)
        learner.end_step(step + 1)
    file = io.BytesIO()
    torch.save(states_of(learner.parts()), file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


@pytest.mark.parametrize(
    "train",
    [
        {"optimizer": "sgd"},
        {"optimizer": {"name": "adamw", "ema_decay": 0.9, "max_grad_norm": 1.0}},
    ],
)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_learner_goes_on_from_its_state_to_the_same_bits(
    train: Any, steps_before: int
) -> None:
    unbroken = learn(learner(**train), range(5))
    state, resumed = learn(learner(**train), range(steps_before)), learner(**train)
    torch.manual_seed(9)  # what is drawn is a function of the micro-batch
    resumed.load(state)
    found = learn(resumed, range(steps_before, 5))
    for name in ("model", "ema"):
        assert (found[name] is None) == (unbroken[name] is None)
        assert all(
            torch.equal(value, unbroken[name][key])
            for key, value in (found[name] or {}).items()
        )


def test_an_average_that_a_checkpoint_has_not_begins_at_the_model() -> None:
    state, resumed = (
        learn(learner(), range(2)),
        learner(optimizer={"name": "sgd", "ema_decay": 0.9}),
    )
    resumed.load(state)
    found = states_of(resumed.parts())
    assert all(
        torch.equal(value, found["model"][name]) for name, value in found["ema"].items()
    )


def test_a_resume_has_the_settings_of_its_own_run() -> None:
    resumed = learner(optimizer={"name": "sgd", "momentum": 0.5, "weight_decay": 0.2})
    resumed.load(learn(learner(), range(1)))
    groups = states_of(resumed.parts())["optimizer"]["param_groups"]
    assert [(group["momentum"], group["weight_decay"]) for group in groups] == [
        (0.5, 0.2),
        (0.5, 0.0),
    ]


@pytest.mark.parametrize(("was", "now"), [("sgd", "adamw"), ("adamw", "sgd")])
def test_the_state_of_another_optimizer_is_refused(was: Any, now: Any) -> None:
    state = learn(learner(optimizer=was), range(1))
    with pytest.raises(ConfigError, match=rf"train\.optimizer to {was}"):
        learner(optimizer=now).load(state)


def test_a_label_outside_of_the_classes_is_named_in_both_splits() -> None:
    with pytest.raises(
        ConfigError, match=r"train sample 3 has label 3, outside \[0, 3\)"
    ):
        learn(learner(num_classes=3), range(1))
    with pytest.raises(
        ConfigError, match=r"val sample 3 has label 3, outside \[0, 3\)"
    ):
        learner(num_classes=3).evaluate(batch_of(MicroBatchId("val", 0, 0, 0), 0))


def test_a_schedule_that_gives_no_number_is_named_with_the_step() -> None:
    with pytest.raises(
        ConfigError,
        match=r"train\.lr_schedule=.*:lost at step 7 must be a finite number",
    ):
        build_schedule(TrainConfig(lr_schedule=own("lost")))(7, 10, 2, 0.4)


def test_the_state_of_another_model_is_refused() -> None:
    for other in (
        learner(num_classes=6),
        learner(model="resnet18"),
    ):
        # torch names all of its parameters
        with pytest.raises(
            ConfigError,
            match=r"the checkpoint's model is not that of train\.model=\w+ with \d outputs: [^\n]{50,400}$",
        ):
            other.load(learn(learner(), range(1)))


# The average


def test_the_average_follows_by_the_warmed_up_decay() -> None:
    norm = nn.BatchNorm1d(1)
    ema = Ema(norm, decay=0.9)
    norm.num_batches_tracked += 7  # type: ignore[operator]
    expected = 0.0
    for step in range(1, 120):
        for value in (norm.bias, norm.running_mean):
            nn.init.constant_(value, float(step))  # type: ignore[arg-type]
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert ema.model.bias.item() == pytest.approx(expected, rel=1e-5)
    assert ema.model.running_mean.item() == pytest.approx(expected, rel=1e-5)
    assert ema.model.num_batches_tracked.item() == 0, "counters are left alone"
    assert not ema.model.training and not ema.model.bias.requires_grad
    assert norm.bias.item() == 119
