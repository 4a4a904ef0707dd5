"""Kornia's operations from a configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.config import AugmentConfig
from raypipe.device.kornia_ops import PRESETS, build_operations
from raypipe.errors import ConfigError


def apply(config: AugmentConfig, image: torch.Tensor, seed: int = 0, strength: float = 1.0) -> torch.Tensor:
    torch.manual_seed(seed)
    for operation in build_operations(config):
        image = operation(image, strength)
    return image


def test_operations_run_in_order() -> None:
    image = torch.rand(4, 3, 8, 8)
    ops = [{"op": "RandomVerticalFlip", "p": 1.0}, {"op": "CenterCrop", "size": [4, 8]}]
    assert torch.equal(apply(AugmentConfig(ops=ops), image), image.flip(2)[:, :, 2:6])
    two = [{"op": "RandomInvert", "p": 1.0}, {"op": "RandomSolarize", "thresholds": 0.0, "p": 1.0}]
    assert not torch.equal(apply(AugmentConfig(ops=two), image), apply(AugmentConfig(ops=two[::-1]), image))


def test_own_operations_follow_those_of_the_preset() -> None:
    config = AugmentConfig(preset="light", ops=[{"op": "RandomInvert", "p": 1.0}])
    image = torch.rand(4, 3, 8, 8)
    light = apply(AugmentConfig(preset="light"), image)
    torch.testing.assert_close(apply(config, image), 1 - light)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_make_images_of_the_same_size_in_range(preset: Any) -> None:
    image = torch.rand(6, 3, 24, 20)
    for seed in range(5):
        out = apply(AugmentConfig(preset=preset), image, seed)
        assert out.shape == image.shape and out.dtype == image.dtype
        assert out.min() > -1e-5 and out.max() < 1 + 1e-5
    assert (preset == "none") == torch.equal(out, image)


def test_an_operation_that_makes_the_size_is_always_applied() -> None:
    config = AugmentConfig(ops=[{"op": "RandomResizedCrop", "size": [8, 8], "p": 1.0}])
    assert apply(config, torch.rand(4, 3, 16, 16), strength=0.1).shape == (4, 3, 8, 8)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"op": "RandomHorizontalFlop"}, "'RandomHorizontalFlop' is no 2D operation of kornia"),
        ({"op": "RandomMixUpV2"}, "augment.mixup_alpha"),
        ({"op": "RandomMotionBlur3D"}, "no 2D operation"),
        ({"op": "RandomErasing", "probability": 1}, "'RandomErasing', 'probability': 1}: TypeError"),
        ({"op": "RandAugment", "n": 2, "m": 99}, "ValueError: Expect `m`"),
        ({"op": "RandomCrop"}, "'RandomCrop'}: TypeError"),
    ],
)
def test_what_cannot_be_built_is_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"augment\.ops") as caught:
        build_operations(AugmentConfig(ops=[entry]))
    assert message in str(caught.value)


def test_an_entry_without_an_operation_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"augment\.ops must be a list of"):
        AugmentConfig(ops=[{"name": "RandomErasing"}])
