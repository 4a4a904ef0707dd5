from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from raypipe.config import TrainConfig
from raypipe.errors import ConfigError
from raypipe.train import learning
from raypipe.train.learning import (
    Ema,
    OrderedGradients,
    StepBatchNorm,
    build_model,
    build_optimizer,
    learning_rate,
    restore_optimizer,
    tree_sum,
)


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


@pytest.mark.parametrize("name", ["googlenet", "GoogLeNet", "inception_v3"])
def test_a_model_with_auxiliary_heads_gives_logits_alone_in_training(name: str) -> None:
    with torch.device("meta"):  # where nothing is computed, their initial weights neither
        model = build_model(name, 5).train()
        logits = model(torch.rand(2, 3, 96, 96))
        assert isinstance(logits, torch.Tensor) and logits.shape == (2, 5)
        logits.float().square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())  # else DistributedDataParallel would wait for some


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


class Run:
    """A few steps of training on given gradients, by the CPU's plain or fused kernels, in either memory format.

    Of the fused kernels those of CUDA differ in what they refuse: gradients with other strides.
    """

    def __init__(self, name: Any, fused: bool, memory_format: torch.memory_format, scaled: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        self.model = self.model.to(memory_format=memory_format)  # type: ignore[call-overload]
        settings = TrainConfig(optimizer=name, lr=0.02, weight_decay=0.01)
        self.optimizer = build_optimizer(self.model, settings, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=scaled)

    def step(self, number: int, factor: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(number)
        image = torch.randn(2, 3, 4, 4, generator=generator)
        self.scaler.scale((self.model(image) - 1).square().mean() * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def resumed(self, *how: Any) -> Run:
        """Another run that goes on from this one's checkpoint."""
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.model, self.optimizer, self.scaler)], file)
        file.seek(0)
        model, optimizer, scaler = torch.load(file, weights_only=True)
        other = Run(*how)
        other.model.load_state_dict(model)
        restore_optimizer(other.optimizer, other.scaler, optimizer, scaler)
        return other


PLAIN, FUSED = (False, torch.contiguous_format), (True, torch.channels_last)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_fp16_whose_first_step_overflows_learns_from_the_second_as_if_it_were_the_first(name: str) -> None:
    torch.use_deterministic_algorithms(True)  # memory that nothing was written to is NaN
    try:
        run, expected = Run(name, *FUSED, True), Run(name, *PLAIN)
        before = run.weights()
        run.step(0, factor=float("inf"))
        assert torch.equal(run.weights(), before)
        for number in (1, 2, 3):
            run.step(number)
            expected.step(number)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(run.weights(), expected.weights())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize(("first", "then"), [(PLAIN, FUSED), (FUSED, PLAIN), (FUSED, FUSED), (PLAIN, PLAIN)])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_run_goes_on_with_other_kernels_and_another_memory_format(
    name: str, first: Any, then: Any, steps_before: int
) -> None:
    unbroken, run = Run(name, *then), Run(name, *first)
    for number in range(6):
        if number == steps_before:
            run = run.resumed(name, *then)
        run.step(number)
        unbroken.step(number)
    torch.testing.assert_close(run.weights(), unbroken.weights())
    for group in run.optimizer.param_groups:
        assert group["fused"] == then[0]
        for parameter in group["params"]:
            state = dict(run.optimizer.state[parameter])
            if (step := state.pop("step", None)) is not None:
                assert step.device.type == "cpu" and step == 6
            assert state and all(value.stride() == parameter.stride() for value in state.values())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("saved_by", [PLAIN, FUSED])
@pytest.mark.parametrize("fused", [True, False])
def test_where_the_state_lies_after_a_resume_on_cuda(name: str, saved_by: Any, fused: bool) -> None:
    run = Run(name, *saved_by)
    run.step(0)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.device("cuda"):
        kernel = nn.Parameter(torch.empty(4, 3, 3, 3, memory_format=torch.channels_last))
        model = nn.ParameterList([kernel, *(torch.empty(shape) for shape in ((4,), (2, 16), (2,)))])
        optimizer = build_optimizer(model, TrainConfig(optimizer=name), fused)
        saved = tree_map_only(torch.Tensor, lambda x: fake.from_tensor(x).cuda(), run.optimizer.state_dict())
        restore_optimizer(optimizer, run.scaler, saved, {})
        for parameter in model:
            state = dict(optimizer.state[parameter])
            if (step := state.pop("step", None)) is not None:  # the plain kernels would wait for the device
                assert step.device.type == ("cuda" if fused else "cpu")
            assert {(value.device.type, value.stride()) for value in state.values()} == {
                ("cuda", parameter.stride())
            }


def test_a_resume_has_the_settings_of_its_own_run() -> None:
    run = Run("sgd", *PLAIN)
    run.step(0)
    other = build_optimizer(run.model, TrainConfig(momentum=0.5, weight_decay=0.2))
    restore_optimizer(other, run.scaler, run.optimizer.state_dict(), {})
    assert [(group["momentum"], group["weight_decay"]) for group in other.param_groups] == [(0.5, 0.2), (0.5, 0.0)]


def test_a_scaler_goes_on_and_begins_where_there_was_none() -> None:
    run = Run("sgd", *FUSED, True)
    run.step(0, factor=float("inf"))
    assert run.resumed("sgd", *FUSED, True).scaler.get_scale() == 1.0
    assert Run("sgd", *PLAIN).resumed("sgd", *FUSED, True).scaler.get_scale() == 2.0
    assert not run.resumed("sgd", *PLAIN).scaler.is_enabled()


@pytest.mark.parametrize(("was", "now"), [("sgd", "adamw"), ("adamw", "sgd")])
def test_the_state_of_another_optimizer_is_refused(was: str, now: str) -> None:
    run = Run(was, *PLAIN)
    run.step(0)
    with pytest.raises(ConfigError, match=rf"train\.optimizer to what it was \({was}\)"):
        run.resumed(now, *PLAIN)


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


# The ordered sum: one result, to the bit, for every number of workers


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
        assert torch.equal(tree_sum(ranks), alone), world_size
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


def test_gradients_have_the_strides_of_their_parameters_as_after_a_backward() -> None:
    plain, channels_last = model(), model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sums = []
    for net in (plain, channels_last):
        summed = OrderedGradients(net, 1, 1)
        backward(net, 0)
        after_backward = [p.grad.stride() for p in net.parameters() if p.grad is not None]
        summed.take()
        summed.finish()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        assert [grad.stride() for grad in gradients] == [p.stride() for p in net.parameters()] == after_backward
        sums.append(gradients)
    assert not sums[1][0].is_contiguous()
    for one, other in zip(*sums, strict=True):
        torch.testing.assert_close(one, other)


# BatchNorm


def running(model: nn.Module) -> torch.Tensor:
    layers = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    return torch.cat([torch.cat([m.running_mean, m.running_var]) for m in layers])


def norms() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.3))


def test_running_statistics_of_a_step_by_hand() -> None:
    layer = nn.BatchNorm1d(1, momentum=0.1)
    step = StepBatchNorm(layer, num_local=2, world_size=1)
    step.begin()
    for batch in ([[0.0], [2.0]], [[4.0], [8.0]]):  # mean 1, variance 2; mean 6, variance 8
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


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_running_statistics_are_the_same_to_the_bit_for_every_number_of_workers(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_step, num_steps = 8, 3
    x = torch.randn(num_steps, per_step, 6, 3, generator=torch.Generator().manual_seed(0))

    alone = norms()
    single = StepBatchNorm(alone, per_step, 1)
    for batches in x:
        single.begin()
        for batch in batches:
            alone(batch)
            single.take()
        single.end()

    ranks = [norms() for _ in range(world_size)]
    steps = [StepBatchNorm(model, per_step // world_size, world_size) for model in ranks]
    for batches in x:
        sent: list[torch.Tensor] = []
        for rank, (model, step) in enumerate(zip(ranks, steps, strict=True)):
            step.begin()
            for batch in batches[rank::world_size]:
                model(batch)
                step.take()
            sent.append(tree_sum([term.clone() for term in step._sum._slots]))

        def gather(out: list[torch.Tensor], _: torch.Tensor, sent: list[torch.Tensor] = sent) -> None:
            for tensor, rank_sum in zip(out, sent, strict=True):
                tensor.copy_(rank_sum)

        def reduce(total: torch.Tensor, sent: list[torch.Tensor] = sent) -> None:
            total.copy_(sent[0] + sent[1])

        monkeypatch.setattr(learning.dist, "all_gather", gather)
        monkeypatch.setattr(learning.dist, "all_reduce", reduce)
        for step in steps:
            step.end()

    for model in ranks:
        assert torch.equal(running(model), running(alone))
        assert model[0].num_batches_tracked == alone[0].num_batches_tracked == num_steps * per_step


def test_a_model_without_batch_norm_needs_nothing() -> None:
    step = StepBatchNorm(nn.Linear(2, 2), num_local=1, world_size=8)
    step.begin()
    step.take()
    step.end()  # would need a process group if it sent anything
