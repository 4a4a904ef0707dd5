"""The device side: normalization, and augmentation that is a function of the micro-batch alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kornia.augmentation as K  # noqa: N812
import numpy as np
import pytest
import torch

from raypipe.config import AugmentConfig
from raypipe.device.augment import DeviceAugment, Normalize, build_operation
from raypipe.device.fused import PRESETS
from raypipe.device.modules import PLAIN
from raypipe.errors import ConfigError
from raypipe.transform.device_input import IMAGES

CPU = torch.device("cpu")

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
ALL = np.ones(8, bool)
MASKS = IMAGES._replace(targets=("mask",))


def images(
    rows: int = 8, height: int = 16, width: int = 12, seed: int = 0
) -> torch.Tensor:
    """uint8 (rows, 3, height, width), channels_last as they come from the stream."""
    pixels = np.random.default_rng(seed).integers(
        0, 256, (rows, height, width, 3), np.uint8
    )
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def run(
    config: AugmentConfig, image: torch.Tensor, seed: int = 3, strength: float = 1.0
) -> Any:
    augment = DeviceAugment(config, CPU)
    return augment(
        image,
        torch.arange(len(image)),
        np.ones(len(image), bool),
        seed=seed,
        strength=strength,
    )


def test_images_come_out_channels_last_and_of_the_type_that_was_asked_for() -> None:
    for image in (images(), images().contiguous(), images() / 255):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = Normalize(AugmentConfig(MEAN, STD), CPU, dtype)(image)
            assert out.dtype == dtype and out.is_contiguous(
                memory_format=torch.channels_last
            )
            exact = Normalize(AugmentConfig(MEAN, STD), CPU)(image)
            # One rounding, from float32.
            assert torch.equal(out, exact.to(dtype))


@pytest.mark.parametrize("preset", [*PRESETS][1:])
def test_a_micro_batch_depends_on_its_seed_alone(preset: Any) -> None:
    config = AugmentConfig(preset=preset, mixup_alpha=0.4, cutmix_alpha=1.0)
    first, second = images(seed=1), images(seed=2)
    augment = DeviceAugment(config, CPU)
    target = torch.arange(8)
    alone, mixed = augment(first, target, ALL, seed=11)
    # After others, with torch's generator elsewhere, and by another object.
    torch.manual_seed(5)
    augment(second, target, ALL, seed=12, strength=0.3)
    state = torch.get_rng_state()
    later, later_mixed = augment(first, target, ALL, seed=11)
    assert torch.equal(torch.get_rng_state(), state), "the user's generator has moved"
    other, _ = DeviceAugment(config, CPU)(first, target, ALL, seed=11)
    assert torch.equal(alone, later) and torch.equal(alone, other)
    assert (
        mixed is not None and later_mixed is not None and mixed.lam == later_mixed.lam
    )
    assert not torch.equal(alone, augment(first, target, ALL, seed=13)[0])


@pytest.mark.parametrize("preset", [*PRESETS][1:])
def test_strength_zero_leaves_images_as_they_are(preset: Any) -> None:
    image = images()
    config = AugmentConfig(preset=preset, mixup_alpha=0.4)
    out, mixed = run(config, image, strength=0.0)
    assert mixed is None
    # It alone samples, and between neighbors that differ as they do in noise the rounding of a place is seen.
    tolerance = {"rtol": 0, "atol": 1e-4} if preset == "strong" else {}
    torch.testing.assert_close(out, Normalize(config, CPU)(image), **tolerance)


@pytest.mark.parametrize(
    "config",
    [
        AugmentConfig(ops=[{"op": "RandomInvert", "p": 0.8}]),
        AugmentConfig(module=torch.nn.Sequential(K.RandomInvert(p=0.8))),
    ],
    ids=["ops", "module"],
)
def test_strength_scales_the_share_of_rows_that_an_operation_changes(
    config: AugmentConfig,
) -> None:
    image = images(512, 4, 4)
    plain = Normalize(config, CPU)(image)
    # rising, so that a probability that was not put back would be seen
    for strength in (0.0, 0.25, 0.5, 1.0):
        out, _ = run(config, image, strength=strength)
        changed = (out - plain).abs().amax((1, 2, 3)) > 1e-3
        assert float(changed.float().mean()) == pytest.approx(0.8 * strength, abs=0.06)


def test_the_input_is_not_written_to() -> None:
    image = images()
    before = image.clone()
    run(AugmentConfig(preset="strong", cutmix_alpha=1.0), image)
    assert torch.equal(image, before)


# Kornia's operations


def apply(
    config: AugmentConfig, image: torch.Tensor, strength: float = 1.0
) -> torch.Tensor:
    whole = replace(config, mean=PLAIN.mean, std=PLAIN.std)
    return run(whole, image, seed=0, strength=strength)[0]


def test_operations_run_in_order() -> None:
    image = torch.rand(4, 3, 8, 8)
    ops = [{"op": "RandomVerticalFlip", "p": 1.0}, {"op": "CenterCrop", "size": [4, 8]}]
    assert torch.equal(apply(AugmentConfig(ops=ops), image), image.flip(2)[:, :, 2:6])
    two = [
        {"op": "RandomInvert", "p": 1.0},
        {"op": "RandomSolarize", "thresholds": 0.0, "p": 1.0},
    ]
    assert not torch.equal(
        apply(AugmentConfig(ops=two), image), apply(AugmentConfig(ops=two[::-1]), image)
    )


def test_own_operations_follow_those_of_the_preset() -> None:
    ops = [{"op": "RandomInvert", "p": 1.0}]
    for preset in ("light", "standard"):
        plain = apply(AugmentConfig(preset=preset), images())
        inverted = apply(AugmentConfig(preset=preset, ops=ops), images())
        torch.testing.assert_close(inverted, 1 - plain)


def test_a_policy_is_applied_to_as_large_a_share_of_rows_as_the_strength() -> None:
    image = torch.rand(400, 3, 8, 8)
    config = AugmentConfig(ops=[{"op": "RandAugment", "n": 3, "m": 29}])

    def changed(strength: float) -> float:
        is_equal = apply(config, image, strength=strength) == image
        return 1 - is_equal.flatten(1).all(1).float().mean().item()

    assert changed(0.0) == 0.0
    assert 0.3 < changed(0.5) < 0.6
    assert changed(1.0) > 0.8


def test_an_operation_that_makes_the_size_is_always_applied() -> None:
    config = AugmentConfig(ops=[{"op": "RandomResizedCrop", "size": [8, 8], "p": 1.0}])
    assert apply(config, torch.rand(4, 3, 16, 16), strength=0.1).shape == (4, 3, 8, 8)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"op": "RandomHorizontalFlop"},
            "'RandomHorizontalFlop' is not a 2D operation of kornia",
        ),
        ({"op": "RandomMixUpV2"}, "augment.mixup_alpha"),
        ({"op": "RandomMotionBlur3D"}, "is not a 2D operation"),
        (
            {"op": "RandomErasing", "probability": 1},
            "'RandomErasing', 'probability': 1}: TypeError",
        ),
        ({"op": "RandAugment", "n": 2, "m": 99}, "ValueError: Expect `m`"),
        ({"op": "RandomCrop"}, "'RandomCrop'}: TypeError"),
    ],
)
def test_what_cannot_be_built_is_named(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"augment\.ops") as caught:
        build_operation(entry)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"op": "CenterCrop", "size": 192},
        {"op": "RandomGaussianBlur", "kernel_size": [65, 65], "sigma": [0.1, 9.0]},
    ],
)
def test_an_operation_may_need_images_of_some_size(entry: dict[str, Any]) -> None:
    assert build_operation(entry)(torch.rand(2, 3, 224, 224)).shape[2:] in {
        (192, 192),
        (224, 224),
    }


def test_an_entry_without_an_operation_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"augment\.ops must be a list of"):
        AugmentConfig(ops=[{"name": "RandomErasing"}])


# The user's own


class Darken(torch.nn.Module):
    def forward(self, image: torch.Tensor, strength: float) -> torch.Tensor:
        return image * (1 - 0.5 * strength * torch.rand(1))


def cut(image: torch.Tensor) -> torch.Tensor:
    return image[:4]


def test_a_users_module_is_seeded_and_given_the_strength() -> None:
    image = images()
    config = AugmentConfig(MEAN, STD, module=f"{__name__}:Darken")
    out, _ = run(config, image, seed=3, strength=0.5)
    assert torch.equal(out, run(config, image, seed=3, strength=0.5)[0])
    torch.manual_seed(3)
    expected = Normalize(config, CPU)(image / 255 * (1 - 0.25 * torch.rand(1)))
    torch.testing.assert_close(out, expected)


def test_a_users_module_that_returns_something_else() -> None:
    with pytest.raises(
        ConfigError, match=r"augment.module=.*cut returned \(4, 3, 16, 12\)"
    ):
        run(AugmentConfig(module=f"{__name__}:cut"), images())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such:thing", "cannot be imported: ModuleNotFoundError"),
        (
            "torch.nn:Linear",
            "cannot be used: TypeError: Linear.*missing 2 required positional arguments",
        ),
        ("math:pi", "cannot be used: TypeError: 3.14.* is not a callable object"),
    ],
)
def test_a_users_module_that_cannot_be(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"augment.module '{name}' {message}"):
        DeviceAugment(AugmentConfig(module=name), CPU)


# Masks and boxes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AugmentConfig(mixup_alpha=0.2), "augment.mixup_alpha mixes images"),
        (AugmentConfig(cutmix_alpha=0.2), "augment.cutmix_alpha mixes images"),
        (AugmentConfig(preset="light"), "the preset light moves or erases pixels"),
        (
            AugmentConfig(ops=[{"op": "RandomAffine", "degrees": 5.0}]),
            "RandomAffine moves or erases",
        ),
        (
            AugmentConfig(ops=[{"op": "TrivialAugment"}]),
            "TrivialAugment moves or erases",
        ),
    ],
)
def test_what_would_leave_masks_and_boxes_behind_is_named(
    config: AugmentConfig, message: str
) -> None:
    DeviceAugment(config, CPU)
    with pytest.raises(ConfigError, match=message):
        DeviceAugment(config, CPU, batches=MASKS)


def test_color_and_normalization_go_with_masks_and_boxes() -> None:
    ops = [
        {"op": name}
        for name in ("RandomGrayscale", "RandomPlanckianJitter", "RandomGaussianNoise")
    ]
    DeviceAugment(AugmentConfig(ops=ops), CPU, batches=MASKS)


# The schedule


def test_the_strength_rises_holds_and_falls() -> None:
    config = AugmentConfig(strength=(0.25, 0.8, 0.5))
    values = [
        config.strength_at(progress)
        for progress in (0, 0.125, 0.25, 0.4, 0.5, 0.75, 1.0)
    ]
    assert values == pytest.approx([0, 0.4, 0.8, 0.8, 0.8, 0.4, 0])


def test_a_number_is_the_strength_of_the_whole_run() -> None:
    for config, strength in (
        (AugmentConfig(), 1),
        (AugmentConfig(strength=0.5), 0.5),
    ):
        assert {config.strength_at(at) for at in (0, 0.5, 0.999)} == {strength}


def test_ramps_that_overlap_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"augment\.strength must be .* with RISE \+ FALL at most 1, got \(0\.6",
    ):
        AugmentConfig(strength=(0.6, 1, 0.6))
    with pytest.raises(
        ConfigError,
        match=r"augment\.strength must be a number, or \[RISE, PEAK, FALL\], got",
    ):
        AugmentConfig(strength=(0.6, 1))


@pytest.mark.parametrize("mixing", [{}, {"mixup_alpha": 0.4}, {"cutmix_alpha": 1.0}])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_gradient_reaches_the_pixels_and_changes_none(
    preset: Any, mixing: dict[str, float]
) -> None:
    image = (images() / 255).requires_grad_()
    out, _ = run(AugmentConfig(preset=preset, **mixing), image)
    assert torch.equal(
        out, run(AugmentConfig(preset=preset, **mixing), image.detach())[0]
    )
    out.square().sum().backward()
    assert image.grad is not None and (image.grad != 0).float().mean() > 0.3


@pytest.mark.parametrize("setting", ["mixup_alpha", "cutmix_alpha"])
def test_mixing_needs_a_target(setting: str) -> None:
    config = AugmentConfig(**{setting: 1.0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{setting} mixes targets, and batches have"):
        DeviceAugment(config, CPU, batches=IMAGES._replace(has_target=False))


def test_an_operation_does_not_normalize_what_is_normalized_behind_it() -> None:
    op = {"op": "Normalize", "mean": [0.5] * 3, "std": [0.5] * 3}
    with pytest.raises(ConfigError, match=r"set augment.mean and augment.std instead"):
        DeviceAugment(AugmentConfig(ops=[op]), CPU)
