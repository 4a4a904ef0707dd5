"""Steps that change pixels where they are: colors, blurs and dropout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from raypipe.kernel.draws import between, integers
from raypipe.kernel.filters import gaussian_coefficients, motion_kernels
from raypipe.kernel.ops import MAX_FILTER, MAX_RADIUS, POSTERIZE, SOLARIZE, Op
from raypipe.kernel.step import Filled, Numbers, Range, Step, Supported, toward

_ONE = 1 << 16  # in Q16
_MAX_HOLES = 64
_LEAST_SIGMA = 0.1  # pixels: such a blur changes nothing
_ORDERS = np.array(list(itertools.permutations(range(4))))


@dataclass(frozen=True, kw_only=True)
class ColorJitter(Step):
    """Brightness, contrast, saturation and hue, in an order that is drawn."""

    brightness: Range = (0.8, 1.2)
    contrast: Range = (0.8, 1.2)
    saturation: Range = (0.8, 1.2)
    hue: Range = (-0.5, 0.5)
    p: float = 0.5

    ops = (Op.JITTER,)
    num_uniforms = 5
    neutral: ClassVar[Mapping[str, float]] = {
        "brightness": 1,
        "contrast": 1,
        "saturation": 1,
        "hue": 0,
    }

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        limits = np.array([self.brightness, self.contrast, self.saturation, self.hue])
        drawn = between(u[:, :4], limits.T) * [_ONE, _ONE, _ONE, 6 * _ONE]
        factors = np.rint(drawn).astype(np.int64)
        factors[:, 3] %= 6 * _ONE
        return [_ORDERS[integers(u[:, 4], 0, len(_ORDERS) - 1)], factors]


@dataclass(frozen=True, kw_only=True)
class ToGray(Step):
    """Step that turns images gray, in three channels."""

    p: float = 0.5

    ops = (Op.GRAY,)
    supported: ClassVar[Supported] = {
        "num_output_channels": (3,),
        "method": ("weighted_average",),
    }

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        return []


@dataclass(frozen=True, kw_only=True)
class Solarize(Step):
    """Inverts what is at least as bright as a threshold, a share of 255."""

    threshold_range: Range = (0.5, 0.5)
    p: float = 0.5

    ops = (Op.TABLE,)
    num_uniforms = 1
    neutral: ClassVar[Mapping[str, float]] = {"threshold_range": 1}

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        thresholds = np.ceil(between(u[:, 0], self.threshold_range) * 255).astype(
            np.int64
        )
        return [SOLARIZE, *[thresholds] * 3]


@dataclass(frozen=True, kw_only=True)
class Posterize(Step):
    """Keeps the high bits of each channel."""

    num_bits: Any = (4, 4)
    p: float = 0.5

    ops = (Op.TABLE,)
    num_uniforms = 3

    @property
    def is_known(self) -> bool:
        return len(self.num_bits) == 2 and all(
            isinstance(bits, int) for bits in self.num_bits
        )

    def _weaker_ranges(self, strength: float) -> dict[str, Any]:
        return {"num_bits": tuple(map(round, toward(8, self.num_bits, strength)))}

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        masks = 256 - (1 << (8 - integers(u[:, 0], *self.num_bits)))
        return [POSTERIZE, *[masks] * 3]


@dataclass(frozen=True, kw_only=True)
class GaussianBlur(Step):
    """A blur of a standard deviation, pixels."""

    blur_limit: tuple[int, int] = (0, 0)
    sigma_limit: Range = (0.5, 3.0)
    p: float = 0.5

    ops = (Op.BLUR,)
    num_uniforms = 2

    @property
    def is_known(self) -> bool:
        radius = max(int(max(self.blur_limit)) // 2, int(max(self.sigma_limit) * 3.5))
        return radius <= MAX_RADIUS and min(self.sigma_limit) > 0

    def _weaker_ranges(self, strength: float) -> dict[str, Any]:
        weaker = zip(
            self.sigma_limit, toward(0, self.sigma_limit, strength), strict=True
        )
        return {
            "sigma_limit": tuple(
                max(sigma, min(whole, _LEAST_SIGMA)) for whole, sigma in weaker
            )
        }

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        sigma = between(u[:, 0], self.sigma_limit)
        (low, high) = self.blur_limit
        return [gaussian_coefficients(sigma, integers(u[:, 1], int(low), int(high)))]


@dataclass(frozen=True, kw_only=True)
class MotionBlur(Step):
    """A blur along a line."""

    blur_limit: tuple[int, int] = (3, 7)
    allow_shifted: bool = True
    angle_range: Range = (0, 360)
    direction_range: Range = (-1.0, 1.0)
    p: float = 0.5

    ops = (Op.FILTER,)
    num_uniforms = 5

    @property
    def is_known(self) -> bool:
        return max(self._sides) <= MAX_FILTER

    @property
    def _sides(self) -> tuple[int, int]:
        low, high = (max(3, side + (side % 2 == 0)) for side in self.blur_limit)
        return low, max(low, high)

    def _weaker_ranges(self, strength: float) -> dict[str, Any]:
        return {"blur_limit": tuple(map(round, toward(3, self.blur_limit, strength)))}

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        low, high = self._sides
        side = low + 2 * integers(u[:, 0], 0, (high - low) // 2)
        angle = between(u[:, 1], self.angle_range)
        direction = between(u[:, 2], self.direction_range)
        shift = between(u[:, 3:5], (-1.0, 1.0)) * float(self.allow_shifted)
        return [motion_kernels(side, angle, direction, shift)]


@dataclass(frozen=True, kw_only=True)
class CoarseDropout(Filled):
    """Boxes of one color: DeVries & Taylor 2017, Zhong et al. 2017."""

    num_holes_range: tuple[int, int] = (1, 2)
    hole_height_range: Range = (0.1, 0.2)
    hole_width_range: Range = (0.1, 0.2)
    p: float = 0.5

    ops = (Op.DROPOUT,)
    neutral: ClassVar[Mapping[str, float]] = {
        "hole_height_range": 0,
        "hole_width_range": 0,
    }

    @property
    def is_known(self) -> bool:
        return super().is_known and self.num_holes_range[1] <= _MAX_HOLES

    @property
    def num_uniforms(self) -> int:  # type: ignore[override]
        """Count one for the number of boxes, and four for each."""
        return 1 + 4 * self.num_holes_range[1]

    def num_params(self, op: Op) -> int:
        return 4 + 4 * self.num_holes_range[1]

    def _weaker_ranges(self, strength: float) -> dict[str, Any]:
        weaker = super()._weaker_ranges(strength)
        if self.hole_height_range[1] < 1:
            return weaker
        # pixels
        return {
            name: tuple(max(1, round(side)) for side in limits)
            for name, limits in weaker.items()
        }

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        number = integers(u[:, 0], *self.num_holes_range)
        of_hole = u[:, 1:].reshape(len(u), -1, 4)
        ranges = np.array([self.hole_height_range, self.hole_width_range])
        side = sizes[:, None]
        if self.hole_height_range[1] >= 1:  # pixels
            low, high = ranges.T.astype(np.int64)
            length = integers(of_hole[..., :2], low, np.clip(side, low, high))
        else:
            length = (side * between(of_hole[..., :2], ranges.T)).astype(np.int64)
        start = integers(of_hole[..., 2:], 0, np.maximum(side - length, 0))
        boxes = np.concatenate([start, start + length], axis=-1).reshape(len(u), -1)
        return [*self.color, number, boxes]


COLOR_STEPS = (
    ColorJitter,
    ToGray,
    Solarize,
    Posterize,
    GaussianBlur,
    MotionBlur,
    CoarseDropout,
)
