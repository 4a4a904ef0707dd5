"""The steps of a program: Albumentations' by name, arguments and distributions, but drawn here.

Each draws its parameters for all samples of a micro-batch at once, as integers (`raypipe.transform.ops`), and says
of what size it leaves them. Arguments are the library's, with its defaults. Values that are not known here make
`native_step` return None, and the library does that step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from raypipe.transform.draws import between, integers
from raypipe.transform.exact import exp, sin_cos
from raypipe.transform.filters import gaussian_coefficients, motion_kernels
from raypipe.transform.ops import MAX_FILTER, MAX_RADIUS, NUM_PARAMS, POSTERIZE, SOLARIZE, Op

Range = tuple[float, float]
NEAREST, LINEAR, CUBIC = 0, 1, 2
"""OpenCV's numbers of interpolations."""
_INTERPOLATIONS = (NEAREST, LINEAR, CUBIC)
_BORDERS = (0, 1, 2, 3, 4)  # OpenCV's numbers: constant, replicate, reflect, wrap, reflect 101
_WITHOUT_COPIES = (0, 1)
_ONE = 1 << 16  # in Q16
_MAX_HOLES = 64


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a program.

    Attributes:
        p: the chance that it applies to a sample.
        ops: its operations.
        num_uniforms: that it draws for a sample, beside one for its chance.
    """

    p: float = 1.0

    ops: ClassVar[tuple[Op, ...]]
    num_uniforms: ClassVar[int] = 0

    @property
    def is_known(self) -> bool:
        """Whether its arguments have values that are known here."""
        return True

    @property
    def is_random(self) -> bool:
        """Whether a draw decides anything."""
        return 0 < self.p < 1 or (self.p > 0 and self.num_uniforms > 0)

    def num_params(self, op: Op) -> int:
        """Of an operation of its own, beside `apply`."""
        return NUM_PARAMS[op]

    @property
    def mask_fill(self) -> int | None:
        """What it puts into a mask where it has no pixel for it; None: nothing."""
        return None

    @property
    def takes_points(self) -> bool:
        """Whether boxes and keypoints can follow: a border that repeats pixels would repeat them, too."""
        return True

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        """Draw parameters for B samples, as if it applied to all.

        Args:
            u: uniforms, float64 (B, num_uniforms).
            sizes: (height, width) of the images that come to it, int64 (B, 2).

        Returns:
            The parameters of its operations in turn: integers for all samples, int64 (B,) or (B, n). And the sizes
            of the images that leave it.
        """
        raise NotImplementedError

    def no_room(self, size: tuple[int, int]) -> str:
        """Why an image of this size is too small for it; empty = it is not."""
        return ""


@dataclass(frozen=True, kw_only=True)
class RandomResizedCrop(Step):
    """Szegedy et al. 2014: ten times an area and a ratio are drawn, until such a box fits into the image."""

    size: tuple[int, int]
    scale: Range = (0.08, 1.0)
    ratio: Range = (0.75, 1.3333333333333333)
    interpolation: int = LINEAR
    mask_interpolation: int = NEAREST
    area_for_downscale: str | None = None

    ops = Op.CROP, Op.RESIZE
    num_uniforms = 22
    _NUM_TRIES = 10

    @property
    def is_known(self) -> bool:
        return self.p >= 1 and _is_plain_resize(self)

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        boxes, fits = self._boxes(u[:, 0], u[:, 1], sizes)
        (failed,) = np.nonzero(~fits)
        if failed.size:
            boxes[failed] = self._central(sizes[failed])
            tries = u[failed, 2 : 2 * self._NUM_TRIES]
            others, fit = self._boxes(tries[:, ::2], tries[:, 1::2], sizes[failed][:, None])
            first, any_fits = fit.argmax(axis=1), fit.any(axis=1)
            boxes[failed[any_fits]] = others[np.arange(len(failed)), first][any_fits]
            central = failed[~any_fits]
        starts = integers(u[:, -2:], 0, sizes - boxes)
        if failed.size:
            starts[central] = (sizes[central] - boxes[central]) // 2
        height, width = self.size
        return [starts, boxes, height, width, self.interpolation], _all(self.size, len(u))

    def _boxes(self, area: np.ndarray, ratio: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(height, width) of boxes, int64 (…, 2), and whether they fit into images; of uniforms (…)."""
        pixels = (sizes[..., 0] * sizes[..., 1]).astype(np.float64)
        areas = pixels * between(area, self.scale)
        ratios = exp(between(ratio, (_log(self.ratio[0]), _log(self.ratio[1]))))
        sides = np.rint(np.sqrt(np.stack([areas / ratios, areas * ratios], axis=-1))).astype(np.int64)
        return sides, ((sides > 0) & (sides <= sizes)).all(axis=-1)

    def _central(self, sizes: np.ndarray) -> np.ndarray:
        """The largest boxes within the ratios."""
        height, width = sizes.astype(np.float64).T
        too_narrow, too_wide = width < self.ratio[0] * height, width > self.ratio[1] * height
        boxes = sizes.copy()
        boxes[too_narrow, 0] = np.rint(width / self.ratio[0])[too_narrow]
        boxes[too_wide, 1] = np.rint(height * self.ratio[1])[too_wide]
        return np.clip(boxes, 1, sizes)


@dataclass(frozen=True, kw_only=True)
class _FixedCrop(Step):
    height: int
    width: int
    pad_if_needed: bool = False

    ops = (Op.CROP,)

    @property
    def is_known(self) -> bool:
        return self.p >= 1 and not self.pad_if_needed

    def no_room(self, size: tuple[int, int]) -> str:
        if self.height <= size[0] and self.width <= size[1]:
            return ""
        return (
            "Crop size (height, width) exceeds image dimensions (height, width): "
            f"{(self.height, self.width)} vs {tuple(size)}"
        )


@dataclass(frozen=True, kw_only=True)
class RandomCrop(_FixedCrop):
    """A box of fixed size, anywhere."""

    num_uniforms = 2

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        starts = integers(u, 0, np.maximum(sizes - (self.height, self.width), 0))
        return [starts, self.height, self.width], _all((self.height, self.width), len(u))


@dataclass(frozen=True, kw_only=True)
class CenterCrop(_FixedCrop):
    """A box of fixed size in the middle."""

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        starts = (sizes - (self.height, self.width)) // 2
        return [starts, self.height, self.width], _all((self.height, self.width), len(u))


@dataclass(frozen=True, kw_only=True)
class Resize(Step):
    """A resize to a fixed size."""

    height: int
    width: int
    interpolation: int = LINEAR
    mask_interpolation: int = NEAREST
    area_for_downscale: str | None = None

    ops = (Op.RESIZE,)

    @property
    def is_known(self) -> bool:
        return self.p >= 1 and _is_plain_resize(self)

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        return [self.height, self.width, self.interpolation], _all((self.height, self.width), len(u))


@dataclass(frozen=True, kw_only=True)
class SmallestMaxSize(Step):
    """A resize by which the short side has a length, or both sides at least theirs."""

    max_size: int | None = None
    max_size_hw: tuple[int | None, int | None] | None = None
    interpolation: int = LINEAR
    mask_interpolation: int = NEAREST
    area_for_downscale: str | None = None

    ops = (Op.RESIZE,)

    @property
    def is_known(self) -> bool:
        sides = [self.max_size] if self.max_size_hw is None else self.max_size_hw
        known = self.p >= 1 and _is_plain_resize(self)
        return known and all(isinstance(side, int) for side in sides)

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        # To the bit as the library: a quotient first, and then products.
        if self.max_size is not None:
            scales = self.max_size / sizes.min(axis=1, keepdims=True)
        else:
            scales = (np.array(self.max_size_hw) / sizes).max(axis=1, keepdims=True)
        resized = np.maximum(1, np.rint(sizes * scales)).astype(np.int64)
        return [resized, self.interpolation], resized


@dataclass(frozen=True, kw_only=True)
class _Bordered(Step):
    """Has pixels from beyond the image's edges."""

    fill: float | tuple[float, ...] = 0
    fill_mask: float | tuple[float, ...] = 0
    border_mode: int = 0

    @property
    def is_known(self) -> bool:
        fills = _rgb(self.fill) is not None and _rgb(self.fill_mask) is not None
        return self.border_mode in _BORDERS and fills

    @property
    def mask_fill(self) -> int | None:
        return _filled(self.fill_mask)[0]

    @property
    def takes_points(self) -> bool:
        return self.border_mode in _WITHOUT_COPIES


@dataclass(frozen=True, kw_only=True)
class Pad(_Bordered):
    """Pixels around the image."""

    padding: int | tuple[int, ...] = 0

    ops = (Op.PAD,)

    @property
    def is_known(self) -> bool:
        return self.p >= 1 and super().is_known

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        given = (self.padding,) if isinstance(self.padding, int) else tuple(self.padding)
        left, top, right, bottom = given if len(given) == 4 else (given[0], given[-1]) * 2
        padded = sizes + np.array([top + bottom, left + right])
        return [top, bottom, left, right, self.border_mode, *_filled(self.fill)], padded


@dataclass(frozen=True, kw_only=True)
class Turn(Step):
    """One of several turns and reflections, each as likely as the others.

    Attributes:
        codes: of each the sum of 4 (transpose), then 2 (upside down), then 1 (left to right).
    """

    codes: tuple[int, ...]

    ops = (Op.TURN,)
    num_uniforms = 1

    @property
    def is_random(self) -> bool:
        return 0 < self.p < 1 or (self.p > 0 and len(self.codes) > 1)

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        codes = np.array(self.codes)[integers(u[:, 0], 0, len(self.codes) - 1)]
        return [codes], np.where((codes & 4 != 0)[:, None], sizes[:, ::-1], sizes)


@dataclass(frozen=True, kw_only=True)
class Affine(_Bordered):
    """Scale, turn, shear and shift about the centre, in this order; the size stays."""

    scale: Any = (1.0, 1.0)
    translate_percent: Any = None
    translate_px: Any = None
    rotate: Any = 0.0
    shear: Any = (0.0, 0.0)
    interpolation: int = LINEAR
    fit_output: bool = False
    keep_ratio: bool = False
    balanced_scale: bool = False
    mask_interpolation: int = NEAREST
    rotate_method: str = "largest_box"
    p: float = 0.5

    ops = (Op.AFFINE,)
    num_uniforms = 7

    @property
    def is_known(self) -> bool:
        plain = not self.fit_output and not self.balanced_scale and self.interpolation in (NEAREST, LINEAR)
        of_targets = self.mask_interpolation == NEAREST and self.rotate_method == "largest_box"
        return plain and of_targets and super().is_known

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        height, width = sizes.astype(np.float64).T
        (scale_x, scale_y), (shear_x, shear_y) = _of_axes(self.scale, 1.0), _of_axes(self.shear, 0.0)
        sx = between(u[:, 0], scale_x)
        sy = sx if self.keep_ratio else between(u[:, 1], scale_y)
        sin, cos = sin_cos(np.deg2rad(1.0) * between(u[:, 2], _exactly(self.rotate)))
        tan_x, tan_y = (
            np.divide(*sin_cos(np.deg2rad(1.0) * -between(u[:, column], limits)))
            for column, limits in ((3, shear_x), (4, shear_y))
        )
        if self.translate_px is not None:
            by_axis = _of_axes(self.translate_px, 0)
            tx, ty = (
                integers(u[:, 5 + axis], int(low), int(high)).astype(np.float64)
                for axis, (low, high) in enumerate(by_axis)
            )
        elif self.translate_percent is not None:
            by_axis = _of_axes(self.translate_percent, 0.0)
            tx, ty = (
                np.trunc(between(u[:, 5 + axis], limits) * side)
                for axis, (limits, side) in enumerate(zip(by_axis, (width, height), strict=True))
            )
        else:
            tx = ty = np.zeros(len(u))
        # shear @ rotation @ scale, of columns (x, y)
        a, b = (cos - tan_x * sin) * sx, (sin + tan_x * cos) * sy
        d, e = (tan_y * cos - sin) * sx, (tan_y * sin + cos) * sy
        center_x, center_y = width / 2 - 0.5, height / 2 - 0.5
        determinant = a * e - b * d
        inverse = np.stack([e, -b, -d, a]) / np.where(determinant == 0, 1, determinant)
        (ia, ib, ic, ie), to_x, to_y = inverse, center_x + tx, center_y + ty
        matrix = [ia, ib, center_x - ia * to_x - ib * to_y, ic, ie, center_y - ic * to_x - ie * to_y]
        in_q32 = np.rint(np.clip(np.stack(matrix, axis=1), -(2.0**20), 2.0**20) * 2.0**32).astype(np.int64)
        return [in_q32, self.interpolation, self.border_mode, *_filled(self.fill)], sizes


@dataclass(frozen=True, kw_only=True)
class ColorJitter(Step):
    """Brightness, contrast, saturation and hue, in an order that is drawn."""

    brightness: Any = (0.8, 1.2)
    contrast: Any = (0.8, 1.2)
    saturation: Any = (0.8, 1.2)
    hue: Any = (-0.5, 0.5)
    p: float = 0.5

    ops = (Op.JITTER,)
    num_uniforms = 5

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        factors = [
            np.rint(between(u[:, column], _about_one(limits)) * _ONE).astype(np.int64)
            for column, limits in enumerate((self.brightness, self.contrast, self.saturation))
        ]
        hue = np.rint(between(u[:, 3], _both_ways(self.hue)) * (6 * _ONE)).astype(np.int64) % (6 * _ONE)
        return [_ORDERS[integers(u[:, 4], 0, len(_ORDERS) - 1)], *factors, hue], sizes


@dataclass(frozen=True, kw_only=True)
class ToGray(Step):
    """Grey, in three channels."""

    num_output_channels: int = 3
    method: str = "weighted_average"
    p: float = 0.5

    ops = (Op.GREY,)

    @property
    def is_known(self) -> bool:
        return self.num_output_channels == 3 and self.method == "weighted_average"

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        return [], sizes


@dataclass(frozen=True, kw_only=True)
class Solarize(Step):
    """Inverts what is at least as bright as a threshold, a share of 255."""

    threshold_range: Range = (0.5, 0.5)
    p: float = 0.5

    ops = (Op.TABLE,)
    num_uniforms = 1

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        thresholds = np.ceil(between(u[:, 0], self.threshold_range) * 255).astype(np.int64)
        return [SOLARIZE, thresholds, thresholds, thresholds], sizes


@dataclass(frozen=True, kw_only=True)
class Posterize(Step):
    """Keeps the high bits of each channel."""

    num_bits: Any = 4
    p: float = 0.5

    ops = (Op.TABLE,)
    num_uniforms = 3

    @property
    def is_known(self) -> bool:
        return isinstance(self.num_bits, int) or (
            len(self.num_bits) == 2 and all(isinstance(bits, int) for bits in self.num_bits)
        )

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        low, high = (self.num_bits,) * 2 if isinstance(self.num_bits, int) else self.num_bits
        masks = 256 - (1 << (8 - integers(u[:, 0], low, high)))
        return [POSTERIZE, masks, masks, masks], sizes


@dataclass(frozen=True, kw_only=True)
class GaussianBlur(Step):
    """A blur of a standard deviation, pixels."""

    blur_limit: Any = 0
    sigma_limit: Any = (0.5, 3.0)
    p: float = 0.5

    ops = (Op.BLUR,)
    num_uniforms = 2

    @property
    def is_known(self) -> bool:
        radii = max(_from_zero(self.blur_limit)) // 2, int(max(_from_zero(self.sigma_limit)) * 3.5)
        return max(radii) <= MAX_RADIUS and min(_from_zero(self.sigma_limit)) > 0

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        sigma = between(u[:, 0], _from_zero(self.sigma_limit))
        side = integers(u[:, 1], *map(int, _from_zero(self.blur_limit)))
        return [gaussian_coefficients(sigma, side)], sizes


@dataclass(frozen=True, kw_only=True)
class MotionBlur(Step):
    """A blur along a line."""

    blur_limit: Any = (3, 7)
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
        low, high = (3, self.blur_limit) if isinstance(self.blur_limit, int) else self.blur_limit
        low, high = (max(3, side + (side % 2 == 0)) for side in (low, high))
        return low, max(low, high)

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        low, high = self._sides
        side = low + 2 * integers(u[:, 0], 0, (high - low) // 2)
        angle, direction = between(u[:, 1], self.angle_range), between(u[:, 2], self.direction_range)
        shift = between(u[:, 3:5], (-1.0, 1.0)) * float(self.allow_shifted)
        return [motion_kernels(side, angle, direction, shift)], sizes


@dataclass(frozen=True, kw_only=True)
class CoarseDropout(Step):
    """Boxes of one colour: DeVries & Taylor 2017, Zhong et al. 2017."""

    num_holes_range: tuple[int, int] = (1, 2)
    hole_height_range: Range = (0.1, 0.2)
    hole_width_range: Range = (0.1, 0.2)
    fill: Any = 0
    fill_mask: Any = None
    p: float = 0.5

    ops = (Op.DROPOUT,)

    @property
    def is_known(self) -> bool:
        fills = _rgb(self.fill) is not None and (self.fill_mask is None or _rgb(self.fill_mask) is not None)
        return fills and self.num_holes_range[1] <= _MAX_HOLES

    @property
    def mask_fill(self) -> int | None:
        return None if self.fill_mask is None else _filled(self.fill_mask)[0]

    @property
    def num_uniforms(self) -> int:  # type: ignore[override]
        """One for their number, four for each."""
        return 1 + 4 * self.num_holes_range[1]

    def num_params(self, op: Op) -> int:
        return 4 + 4 * self.num_holes_range[1]

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> tuple[list[np.ndarray | int], np.ndarray]:
        number, of_hole = integers(u[:, 0], *self.num_holes_range), u[:, 1:].reshape(len(u), -1, 4)
        holes = []
        for axis, (low, high) in enumerate((self.hole_height_range, self.hole_width_range)):
            side, drawn = sizes[:, axis : axis + 1], of_hole[..., axis]
            if self.hole_height_range[1] >= 1:  # pixels
                length = integers(drawn, int(low), np.clip(side, int(low), int(high)))
            else:
                length = (side * between(drawn, (low, high))).astype(np.int64)
            start = integers(of_hole[..., 2 + axis], 0, np.maximum(side - length, 0))
            holes.append((start, start + length))
        (top, bottom), (left, right) = holes
        boxes = np.stack([top, left, bottom, right], axis=-1).reshape(len(u), -1)
        return [*_filled(self.fill), number, boxes], sizes


_ORDERS = np.array(
    [(a, b, c, 6 - a - b - c) for a in range(4) for b in range(4) for c in range(4) if len({a, b, c}) == 3]
)
_TURNS = {
    "HorizontalFlip": ((1,), 0.5),
    "VerticalFlip": ((2,), 0.5),
    "Transpose": ((4,), 0.5),
    "RandomRotate90": ((0, 6, 3, 5), 1.0),
    "D4": (tuple(range(8)), 1.0),
}
_STEPS: dict[str, type[Step]] = {
    kind.__name__: kind
    for kind in (
        RandomResizedCrop,
        RandomCrop,
        CenterCrop,
        Resize,
        SmallestMaxSize,
        Pad,
        Affine,
        ColorJitter,
        ToGray,
        Solarize,
        Posterize,
        GaussianBlur,
        MotionBlur,
        CoarseDropout,
    )
}


def native_step(name: str, arguments: Mapping[str, Any]) -> Step | None:
    """The step of a name; None: the name, or the value of an argument, is not known here.

    Args:
        arguments: the library's; those that are of no use for an image are ignored.
    """
    if name in _TURNS:
        codes, p = _TURNS[name]
        return Turn(codes=codes, p=arguments.get("p", p))
    kind = _STEPS.get(name)
    if kind is None:
        return None
    step = kind(**{each.name: arguments[each.name] for each in fields(kind) if each.name in arguments})
    return step if step.is_known else None


def _is_plain_resize(step: Any) -> bool:
    is_plain = step.interpolation in _INTERPOLATIONS and step.mask_interpolation == NEAREST
    return is_plain and not step.area_for_downscale


def _all(size: tuple[int, int], num: int) -> np.ndarray:
    return np.broadcast_to(np.array(size, np.int64), (num, 2))


def _log(x: float) -> float:
    """The natural logarithm without its last bits, in which machines differ."""
    return round(math.log(x) * 2**40) / 2**40


def _both_ways(limits: Any) -> Range:
    """(−x, x) of a number x."""
    return (-limits, limits) if isinstance(limits, int | float) else tuple(limits)


def _exactly(limits: Any) -> Range:
    """(x, x) of a number x."""
    return (limits, limits) if isinstance(limits, int | float) else tuple(limits)


def _about_one(limits: Any) -> Range:
    """(1 − x, 1 + x) of a number x, but not below 0."""
    return (max(0.0, 1 - limits), 1 + limits) if isinstance(limits, int | float) else tuple(limits)


def _from_zero(limits: Any) -> Range:
    """(0, x) of a number x."""
    return (0, limits) if isinstance(limits, int | float) else tuple(limits)


def _of_axes(value: Any, default: float) -> tuple[Range, Range]:
    """The limits for x and y: of a number, of limits for both, or of a mapping."""
    by_axis = value if isinstance(value, Mapping) else {"x": value, "y": value}
    limits = (by_axis.get(axis, default) for axis in "xy")
    x, y = map(_exactly, limits)
    return x, y


def _rgb(fill: Any) -> tuple[int, int, int] | None:
    """A fill as three bytes; None: it is none."""
    numbers = (fill,) * 3 if isinstance(fill, int | float) else fill
    if (
        isinstance(numbers, str)
        or not isinstance(numbers, tuple | list | np.ndarray)
        or len(numbers) not in (1, 3)
    ):
        return None
    whole = [int(number) for number in (tuple(numbers) * 3)[:3] if 0 <= number <= 255 and number == int(number)]
    return (whole[0], whole[1], whole[2]) if len(whole) == 3 else None


def _filled(fill: Any) -> tuple[int, int, int]:
    colour = _rgb(fill)
    assert colour is not None, "is_known looks at it"
    return colour
