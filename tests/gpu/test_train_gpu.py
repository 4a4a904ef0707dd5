"""What learns, on CUDA: repeated, resumed, on two ranks, in half precision, compiled, and never waited for."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from waiting import waiting_is_an_error

from raypipe.config import PlanConfig, RunConfig, TrainConfig
from raypipe.device.prefetcher import Batch
from raypipe.plan.places import MicroBatchId
from raypipe.streaming.saving.stateful import loaded, saved, states_of
from raypipe.train.learning import Learner
from raypipe.train.models import build_optimizer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_or_pretended")]

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
ROWS, SIDE, PER_STEP = 8, 16, 4
AVERAGED, CLIPPED = {"ema_decay": 0.9}, {"max_grad_norm": 1.0}
KINDS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "amp": "off"},
    {"optimizer": {"name": "sgd", **AVERAGED, **CLIPPED}, "amp": "bf16"},
    {"optimizer": "sgd", "amp": "fp16"},
    {"optimizer": {"name": "adamw", **CLIPPED}, "amp": "off"},
    {"optimizer": "adamw", "amp": "bf16"},
    {"optimizer": {"name": "adamw", **AVERAGED, **CLIPPED}, "amp": "fp16"},
]
kinds = pytest.mark.parametrize(
    "kind",
    KINDS,
    ids=lambda kind: f"{TrainConfig(**kind).named('optimizer')[0]}-{kind['amp']}",
)
ordered = pytest.mark.parametrize("deterministic_reduce", [True, False])


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    """A learner sets them for its process."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32
    yield
    cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before


def learner(device: torch.device = CUDA, world_size: int = 1, **train: Any) -> Learner:
    """A learner on kernels whose sums have an order: cuDNN's own choice, by time, has others as well."""
    run = RunConfig(
        plan=PlanConfig(micro_batch_size=ROWS, global_batch_size=ROWS * PER_STEP),
        train=TrainConfig(**{"model": "small", **train}),
    )
    torch.manual_seed(0)
    made = Learner(run, 5, device, world_size)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    return made


def micro_batch(step: int, micro: int, device: torch.device) -> Batch:
    seed = PER_STEP * step + micro
    image = torch.randn(
        ROWS, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)
    )
    target, host = torch.arange(ROWS) % 5, np.arange(ROWS)
    image = image.to(device, memory_format=torch.channels_last)
    at = MicroBatchId("train", 0, step, micro)
    fields = {"image": image, "label": target.to(device)}
    return Batch(
        at, seed, fields, torch.ones(ROWS, device=device), target.numpy(), host, 0
    )


def learn(
    learner: Learner,
    steps: range,
    device: torch.device = CUDA,
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, Any]:
    """Its state after some steps, as a checkpoint gives it back, and the `losses` of this rank's micro-batches."""
    losses = []
    for step in steps:
        learner.begin_step(0.01)
        for micro in range(rank, PER_STEP, world_size):
            batch = micro_batch(step, micro, device)
            losses.append(learner.backward(batch, last=micro + world_size >= PER_STEP))
        learner.end_step(step + 1)
    return {**checkpoint(learner), "losses": [float(loss) for loss in losses]}


def checkpoint(learner: Learner) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(states_of(learner.parts()), file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def assert_same_bits(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def weights(state: dict[str, Any]) -> torch.Tensor:
    return torch.cat(
        [
            tensor.double().reshape(-1)
            for tensor in state["model"].values()
            if tensor.is_floating_point()
        ]
    )


def assert_same_update(
    before: dict[str, Any], one: dict[str, Any], other: dict[str, Any], to: float
) -> None:
    """Weights and statistics that were the same before have changed by the same, up to a share of the change."""
    change = (weights(one) - weights(before)).norm()
    assert change > 0 and (weights(one) - weights(other)).norm() < to * change


# The same bits


@kinds
@ordered
def test_repeated_and_resumed_runs_end_with_the_same_bits(
    kind: Any, deterministic_reduce: Any
) -> None:
    settings = kind | {"deterministic_reduce": deterministic_reduce}
    unbroken = learn(learner(**settings), range(6))
    assert_same_bits(learn(learner(**settings), range(6)), unbroken)
    state, resumed = learn(learner(**settings), range(3)), learner(**settings)
    torch.manual_seed(9)  # what is drawn is a function of the micro-batch
    resumed.load(state)
    found = learn(resumed, range(3, 6))
    assert state["losses"] + found["losses"] == unbroken["losses"]
    for part in ("model", "optimizer", "scaler", "ema"):
        assert_same_bits(found[part], unbroken[part])


# Two ranks: on one device by gloo, which NCCL refuses, and on two by NCCL


def two_ranks(rank: int, folder: str, backend: str, deterministic_reduce: Any) -> None:
    """Runs in a process for each rank."""
    device = torch.device("cuda", rank if backend == "nccl" else 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/ranks", rank=rank, world_size=2
    )
    state = learn(
        learner(device, world_size=2, deterministic_reduce=deterministic_reduce),
        range(3),
        device,
        rank,
        2,
    )
    torch.save(state, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


several = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)


@ordered
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=several)])
def test_two_ranks_learn_what_one_does(
    deterministic_reduce: Any, backend: str, tmp_path: Path
) -> None:
    """By ordered sums to the bit, by DistributedDataParallel to rounding."""
    torch.multiprocessing.spawn(
        two_ranks, (str(tmp_path), backend, deterministic_reduce), nprocs=2
    )
    before = checkpoint(learner())
    alone = learn(learner(deterministic_reduce=deterministic_reduce), range(3))
    first, second = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)
    )
    assert_same_bits(first["model"], second["model"])
    if deterministic_reduce:
        assert_same_bits(first["model"], alone["model"])
        assert_same_bits(first["optimizer"], alone["optimizer"])
    assert_same_update(before, alone, first, to=0.02)


# Between kinds of device


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_checkpoint_learns_the_same_on_cpu_and_gpu_to_rounding(
    optimizer: Any,
) -> None:
    settings: Any = {"optimizer": {"name": optimizer, **AVERAGED}, "amp": "off"}
    state = learn(learner(**settings), range(3))
    for device, other in ((CUDA, CPU), (CPU, CUDA)):
        there, here = learner(device, **settings), learner(other, **settings)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        for each in (there, here):
            for module in each._model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0  # each kind of device draws its own
            each.load(state)
            assert_same_bits(checkpoint(each)["model"], state["model"])
            assert_same_bits(
                checkpoint(each)["optimizer"]["state"], state["optimizer"]["state"]
            )
        ours, theirs = (
            learn(there, range(3, 5), device),
            learn(here, range(3, 5), other),
        )
        assert_same_update(state, ours, theirs, to=1e-3)
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
        state = theirs


# Half precision and the optimizers' kernels


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_fp16_overflow_in_the_very_first_step_leaves_no_trace(
    optimizer: Any,
) -> None:
    """The fused SGD of torch would go on with a momentum of uninitialised memory: here that memory is NaN."""
    settings = {
        "optimizer": optimizer,
        "lr": 0.1,
        "amp": "fp16",
        "deterministic_reduce": False,
    }
    junk = [
        torch.full((size,), float("nan"), device=CUDA)
        for size in range(32, 200_000, 1000)
    ]
    del junk  # into the allocator's cache, for the next to have
    learning = learner(**settings)
    with torch.no_grad():
        learning._model[8].weight.mul_(1000)  # type: ignore[index, union-attr, operator]
    before = checkpoint(learning)
    after = learn(learning, range(1))
    assert after["scaler"]["scale"] == before["scaler"]["scale"] / 2, (
        "there was no overflow"
    )
    names = [
        name
        for name in before["model"]
        if not name.endswith(("mean", "var", "tracked"))
    ]
    for name in names:
        assert_same_bits(after["model"][name], before["model"][name])
    step = 1
    moved = learn(learning, range(1, 2))
    while moved["scaler"]["scale"] < after["scaler"]["scale"]:
        after = moved
        step += 1
        moved = learn(learning, range(step, step + 1))
    # a second one, which has a momentum
    moved = learn(learning, range(step + 1, step + 2))
    assert torch.isfinite(weights(moved)).all()


@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@ordered
def test_the_gradient_is_clipped_to_its_true_norm(
    amp: Any, deterministic_reduce: Any
) -> None:
    plain = {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    for norm in (1e-3, 1e-2):
        learning = learner(
            optimizer={**plain, "max_grad_norm": norm},
            amp=amp,
            deterministic_reduce=deterministic_reduce,
        )
        before = [
            parameter.detach().clone() for parameter in learning._model.parameters()
        ]
        learn(learning, range(1))
        pairs = zip(learning._model.parameters(), before, strict=True)
        moved = torch.cat(
            [(new.detach() - old).double().reshape(-1) for new, old in pairs]
        ).norm()
        assert float(moved) == pytest.approx(0.01 * norm, rel=1e-2)


# The host


@kinds
@ordered
def test_the_host_never_waits_for_a_step(kind: Any, deterministic_reduce: Any) -> None:
    learning = learner(**kind, deterministic_reduce=deterministic_reduce)
    steps = [
        [micro_batch(step, micro, CUDA) for micro in range(PER_STEP)]
        for step in range(8)
    ]
    total = torch.zeros((), device=CUDA)

    def run(number: int) -> None:
        learning.begin_step(0.01)
        for batch in steps[number]:
            total.add_(
                learning.backward(batch, last=batch.position.micro == PER_STEP - 1)
            )
        learning.end_step(number + 1)

    for number in range(3):
        run(number)
    with waiting_is_an_error():
        for number in range(3, 8):
            run(number)
    assert torch.isfinite(total)


# Compiled, and captured


@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_a_compiled_model_learns_what_the_plain_one_does(amp: Any) -> None:
    found: list[dict[str, Any]] = []
    for compile in (False, True):
        learning = learner(
            amp=amp,
            model={"name": "small", "compile": compile},
            optimizer={"name": "sgd", **AVERAGED},
        )
        learning._model[7].p = 0.0  # type: ignore[index, union-attr]  # the compiler draws its own
        if not found:
            before = checkpoint(learning)
        found.append(learn(learning, range(3)))
        found[-1]["logits"] = learning.evaluate(micro_batch(9, 0, CUDA)).cpu()
    plain, compiled = found
    # a checkpoint of one is one of the other
    assert plain["model"].keys() == compiled["model"].keys()
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=0.02)
    torch.testing.assert_close(
        compiled["logits"], plain["logits"], rtol=0.05, atol=0.05
    )
    assert_same_update(before, plain, compiled, to=0.1)


# Several devices


@several
def test_a_device_that_is_not_the_current_one_learns_the_same() -> None:
    second = torch.device("cuda", 1)
    settings: Any = {
        "optimizer": {"name": "adamw", **AVERAGED},
        "amp": "fp16",
        "deterministic_reduce": True,
    }
    one, other = (
        learn(learner(**settings), range(3)),
        learn(learner(second, **settings), range(3), second),
    )
    assert torch.cuda.current_device() == 0
    assert_same_bits(one, other)


def test_a_state_is_saved_as_of_its_step_though_the_device_is_behind() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(CUDA)
    optimizer = build_optimizer(model, TrainConfig(lr=0.1), fused=True)
    busy = torch.randn(4096, 4096, device=CUDA)
    for step in range(20):
        for _ in range(20):
            busy = busy @ busy
            busy = busy / busy.norm()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(step))
        optimizer.step()
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        state = loaded(
            bytes(
                saved(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                )
            )
        )["model"]
        optimizer.step()
        for name, value in zip(state, expected, strict=True):
            assert torch.equal(state[name], value.cpu()), (step, name)
