"""Steps of programs: transforms of Albumentations whose parameters are drawn here.

It draws them for all samples of a micro-batch at once, as integers (`raypipe.kernel.ops`), from the library's
distributions. Its fields are the library's arguments, as a transform keeps them: limits are pairs. `raypipe.
transform.geometry_steps` and `color_steps` have the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from raypipe.kernel.ops import NUM_PARAMS, Op

Range = tuple[float, float]
Numbers = list[np.ndarray | int]
"""Parameters of a step's operations in turn: integers for all samples, int64 (B,) or (B, n)."""
Supported = Mapping[str, Sequence[Any]]
SIZING = {Op.CROP, Op.RESIZE, Op.PAD}
"""Operations whose results have another size, however they are drawn."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a program.

    Attributes:
        p: probability that it applies to a sample.
        ops: its operations.
        num_uniforms: number of draws for a sample, besides one for its probability.
        supported: values of arguments that are, by name; others may have any.
        neutral: the number that has no effect, of each range of a magnitude, by name.
    """

    p: float = 1.0

    ops: ClassVar[tuple[Op, ...]]
    num_uniforms: ClassVar[int] = 0
    supported: ClassVar[Supported] = {}
    neutral: ClassVar[Mapping[str, float]] = {}

    @property
    def is_known(self) -> bool:
        """True if its fields have values that are supported."""
        return True

    def num_params(self, op: Op) -> int:
        """Number of the parameters of its operation, without `apply`."""
        return NUM_PARAMS[op]

    @property
    def mask_fill(self) -> int | None:
        """Value for a mask's pixels outside the image; None = none."""
        return None

    @property
    def takes_points(self) -> bool:
        """True if boxes and keypoints can follow: a border that repeats pixels would repeat them, too."""
        return True

    def keypoint_scale(
        self, size: tuple[int, int], resized: tuple[int, int]
    ) -> tuple[float, float]:
        """Factors of x and y by which a resize from and to these (height, width) multiplies keypoints."""
        return resized[1] / size[1], resized[0] / size[0]

    def weaker(self, strength: float) -> Self:
        """The step with its chance, and the ranges of its magnitudes, scaled by a strength in [0, 1].

        A step that always applies still does. It has the same operations and as many parameters.
        """
        p = self.p * strength if self.p < 1 else self.p
        return replace(self, **{"p": p, **self._weaker_ranges(strength)})

    def _weaker_ranges(self, strength: float) -> dict[str, Any]:
        """The fields that change, by name."""
        return {
            name: toward(number, getattr(self, name), strength)
            for name, number in self.neutral.items()
            if getattr(self, name) is not None
        }

    def draw(self, u: np.ndarray, sizes: np.ndarray) -> Numbers:
        """Draw parameters for B samples, as if it applied to all.

        Args:
            u: uniforms, float64 (B, num_uniforms).
            sizes: (height, width) of the images that come to it, int64 (B, 2).
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Filled(Step):
    """Has pixels that come from no image."""

    fill: Any = 0
    fill_mask: Any = None

    @property
    def is_known(self) -> bool:
        return _rgb(self.fill) is not None and (
            self.fill_mask is None or _rgb(self.fill_mask) is not None
        )

    @property
    def color(self) -> tuple[int, int, int]:
        """The fill, as RGB."""
        color = _rgb(self.fill)
        assert color is not None, "is_known looks at it"
        return color

    @property
    def mask_fill(self) -> int | None:
        color = _rgb(self.fill_mask)
        return color and color[0]


def toward(neutral: float, limits: Any, strength: float) -> Any:
    """Limits, or a mapping of them by axis, moved to a value without effect: all the way at a strength of 0."""
    if isinstance(limits, Mapping):
        return {
            axis: toward(neutral, of_axis, strength) for axis, of_axis in limits.items()
        }
    return tuple(neutral + (limit - neutral) * strength for limit in limits)


def _rgb(fill: Any) -> tuple[int, int, int] | None:
    """A fill as three bytes; None: it is none."""
    try:
        numbers = np.asarray(fill, float).ravel()
    except (TypeError, ValueError):
        return None
    is_byte = (numbers >= 0) & (numbers <= 255) & (numbers % 1 == 0)
    if len(numbers) not in (1, 3) or not is_byte.all():
        return None
    red, green, blue = np.broadcast_to(numbers, 3).astype(int).tolist()
    return red, green, blue
