"""torch's own settings reach no pixel of the device side, and are as they were behind it."""

from __future__ import annotations

import hashlib
from typing import Any

import ambient_states
import numpy as np
import pytest
import torch
from ambient_states import STATES

from raypipe.config import AugmentConfig
from raypipe.device.ambient import pinned
from raypipe.device.augment import DeviceAugment
from raypipe.device.fused import PRESETS
from raypipe.device.prefetcher import on_device
from raypipe.plan.places import MicroBatchId
from raypipe.transform.fields import MicroBatch

CPU = torch.device("cpu")

# Of each family of Kornia's that computes in another way: matrices, policies, filters, histograms, color spaces.
OPERATIONS: dict[str, dict[str, Any]] = {
    "RandomRotation": {"degrees": 25.0, "p": 0.9},
    "RandomAffine": {
        "degrees": 15.0,
        "translate": [0.1, 0.1],
        "scale": [0.8, 1.2],
        "shear": 8.0,
        "p": 0.9,
    },
    "RandomPerspective": {"p": 0.9},
    "RandomResizedCrop": {"size": [20, 24]},
    "RandAugment": {"n": 2, "m": 10},
    "TrivialAugment": {},
    "RandomGaussianBlur": {"kernel_size": [3, 3], "sigma": [0.1, 2.0], "p": 0.9},
    "RandomMotionBlur": {"kernel_size": 5, "angle": 35.0, "direction": 0.5, "p": 0.9},
    "RandomEqualize": {"p": 0.9},
    "RandomPosterize": {"p": 0.9},
    "ColorJiggle": {
        "brightness": 0.3,
        "contrast": 0.3,
        "saturation": 0.3,
        "hue": 0.1,
        "p": 0.9,
    },
    "RandomErasing": {"p": 0.9},
    "RandomGaussianNoise": {"p": 0.9},
}
CONFIGS = {
    **{preset: AugmentConfig(preset=preset) for preset in PRESETS},
    "mixed": AugmentConfig(mixup_alpha=0.4),
    "cut": AugmentConfig(cutmix_alpha=1.0),
    **{
        op: AugmentConfig(ops=[{"op": op, **options}])
        for op, options in OPERATIONS.items()
    },
    "of a user": AugmentConfig(module="ambient_states:Convolved"),
}


def host_batch(rows: int) -> MicroBatch:
    rng = np.random.default_rng(0)
    fields = {
        "image": rng.integers(0, 256, (rows, 32, 28, 3), np.uint8),
        "label": np.arange(rows) % 10,
    }
    return MicroBatch(
        MicroBatchId("train", 0, 0, 0),
        np.arange(rows),
        np.ones(rows, np.float32),
        {**fields},
    )


def made(config: AugmentConfig, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of a training batch, and of a validation's, all made within one state of torch."""
    augment = DeviceAugment(config, CPU)
    (batch,) = on_device([host_batch(rows)], CPU, lambda at: 5)
    image, _ = augment(
        batch.image, batch.target, np.ones(rows, bool), seed=5, strength=0.9
    )
    return image, augment.normalize(batch.image)


def digest(tensors: tuple[torch.Tensor, ...]) -> list[Any]:
    return [
        (
            each.dtype,
            hashlib.blake2b(each.detach().contiguous().numpy().tobytes()).hexdigest(),
        )
        for each in tensors
    ]


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_setting_of_torch_changes_a_pixel_and_all_are_kept(
    name: str, rows: int
) -> None:
    expected = digest(made(CONFIGS[name], rows))
    for state, entered in STATES.items():
        with entered():
            before = ambient_states.seen()
            tensors = made(CONFIGS[name], rows)
            assert ambient_states.seen() == before, state
        assert digest(tensors) == expected, state
        assert not tensors[0].is_inference(), state


@pytest.mark.parametrize("state", STATES)
def test_settings_are_put_back_after_an_error_as_well(state: str) -> None:
    with STATES[state]():
        before = ambient_states.seen()
        with pytest.raises(ValueError, match="mine"), pinned(CPU):
            raise ValueError("mine")
        assert ambient_states.seen() == before


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode]
)
def test_the_mode_of_gradients_is_the_loops(mode: Any) -> None:
    image = torch.rand(4, 3, 16, 16, requires_grad=True)
    with mode(), pinned(CPU):
        assert (image * 2).requires_grad == (mode is torch.enable_grad)


def test_what_inference_mode_was_on_for_can_be_trained_on() -> None:
    with torch.inference_mode():
        image, _ = made(AugmentConfig(preset="standard"), 4)
    layer = torch.nn.Conv2d(3, 2, 3)
    layer(image).sum().backward()
    assert layer.weight.grad is not None
