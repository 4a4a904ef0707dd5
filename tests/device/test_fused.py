"""The presets' fused operations: each is Kornia's, and their draws are what they should be."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import kornia.enhance
import kornia.filters
import kornia.geometry
import numpy as np
import pytest
import torch

from raypipe.device.augment import PRESETS
from raypipe.device.fused import Fused, FusedParams, apply, draw_params, pack

ROWS, HEIGHT, WIDTH = 5, 24, 32
STRONG = PRESETS["strong"]
assert STRONG is not None


def images(low: int = 0, high: int = 256) -> torch.Tensor:
    """uint8, smooth enough that sampling between pixels is comparable, and channels_last."""
    coarse = torch.rand(ROWS, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    smooth = torch.nn.functional.interpolate(
        coarse, (HEIGHT, WIDTH), mode="bicubic"
    ).clamp(0, 1)
    return (
        (low + smooth * (high - 1 - low)).byte().to(memory_format=torch.channels_last)
    )


def neutral(**changes: Any) -> FusedParams:
    one, zero = np.ones(ROWS), np.zeros(ROWS)
    none = FusedParams(
        zero > 0,
        zero,
        zero,
        zero,
        one,
        one,
        one,
        one,
        zero,
        zero > 0,
        zero,
        np.zeros((ROWS, 4), int),
    )
    return replace(none, **changes)


def done(
    params: FusedParams, image: torch.Tensor, fused: Fused = STRONG
) -> torch.Tensor:
    return apply(fused, image, torch.from_numpy(pack(fused, params, HEIGHT, WIDTH)))


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


SOME = np.array([0.0, 0.6, 1.0, 1.3, 1.1])


def test_nothing_drawn_leaves_images_as_they_are() -> None:
    close(done(neutral(), images()), images() / 255)


# Each operation by itself is Kornia's


def test_flips() -> None:
    image, flip = images(), np.array([True, False, True, True, False])
    expected = torch.where(
        torch.from_numpy(flip)[:, None, None, None], image.flip(3), image
    )
    found = done(neutral(flip=flip), image, Fused(flip=0.5))
    assert found.dtype == torch.uint8 and torch.equal(found, expected)
    close(done(neutral(flip=flip), image), expected / 255)
    close(done(neutral(flip=flip), image, Fused(flip=0.5, jitter=1.0)), expected / 255)


def test_turns_shifts_and_scales_after_a_flip() -> None:
    image, flip = images() / 255, np.array([True, False, False, True, False])
    degrees, x, y = (
        np.array([10, -15, 0, 7, 0.0]),
        np.array([3, 0, -2.5, 1, 0]),
        np.array([0, -2, 1.5, 2, 0.0]),
    )
    scale = np.array([1.2, 0.8, 1, 0.9, 1])
    matrix = kornia.geometry.get_affine_matrix2d(
        torch.tensor(np.stack([x, y], 1)),
        torch.tensor([[(WIDTH - 1) / 2, (HEIGHT - 1) / 2]] * ROWS, dtype=torch.float64),
        torch.tensor(np.stack([scale, scale], 1)),
        torch.tensor(-degrees),  # it turns the other way
    )[:, :2].float()
    flipped = torch.where(
        torch.from_numpy(flip)[:, None, None, None], image.flip(3), image
    )
    expected = kornia.geometry.warp_affine(
        flipped, matrix, (HEIGHT, WIDTH), align_corners=True
    )
    found = done(neutral(flip=flip, degrees=degrees, x=x, y=y, scale=scale), images())
    # at the rim they fade out differently
    inside = (
        expected[:, :, 2:-2, 2:-2],
        found[:, :, 2:-2, 2:-2],
    )
    assert (inside[0] - inside[1]).abs().mean() < 1e-3
    assert (inside[0] - inside[1]).abs().quantile(0.98) < 1e-4


def test_brightness_contrast_and_saturation() -> None:
    image = images(80, 150)  # so that nothing is cut off
    factor, values = torch.from_numpy(SOME).float(), image / 255
    close(
        done(neutral(brightness=SOME), image),
        kornia.enhance.adjust_brightness_accumulative(values, factor),
    )
    contrast = kornia.enhance.adjust_contrast_with_mean_subtraction(values, factor)
    close(done(neutral(contrast=SOME), image), contrast)
    saturation = kornia.enhance.adjust_saturation_with_gray_subtraction(values, factor)
    close(done(neutral(saturation=SOME), image), saturation)
    all_three = kornia.enhance.adjust_brightness_accumulative(values, factor)
    all_three = kornia.enhance.adjust_contrast_with_mean_subtraction(all_three, factor)
    all_three = kornia.enhance.adjust_saturation_with_gray_subtraction(
        all_three, factor
    )
    for fused in (
        STRONG,
        Fused(jitter=1.0),
    ):
        # with what is cut off, too, but for what lies between
        draws = neutral(brightness=SOME, contrast=SOME, saturation=SOME)
        close(done(draws, image, fused), all_three)


def test_without_hue_a_blend_with_gray_is_what_the_matrix_is() -> None:
    draws = neutral(
        brightness=SOME, contrast=SOME[::-1], saturation=SOME, gray=np.arange(ROWS) == 3
    )
    for image in (images(), images() / 255, images().contiguous()):
        close(
            done(draws, image, Fused(jitter=1.0, gray=0.5, erase=0.5)),
            done(draws, image),
            1e-5,
        )


def test_colors_are_cut_off_once_at_the_end() -> None:
    bright = torch.full((ROWS, 3, HEIGHT, WIDTH), 200, dtype=torch.uint8)
    draws = neutral(brightness=np.full(ROWS, 1.5), saturation=np.full(ROWS, 1.2))
    assert done(draws, bright).eq(1).all()


def test_gray() -> None:
    gray = np.array([True, False, True, False, True])
    expected = images() / 255
    for row in np.flatnonzero(gray):
        expected[row] = kornia.color.rgb_to_grayscale(expected[row])
    close(done(neutral(gray=gray), images()), expected)


def test_hue_keeps_lightness_and_gray_and_turns_as_kornias_does() -> None:
    image = images(110, 140)
    turned = done(neutral(hue=np.linspace(-0.4, 0.4, ROWS)), image)
    gray_of = kornia.color.rgb_to_grayscale
    close(gray_of(turned), gray_of(image / 255))
    close(turned[2], image[2] / 255)  # by 0
    gray = torch.full((ROWS, 3, HEIGHT, WIDTH), 90, dtype=torch.uint8)
    close(done(neutral(hue=np.full(ROWS, 0.3)), gray), gray / 255)
    red = torch.zeros(ROWS, 3, HEIGHT, WIDTH, dtype=torch.uint8)
    red[:, 0] = 120
    ours, theirs = (
        each[:, :, 0, 0]
        for each in (
            done(neutral(hue=np.full(ROWS, 0.1)), red),
            kornia.enhance.adjust_hue(red / 255, torch.full((ROWS,), 0.2 * np.pi)),
        )
    )
    assert ours[0, 1] > 0.1 and theirs[0, 1] > 0.1 and ours[0, 2] < 0.02, (
        "to yellow, both"
    )


def test_blur() -> None:
    sigma = np.array([0.0, 0.1, 0.7, 1.3, 2.0])
    expected = images() / 255
    for row in range(1, ROWS):
        blurred = kornia.filters.gaussian_blur2d(
            expected[row : row + 1], (5, 5), (sigma[row], sigma[row])
        )
        expected[row] = blurred[0]
    close(done(neutral(sigma=sigma), images()), expected)


def test_erasing() -> None:
    box = np.array(
        [
            [0, 4, 0, 5],
            [0, 0, 0, 0],
            [3, HEIGHT, 20, WIDTH],
            [5, 6, 7, 8],
            [0, HEIGHT, 0, WIDTH],
        ]
    )
    expected = images() / 255
    for row, (top, bottom, left, right) in enumerate(box.tolist()):
        expected[row, :, top:bottom, left:right] = 0
    for image in (images(), images().transpose(2, 3).contiguous().transpose(2, 3)):
        close(done(neutral(box=box), image), expected)


# The draws


def test_draws_are_as_often_as_they_should_be() -> None:
    for strength in (0.0, 0.5, 1.0):
        found = draw_params(STRONG, np.random.default_rng(0), 20_000, 99, 50, strength)
        shares = {
            0.5: [found.flip, found.scale != 1],
            0.8: [found.brightness != 1],
            0.1: [found.gray],
            0.2: [found.sigma > 0],
            0.25: [found.box[:, 1] > 0],
        }
        for share, of_rows in shares.items():
            for is_applied in of_rows:
                expected = pytest.approx(share * strength, abs=0.02)
                assert is_applied.mean() == expected


def test_draws_are_as_far_as_they_should_be() -> None:
    found = draw_params(STRONG, np.random.default_rng(0), 20_000, 100, 50)
    top, bottom, left, right = found.box[found.box[:, 1] > 0].T
    height = bottom - top
    width = right - left
    assert (height / width).max() < 4.5
    limits = {
        "degrees": (found.degrees, -15, 15),
        "x": (found.x, -5, 5),
        "y": (found.y, -10, 10),
        "scale": (found.scale, 0.8, 1.2),
        "hue": (found.hue, -0.1, 0.1),
        "brightness": (found.brightness, 0.6, 1.4),
        "contrast": (found.contrast, 0.6, 1.4),
        "saturation": (found.saturation, 0.6, 1.4),
        "sigma": (found.sigma, 0, 2),
        "area": (height * width / 5000, 0.015, 0.22),
        "top": (top, 0, 99),
        "right": (right, 2, 50),
    }
    for name, (values, low, high) in limits.items():
        slack = 0.1 * (high - low)
        assert low <= values.min() < low + slack, name
        assert high - slack < values.max() <= high, name


def test_a_preset_draws_for_its_operations_what_a_larger_one_does() -> None:
    standard = PRESETS["standard"]
    assert standard is not None
    larger = replace(
        STRONG, **{name: value for name, value in asdict(standard).items() if value}
    )
    one, other = (
        draw_params(each, np.random.default_rng(1), 64, 32, 32)
        for each in (standard, larger)
    )
    for name in ("flip", "brightness", "contrast", "saturation", "box"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
