"""The device side on CUDA: the same bits every time, and a host that never waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ambient_states
import numpy as np
import pytest
import torch
from waiting import waiting_is_an_error

from raypipe.config import AugmentConfig
from raypipe.device.augment import DeviceAugment
from raypipe.device.prefetcher import on_device
from raypipe.plan.places import MicroBatchId
from raypipe.transform.fields import MicroBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_or_pretended")]

PRESETS: tuple[Any, ...] = ("none", "light", "standard", "strong")
SIZE, ROWS = 32, 16


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def host_batches(count: int) -> Iterator[MicroBatch]:
    for number in range(count):
        rng = np.random.default_rng(number)
        image = rng.integers(0, 256, (ROWS, SIZE, SIZE, 3), np.uint8)
        fields = {"image": image, "label": rng.integers(0, 10, ROWS)}
        weight = np.ones(ROWS, np.float32)
        yield MicroBatch(
            MicroBatchId("train", 0, number, 0), np.arange(ROWS), weight, {**fields}
        )


def run(augment: DeviceAugment, device: torch.device, seed: int) -> Any:
    batch = next(host_batches(1))
    image = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2).to(device)
    target = torch.from_numpy(batch["label"]).to(device)
    return augment(image, target, np.ones(ROWS, bool), seed=seed, strength=0.8)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_seed_gives_the_same_bits(preset: Any) -> None:
    config = AugmentConfig(preset=preset, mixup_alpha=0.4, cutmix_alpha=1.0)
    for seed in range(8):
        first, mixed = run(DeviceAugment(config, cuda()), cuda(), seed)
        torch.rand(3, device=cuda())
        again, _ = run(DeviceAugment(config, cuda()), cuda(), seed)
        assert torch.equal(first, again)
        # The draws are the host's, so a CPU makes the same picture to rounding, but for rare ties of thresholds.
        on_cpu, on_cpu_mixed = run(
            DeviceAugment(config, torch.device("cpu")), torch.device("cpu"), seed
        )
        assert (mixed is None) == (on_cpu_mixed is None)
        close = torch.isclose(first.cpu(), on_cpu, rtol=1e-3, atol=1e-2).float().mean()
        assert close > 0.98


OPERATIONS: list[dict[str, Any]] = [
    {"op": "RandomRotation", "degrees": 25.0, "p": 0.9},
    {"op": "RandomPerspective", "p": 0.9},
    {"op": "RandomGaussianBlur", "kernel_size": [3, 3], "sigma": [0.1, 2.0], "p": 0.9},
    {
        "op": "ColorJiggle",
        "brightness": 0.3,
        "contrast": 0.3,
        "saturation": 0.3,
        "hue": 0.1,
        "p": 0.9,
    },
    {"op": "RandomEqualize", "p": 0.9},
    {"op": "RandAugment", "n": 2, "m": 10},
]
OF_A_LOOP = {
    **{
        preset: AugmentConfig(preset=preset, mixup_alpha=0.4, cutmix_alpha=1.0)
        for preset in PRESETS
    },
    **{entry["op"]: AugmentConfig(ops=[entry]) for entry in OPERATIONS},
    "of a user": AugmentConfig(module="ambient_states:ConvolvedOnDevice"),
}


@pytest.mark.parametrize("name", OF_A_LOOP)
def test_no_setting_of_torch_changes_a_pixel_and_all_are_kept(name: str) -> None:
    device = cuda()
    expected, _ = run(DeviceAugment(OF_A_LOOP[name], device), device, 5)
    for state, entered in ambient_states.ON_CUDA.items():
        with entered():
            before = ambient_states.seen()
            image, _ = run(DeviceAugment(OF_A_LOOP[name], device), device, 5)
            assert ambient_states.seen() == before, state
        assert image.dtype == expected.dtype and torch.equal(image, expected), state


class Faded(torch.nn.Module):
    """With a weight and a buffer, and random on the images' own device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.tensor(0.1))

    shift: torch.Tensor

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image * self.weight + self.shift * torch.rand(1).to(
            image.device, non_blocking=True
        )


def test_a_module_goes_to_the_device_and_draws_on_the_host() -> None:
    import kornia.augmentation as K  # noqa: N812

    flips = K.RandomHorizontalFlip(), K.RandomVerticalFlip(p=0.3)
    module = torch.nn.Sequential(*flips, Faded(), K.RandomErasing(p=0.5))
    on_cpu, _ = run(
        DeviceAugment(AugmentConfig(module=module), torch.device("cpu")),
        torch.device("cpu"),
        7,
    )
    weight = module[2].weight
    augment = DeviceAugment(AugmentConfig(module=module), cuda())
    found, _ = run(augment, cuda(), 7)
    assert {each.device.type for each in (*module.parameters(), *module.buffers())} == {
        "cuda"
    }
    assert {flip.device.type for flip in flips} == {"cpu"}, (
        "Kornia's own numbers come from the host"
    )
    assert not found.requires_grad or weight.grad is None
    assert torch.equal(found, run(augment, cuda(), 7)[0])
    torch.testing.assert_close(found.cpu(), on_cpu, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_never_waits_in_steady_state(preset: Any, dtype: torch.dtype) -> None:
    config = AugmentConfig(preset=preset, mixup_alpha=0.4, cutmix_alpha=1.0)
    augment = DeviceAugment(config, cuda(), dtype)
    total = torch.zeros((), device=cuda())
    batches = iter(on_device(host_batches(40), cuda(), lambda at: at.step))

    def step(number: int) -> None:
        made = augment.of_batch(next(batches), number / 40)
        total.add_(made.image.float().mean())

    for number in range(10):
        step(number)
    with waiting_is_an_error():
        for number in range(10, 38):
            step(number)
    assert torch.isfinite(total)


@pytest.mark.parametrize("preset", ["none", "strong"])
def test_a_rings_batches_are_augmented_beside_the_model_to_the_same_bits(
    preset: Any,
) -> None:
    """The augmentation does not wait for what the current stream was given before, and it is waited for."""
    config = AugmentConfig(preset=preset, mixup_alpha=0.4, cutmix_alpha=1.0)
    device, apart, plain = (
        cuda(),
        DeviceAugment(config, cuda()),
        DeviceAugment(config, cuda()),
    )
    kept = []
    for batch in on_device(host_batches(6), device, lambda at: at.step):
        torch.cuda._sleep(10_000_000)
        made = apart.of_batch(batch, 0.8)
        kept.append(
            (made.image.clone(), None if made.mix is None else made.mix.target.clone())
        )
    assert apart._stream is not None
    for number, batch in enumerate(
        on_device(host_batches(6), device, lambda at: at.step)
    ):
        expected = plain.of_batch(replace(batch, copied=None), 0.8)
        image, partner = kept[number]
        assert torch.equal(image, expected.image)
        if expected.mix is None:
            assert partner is None
        else:
            assert partner is not None and torch.equal(partner, expected.mix.target)
    assert plain._stream is None
    assert not DeviceAugment(AugmentConfig(differentiable=True), device)._runs_apart
    assert not DeviceAugment(AugmentConfig(module=Faded()), device)._runs_apart, (
        "the loop may train it"
    )
