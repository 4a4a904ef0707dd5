"""An Albumentations pipeline without most of Albumentations' Python: the same draws and pixels, to the bit.

Compose, its bookkeeping and its checks take four fifths of the time of an image of 32 pixels. Here the library's
own classes draw, from their own generators and in their order. What they draw becomes calls to OpenCV, the last of
which writes where the result is wanted.

    step                                           known here
    RandomResizedCrop                              of an image that is not decoded as well, where p = 1
    Pad, HorizontalFlip, VerticalFlip              always
    Resize, SmallestMaxSize                        without area_for_downscale, and of one size
    RandomCrop, CenterCrop                         without pad_if_needed
    Affine                                         without fit_output

From the first step on that is not known, steps are called as Compose calls them. To Compose is left a pipeline
that begins with such a step, is more than its steps (p, boxes, replay, …), or is of a version of the library that
this was not held against.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cv2
import numpy as np

_VERSIONS = ("2.0.8",)  # of Albumentations, whose steps are called by parts

Size = tuple[int, int]
"""(height, width), pixels."""
Box = tuple[int, int, int, int]
"""(top, left, height, width), pixels of an image, inside it."""
DecodeBox = Callable[[Box], np.ndarray]
"""A box → its pixels, uint8 RGB (h, w, 3), writable; they may come at a reduced scale."""
Undecoded = tuple[tuple[int, int], DecodeBox]
"""(height, width) of an image, pixels, and what decodes a box of it."""
Operation = Callable[[Any, np.ndarray | None], np.ndarray]
"""(image, array to put the result in or None) → result, which may be a view of the image."""
Draw = Callable[[Size], tuple[Size, Operation | None]]
"""A step: the size of an image → the size of the result, and what makes it; None = nothing changes."""


def cut(image: np.ndarray, box: Box) -> np.ndarray:
    """The box of an image; a view."""
    top, left, height, width = box
    return image[top : top + height, left : left + width]


class DirectPipeline:
    """A function of an image, or of one that is not decoded, where a random resized crop comes first.

    Attributes:
        rest: the steps that are left to the library.
        is_random: a draw decides something.
    """

    def __init__(self, pipeline: Any, draws: list[Draw], rest: list[Any]) -> None:
        self.rest = rest
        self.is_random = bool(rest) or any(map(_is_random, pipeline.transforms))
        self._steps: list[Any] = pipeline.transforms[: len(draws)]
        self._draws, self._random = draws, pipeline.py_random.random

    def __call__(self, image: np.ndarray | Undecoded, out: np.ndarray | None = None) -> np.ndarray:
        """Transform an image, uint8 (H, W, 3), which is not written to, but by the rest.

        The result is put into `out` if that is of its size, something has changed, and there is no rest.
        """
        self._random()  # Compose draws too: whether to run at all
        size: Size = image.shape[:2] if isinstance(image, np.ndarray) else image[0]
        operations: list[Operation] = []
        # Sizes follow from sizes, so that all draws come first.
        for draw in self._draws:
            size, operation = draw(size)
            if operation is not None:
                operations.append(operation)
        last = None if self.rest or out is None or out.shape[:2] != size else out
        result: Any = image
        for number, operation in enumerate(operations, start=1):
            result = operation(result, last if number == len(operations) else None)
        if not self.rest:
            return np.ascontiguousarray(result)
        data = {"image": np.ascontiguousarray(result)}
        for step in self.rest:
            data = step(**data)
        return data["image"]

    @property
    def crops_first(self) -> bool:
        """Whether the first step that makes a size of its own is a crop, for which an image may be too small."""
        kinds = (type(step).__name__ for step in self._steps)
        return next((kind for kind in kinds if kind in _SIZING), "") in ("RandomCrop", "CenterCrop")

    def no_room(self, size: Size) -> str:
        """Why an image of this size is too small for a crop among the known steps; empty = it is not."""
        try:
            for draw in self._draws:
                size, _ = draw(size)
        except Exception as error:  # the library's own, CropSizeError
            return str(error)
        return ""


def _is_random(step: Any) -> bool:
    return 0 < step.p < 1 or (step.p > 0 and type(step).__name__ in ("RandomResizedCrop", "RandomCrop", "Affine"))


def direct_pipeline(pipeline: Any) -> DirectPipeline | None:
    """What does the same as a Compose does to an image alone; None: it is left to Compose.

    Args:
        pipeline: any transform. Its steps are used, with the generators that they have.
    """
    library = sys.modules.get("albumentations")
    if library is None or type(pipeline) is not library.Compose or library.__version__ not in _VERSIONS:
        return None
    special = pipeline.processors or pipeline.additional_targets or pipeline.save_applied_params
    replays = any(
        getattr(step, "deterministic", False) or getattr(step, "replay_mode", False)
        for step in pipeline.transforms
    )
    if special or replays or pipeline.p != 1:
        return None
    draws: list[Draw] = []
    for step in pipeline.transforms:
        name = type(step).__name__
        is_known = name in _STEPS and type(step) is getattr(library, name)
        draw = _STEPS[name](step) if is_known else None
        if draw is None:
            break
        draws.append(draw if step.p >= 1 else partial(_now_and_then, step.p, step.py_random, draw))
    return DirectPipeline(pipeline, draws, list(pipeline.transforms[len(draws) :])) if draws else None


def _now_and_then(p: float, rng: Any, draw: Draw, size: Size) -> tuple[Size, Operation | None]:
    return draw(size) if p > 0 and rng.random() < p else (size, None)


def _random_resized_crop(step: Any) -> Draw:
    target: Size = tuple(step.size)
    drawn, interpolation = step.get_params_dependent_on_data, step._get_interpolation_for_resize

    def draw(size: Size) -> tuple[Size, Operation]:
        return target, partial(_crop_resize, _box(drawn({"shape": size}, {})), target, interpolation)

    return draw


def _crop_resize(
    box: Box,
    target: Size,
    interpolation: Callable[[Size, str], int],
    image: np.ndarray | Undecoded,
    out: np.ndarray | None,
) -> np.ndarray:
    crop = cut(image, box) if isinstance(image, np.ndarray) else image[1](box)
    return _resize(target, interpolation(crop.shape[:2], "image"), crop, out)


def _random_or_center_crop(step: Any) -> Draw | None:
    if step.pad_if_needed:
        return None
    drawn = step.get_params_dependent_on_data

    def draw(size: Size) -> tuple[Size, Operation]:
        box = _box(drawn({"shape": size}, {}))
        return box[2:], partial(_crop, box)

    return draw


def _crop(box: Box, image: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    part = cut(image, box)
    if out is None:
        return part
    out[...] = part
    return out


def _box(drawn: dict[str, Any]) -> Box:
    left, top, right, bottom = drawn["crop_coords"]
    return top, left, bottom - top, right - left


def _flip(axis: int, step: Any) -> Draw:

    def flip(image: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        return cv2.flip(image, axis, out)

    return lambda size: (size, flip)


def _pad(step: Any) -> Draw:
    sides = step.get_params_dependent_on_data({}, {})
    top, bottom, left, right = (sides[f"pad_{side}"] for side in ("top", "bottom", "left", "right"))
    fill, mode = _fill(step), step.border_mode

    def pad(image: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        return cv2.copyMakeBorder(image, top, bottom, left, right, mode, out, fill)

    return lambda size: ((size[0] + top + bottom, size[1] + left + right), pad)


def _fixed_resize(step: Any) -> Draw | None:
    if step.area_for_downscale:
        return None
    target = step.height, step.width
    operation = partial(_resize, target, step.interpolation)
    return lambda size: (target, None if size == target else operation)


def _resize_smallest_side(step: Any) -> Draw | None:
    if step.area_for_downscale or isinstance(step.max_size, list | tuple):
        return None

    def draw(size: Size) -> tuple[Size, Operation | None]:
        scale = step.get_params_dependent_on_data({"shape": size}, {})["scale"]
        target = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
        return target, None if size == target else partial(_resize, target, step.interpolation)

    return draw


def _resize(target: Size, interpolation: int, image: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    return cv2.resize(image, target[::-1], out, interpolation=interpolation)


def _affine(step: Any) -> Draw | None:
    if step.fit_output:
        return None
    functional = sys.modules["albumentations.augmentations.geometric.functional"]
    fill, identity = _fill(step), np.eye(3)
    tolerance = 1e-8 + 1e-5 * identity  # np.allclose's

    def draw(size: Size) -> tuple[Size, Operation | None]:
        translate, shear = step._get_translate_params(size), step._get_shear_params()
        scale = step._get_scale(step.scale, step.keep_ratio, step.balanced_scale, step.py_random)
        rotate, center = step.py_random.uniform(*step.rotate), functional.center(size)
        matrix = functional.create_affine_transformation_matrix(translate, shear, scale, rotate, center)
        if (np.abs(matrix - identity) <= tolerance).all():
            return size, None

        def warp(image: np.ndarray, out: np.ndarray | None) -> np.ndarray:
            sides = image.shape[1::-1]
            return cv2.warpAffine(image, matrix[:2], sides, out, step.interpolation, step.border_mode, fill)

        return size, warp

    return draw


def _fill(step: Any) -> Any:
    return sys.modules["albumentations.augmentations.geometric.functional"].extend_value(step.fill, 3)


_SIZING = ("RandomResizedCrop", "Resize", "SmallestMaxSize", "RandomCrop", "CenterCrop")
_STEPS: dict[str, Callable[[Any], Draw | None]] = {
    "RandomResizedCrop": _random_resized_crop,
    "RandomCrop": _random_or_center_crop,
    "CenterCrop": _random_or_center_crop,
    "HorizontalFlip": partial(_flip, 1),
    "VerticalFlip": partial(_flip, 0),
    "Pad": _pad,
    "Resize": _fixed_resize,
    "SmallestMaxSize": _resize_smallest_side,
    "Affine": _affine,
}
