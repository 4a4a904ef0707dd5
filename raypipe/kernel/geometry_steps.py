"""Steps that move pixels: crops, resizes, borders, turns and affine maps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from raypipe.kernel.draws import between, integers
from raypipe.kernel.exact import exp, sin_cos
from raypipe.kernel.ops import CUBIC, LINEAR, NEAREST, Op
from raypipe.kernel.step import Filled, Numbers, Range, Step, Supported, toward

_BORDERS = range(5)  # OpenCV's: constant, replicate, reflect, wrap, reflect 101
_WITHOUT_COPIES = (0, 1)


@dataclass(frozen=True, kw_only=True)
class _Resizing(Step):
    interpolation: int = LINEAR

    ops: ClassVar[tuple[Op, ...]] = (Op.RESIZE,)
    supported: ClassVar[Supported] = {
        "interpolation": (NEAREST, LINEAR, CUBIC),
        "mask_interpolation": (NEAREST,),
        "area_for_downscale": (None,),
    }


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(_Resizing):
    """Szegedy et al. 2014: ten times an area and a ratio are drawn, until such a box fits into the image."""

    size: tuple[int, int]
    scale: Range = (0.08, 1.0)
    ratio: Range = (0.75, 1.3333333333333333)

    ops = Op.CROP, Op.RESIZE
    num_uniforms = 22
    _NUM_TRIES = 10

    def _weaker_ranges(self, strength: float) -> dict[str, Any]:
        """The area goes to the largest, the ratio to 1: in the end it is a central crop."""
        ratio = self.ratio[0] ** strength, self.ratio[1] ** strength
        return {"scale": toward(self.scale[1], self.scale, strength), "ratio": ratio}

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        tries = u[:, : 2 * self._NUM_TRIES]
        boxes, fit = self._boxes(tries[:, ::2], tries[:, 1::2], sizes[:, None])
        first = (np.arange(len(u)), fit.argmax(axis=1))
        fits = fit[first][:, None]
        height, width = sizes.astype(np.float64).T
        largest = np.stack([width / self.ratio[0], height * self.ratio[1]], axis=1)
        central = np.clip(np.rint(largest), 1, sizes).astype(np.int64)
        boxes = np.where(fits, boxes[first], central)
        starts = integers(u[:, -2:], 0, sizes - boxes)
        starts = np.where(fits, starts, (sizes - boxes) // 2)
        return [starts, boxes, *self.size, self.interpolation]

    def _boxes(
        self, area: np.ndarray, ratio: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (height, width) of boxes from uniforms (…), int64 (…, 2), and whether they fit into images."""
        pixels = (sizes[..., 0] * sizes[..., 1]).astype(np.float64)
        areas = pixels * between(area, self.scale)
        ratios = exp(between(ratio, (_log(self.ratio[0]), _log(self.ratio[1]))))
        sides = np.rint(
            np.sqrt(np.stack([areas / ratios, areas * ratios], axis=-1))
        ).astype(np.int64)
        return sides, ((sides > 0) & (sides <= sizes)).all(axis=-1)


def _log(x: float) -> float:
    """The natural logarithm without its last bits, in which machines differ."""
    return round(math.log(x) * 2**40) / 2**40


@dataclass(frozen=True, kw_only=True)
class FixedCrop(Step):
    """A box of fixed size, for which an image may be too small."""

    height: int
    width: int

    ops = (Op.CROP,)
    supported: ClassVar[Supported] = {"pad_if_needed": (False,)}

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        return [
            self._starts(u, np.maximum(sizes - (self.height, self.width), 0)),
            self.height,
            self.width,
        ]

    def _starts(self, u: np.ndarray, room: np.ndarray) -> np.ndarray:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RandomCrop(FixedCrop):
    """Step that crops images anywhere, or about the middle.

    Attributes:
        spread: share of the way from the middle to the edges that it may take.
    """

    spread: float = 1.0

    num_uniforms = 2

    def _weaker_ranges(self, strength: float) -> dict[str, Any]:
        return {"spread": self.spread * strength}

    def _starts(self, u: np.ndarray, room: np.ndarray) -> np.ndarray:
        if self.spread < 1:
            u = 0.5 + (u - 0.5) * self.spread
        return integers(u, 0, room)


class CenterCrop(FixedCrop):
    """Step that crops the middle of images."""

    def _starts(self, u: np.ndarray, room: np.ndarray) -> np.ndarray:
        return room // 2


@dataclass(frozen=True, kw_only=True)
class Resize(_Resizing):
    """A resize to a fixed size."""

    height: int
    width: int

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        return [self.height, self.width, self.interpolation]


@dataclass(frozen=True, kw_only=True)
class SmallestMaxSize(_Resizing):
    """A resize by which the short side has a length, or both sides at least theirs."""

    max_size: int | None = None
    max_size_hw: tuple[int | None, int | None] | None = None

    @property
    def is_known(self) -> bool:
        sides = [self.max_size] if self.max_size_hw is None else self.max_size_hw
        return super().is_known and all(isinstance(side, int) for side in sides)

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        # To the bit as the library: a quotient first, and then products.
        return [
            np.maximum(1, np.rint(sizes * self._scales(sizes))).astype(np.int64),
            self.interpolation,
        ]

    def keypoint_scale(
        self, size: tuple[int, int], resized: tuple[int, int]
    ) -> tuple[float, float]:
        """The scale before sides are rounded, as the library has it."""
        scale = float(self._scales(np.array([size]))[0, 0])
        return scale, scale

    def _scales(self, sizes: np.ndarray) -> np.ndarray:
        if self.max_size is not None:
            return self.max_size / sizes.min(axis=1, keepdims=True)
        return (np.array(self.max_size_hw) / sizes).max(axis=1, keepdims=True)


@dataclass(frozen=True, kw_only=True)
class _Bordered(Filled):
    """Has pixels from beyond the image's edges."""

    fill_mask: Any = 0
    border_mode: int = 0

    supported: ClassVar[Supported] = {"border_mode": _BORDERS}

    @property
    def takes_points(self) -> bool:
        return self.border_mode in _WITHOUT_COPIES


@dataclass(frozen=True, kw_only=True)
class Pad(_Bordered):
    """Step that adds pixels around images."""

    padding: int | tuple[int, ...] = 0

    ops = (Op.PAD,)

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        sides = np.atleast_1d(self.padding).tolist()
        if len(sides) < 4:
            sides = [sides[0], sides[-1]] * 2
        left, top, right, bottom = sides
        return [top, bottom, left, right, self.border_mode, *self.color]


@dataclass(frozen=True, kw_only=True)
class Turn(Step):
    """Turns and reflections, one of several with equal chances.

    Attributes:
        codes: a code for each, the sum of 4 (transpose), then 2 (upside down), then 1 (left to right).
    """

    codes: tuple[int, ...]

    ops = (Op.TURN,)
    num_uniforms = 1

    def _weaker_ranges(self, strength: float) -> dict[str, Any]:
        return {"p": self.p * strength} if len(self.codes) > 1 else {}

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        return [np.array(self.codes)[integers(u[:, 0], 0, len(self.codes) - 1)]]


@dataclass(frozen=True, kw_only=True)
class Affine(_Bordered):
    """Scale, turn, shear and shift about the center, in this order; the size stays.

    Limits apply to both axes, or are a mapping with those of x and y.
    """

    scale: Any = (1.0, 1.0)
    translate_percent: Any = None
    translate_px: Any = (0, 0)
    rotate: Range = (0.0, 0.0)
    shear: Any = (0.0, 0.0)
    interpolation: int = LINEAR
    keep_ratio: bool = False
    p: float = 0.5

    ops = (Op.AFFINE,)
    num_uniforms = 7
    neutral: ClassVar[Mapping[str, float]] = {
        "scale": 1,
        "translate_percent": 0,
        "translate_px": 0,
        "rotate": 0,
        "shear": 0,
    }
    supported: ClassVar[Supported] = {
        **_Bordered.supported,
        "interpolation": (NEAREST, LINEAR),
        "fit_output": (False,),
        "balanced_scale": (False,),
        "mask_interpolation": (NEAREST,),
        "rotate_method": ("largest_box",),
    }

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        if self.translate_percent is None:
            low, high = _of_axes(self.translate_px).astype(np.int64)
            shifts = integers(u[:, 5:], low, high).astype(np.float64)
        else:
            shares = between(u[:, 5:], _of_axes(self.translate_percent))
            shifts = np.trunc(shares * sizes[:, ::-1])
        linear = self._scaled_turned_sheared(u[:, :5])
        source = _sources_about_center(linear, shifts, sizes)
        in_q32 = np.rint(np.clip(source, -(2.0**20), 2.0**20) * 2.0**32)
        return [
            in_q32.astype(np.int64),
            self.interpolation,
            self.border_mode,
            *self.color,
        ]

    def _scaled_turned_sheared(self, u: np.ndarray) -> _Linear:
        """Return the drawn map without its shift: shear @ rotation @ scale, of columns (x, y)."""
        scale = between(u[:, :2], _of_axes(self.scale))
        scale_x = scale[:, 0]
        scale_y = scale_x if self.keep_ratio else scale[:, 1]
        rotation = between(u[:, 2:3], self.rotate)
        shear = -between(u[:, 3:5], _of_axes(self.shear))
        degrees = np.hstack([rotation, shear])
        sines, cosines = sin_cos(np.deg2rad(1.0) * degrees.T)
        sin = sines[0]
        cos = cosines[0]
        tan_x, tan_y = sines[1:] / cosines[1:]
        return (
            (cos - tan_x * sin) * scale_x,
            (sin + tan_x * cos) * scale_y,
            (tan_y * cos - sin) * scale_x,
            (tan_y * sin + cos) * scale_y,
        )


_Linear = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""a, b, d, e of maps (x, y) → (a x + b y, d x + e y), each float64 (B,)."""


def _sources_about_center(
    linear: _Linear, shifts: np.ndarray, sizes: np.ndarray
) -> np.ndarray:
    """Return where pixels come from under a map about the center and a shift, float64 (B, 6), see `Op.AFFINE`."""
    a, b, d, e = linear
    determinant = a * e - b * d
    inverse = np.stack([e, -b, -d, a]) / np.where(determinant == 0, 1, determinant)
    center_y, center_x = sizes.T / 2 - 0.5
    to_x = center_x + shifts[:, 0]
    to_y = center_y + shifts[:, 1]
    from_x = center_x - inverse[0] * to_x - inverse[1] * to_y
    from_y = center_y - inverse[2] * to_x - inverse[3] * to_y
    return np.stack([*inverse[:2], from_x, *inverse[2:], from_y], axis=1)


def _of_axes(limits: Any) -> np.ndarray:
    """Return limits, for both axes or by axis, as an array: (low, high) of (x, y)."""
    if isinstance(limits, Mapping):
        return np.array([limits["x"], limits["y"]]).T
    return np.array([limits, limits]).T


TURNS = {
    "HorizontalFlip": ((1,), 0.5),
    "VerticalFlip": ((2,), 0.5),
    "Transpose": ((4,), 0.5),
    "RandomRotate90": ((0, 6, 3, 5), 1.0),
    "D4": (tuple(range(8)), 1.0),
}
"""Their codes by name, and the library's default of their chance."""
GEOMETRY_STEPS = (
    RandomResizedCrop,
    RandomCrop,
    CenterCrop,
    Resize,
    SmallestMaxSize,
    Pad,
    Affine,
)
