"""Colors and filters: csrc/color.h and csrc/filter.h are the reference to the bit, and near the library."""

from __future__ import annotations

import random

import cv2
import numpy as np
import pytest
from albumentations.augmentations.blur import functional as fblur
from albumentations.augmentations.pixel import functional as fpixel

from raypipe.kernel import Op
from raypipe.kernel.filters import gaussian_coefficients, motion_kernels
from raypipe.kernel.ops import POSTERIZE, SOLARIZE
from raypipe.kernel.reference_color import COLOR

ONE = 1 << 16
NONE = [-1, -1, -1, -1, ONE, ONE, ONE, 0]


def image(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Noise, in parts saturated and in parts gray."""
    pixels = rng.integers(-60, 316, (height, width, 3)).clip(0, 255).astype(np.uint8)
    pixels[: height // 3] = pixels[: height // 3, :, :1]
    return pixels


def near(ours: np.ndarray, theirs: np.ndarray) -> int:
    """The largest difference, in levels."""
    return int(np.abs(ours.astype(int) - theirs).max())


@pytest.mark.parametrize(
    "place", [0, 1, 2], ids=["brightness", "contrast", "saturation"]
)
def test_factors_are_within_a_level_of_the_librarys(place: int) -> None:
    rng = np.random.default_rng(place)
    theirs = (
        fpixel.adjust_brightness_torchvision,
        fpixel.adjust_contrast_torchvision,
        fpixel.adjust_saturation_torchvision,
    )[place]
    for _ in range(60):
        pixels, factor = image(rng, 40, 50), float(rng.uniform(0, 2.5))
        params = [place, -1, -1, -1, *NONE[4:]]
        params[4 + place] = round(factor * ONE)
        assert (
            near(COLOR[Op.JITTER](pixels, params), theirs(pixels.copy(), factor)) <= 1
        )


def exact_hue(pixels: np.ndarray, turn: float) -> np.ndarray:
    """The hue turned by a share of the circle, not rounded."""
    colors = cv2.cvtColor(pixels.astype(np.float32), cv2.COLOR_RGB2HSV)
    colors[..., 0] = (colors[..., 0] + 360 * turn) % 360
    return cv2.cvtColor(colors, cv2.COLOR_HSV2RGB)


def test_hue_is_within_a_level_of_the_exact_one_which_the_library_is_not() -> None:
    rng, ours, theirs = np.random.default_rng(9), 0.0, 0.0
    for _ in range(60):
        pixels, turn = image(rng, 40, 50), float(rng.uniform(-0.5, 0.5))
        exact = exact_hue(pixels, turn)
        made = COLOR[Op.JITTER](
            pixels, [3, -1, -1, -1, ONE, ONE, ONE, round(turn * 6 * ONE) % (6 * ONE)]
        )
        ours = max(ours, np.abs(made - exact).max())
        theirs = max(
            theirs,
            np.abs(fpixel.adjust_hue_torchvision(pixels.copy(), turn) - exact).max(),
        )
    assert ours <= 0.51 < 5 < theirs


def test_nothing_changes_where_factors_are_one_and_the_hue_stays() -> None:
    pixels = image(np.random.default_rng(1), 60, 80)
    assert np.array_equal(COLOR[Op.JITTER](pixels, [0, 1, 2, 3, *NONE[4:]]), pixels)


def test_gray_and_tables_are_the_librarys() -> None:
    rng = np.random.default_rng(2)
    pixels = image(rng, 40, 50)
    assert (
        near(
            COLOR[Op.GRAY](pixels, []),
            fpixel.to_gray_weighted_average(pixels)[:, :, None],
        )
        <= 1
    )
    for threshold in rng.random(20).tolist():
        ours = COLOR[Op.TABLE](pixels, [SOLARIZE, *[int(np.ceil(threshold * 255))] * 3])
        assert np.array_equal(ours, fpixel.solarize(pixels, threshold))
    for bits in range(1, 8):
        ours = COLOR[Op.TABLE](pixels, [POSTERIZE, *[256 - (1 << (8 - bits))] * 3])
        assert np.array_equal(ours, fpixel.posterize(pixels.copy(), bits))


def test_gaussian_blur_is_within_a_level_of_the_librarys() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        pixels, sigma, side = (
            image(rng, 50, 40),
            float(rng.uniform(0.1, 5)),
            int(rng.choice([0, 3, 7])),
        )
        ours = COLOR[Op.BLUR](
            pixels,
            gaussian_coefficients(np.array([sigma]), np.array([side]))[0].tolist(),
        )
        weights = fblur.create_gaussian_kernel_1d(sigma, side)
        assert near(ours, cv2.sepFilter2D(pixels, -1, weights, weights)) <= 1


class Shifts(random.Random):
    """A generator that gives these numbers."""

    def uniform(self, a: float, b: float) -> float:
        return self.numbers.pop(0)


def test_motion_blur_is_within_a_level_of_the_librarys() -> None:
    rng = np.random.default_rng(4)
    for _ in range(60):
        pixels, side = image(rng, 50, 40), int(rng.choice([3, 5, 7, 9, 15]))
        angle, direction, shift = (
            rng.uniform(0, 360),
            rng.uniform(-1, 1),
            rng.uniform(-1, 1, 2),
        )
        shifts = Shifts()
        shifts.numbers = shift.tolist()  # type: ignore[attr-defined]
        weights = fblur.create_motion_kernel(side, angle, direction, True, shifts)
        params = motion_kernels(
            np.array([side]), np.array([angle]), np.array([direction]), shift[None]
        )[0].tolist()
        assert np.array_equal(
            np.array(params[2 : 2 + side**2]).reshape(side, side) > 0, weights > 0
        )
        ours = COLOR[Op.FILTER](pixels, params)
        assert (
            near(
                ours,
                cv2.filter2D(pixels, -1, weights.astype(np.float32) / weights.sum()),
            )
            <= 1
        )
