"""RandAugment and TrivialAugment in a few passes over the images. Knows torch, not Ray.

    draw_policy    the operations of a micro-batch, and the magnitude of each for each row, on the host
    apply_policy   uint8 images → what was drawn, with the flip before it, in float32

The kinds of operations and their magnitudes are Kornia's: a policy chooses its operations once per micro-batch,
for all rows. Operations of geometry that follow each other, and the flip, are one affine sampling. They differ so:

- `color` blends with grey, as Pillow's does, on which both papers built. Kornia scales the saturation of HSV.
- `auto_contrast` leaves a channel of one value as it is, as Pillow does; Kornia makes it black.
- `posterize` and `equalize` round a value to the next of 256 levels; Kornia cuts it off.

Nothing depends on what is in an image but by tensors of the device, so nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from raypipe.device.fused import grey_of, grid_units, sampled

Range = tuple[float, float]

# Operation → its range of magnitudes, of which those of geometry have a random sign: degrees, shares of the image.
_COLOURS: dict[str, Range] = {
    "solarize": (0.0, 1.0),
    "contrast": (0.1, 1.9),
    "brightness": (0.1, 1.9),
    "sharpness": (0.1, 1.9),
}
_SHARED = {"auto_contrast": (0.0, 0.0), "equalize": (0.0, 0.0), "rotate": (0.0, 30.0), **_COLOURS}
_SHEARS = {"shear_x": (0.0, 54.0), "shear_y": (0.0, 54.0)}  # Kornia takes 0.3 for 0.3 * 180 degrees
POLICIES: dict[str, dict[str, Range]] = {
    "RandAugment": _SHARED
    | _SHEARS
    | {"invert": (0.0, 0.0), "posterize": (8.0, 4.0), "solarize_add": (0.0, 0.43), "color": (0.1, 1.9)}
    | {"translate_x": (0.0, 0.1), "translate_y": (0.0, 0.1)},
    "TrivialAugment": _SHARED
    | _SHEARS
    | {"posterize": (0.0, 4.0), "translate_x": (0.0, 0.5), "translate_y": (0.0, 0.5)},
}
_GEOMETRY = {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}


@dataclass(frozen=True)
class Policy:
    """What a policy draws from.

    Attributes:
        ranges: of the magnitude of each operation.
        num: operations for each micro-batch, no two the same.
        magnitude: of all of them, in [0, 1] of their ranges; None = drawn for each row.
    """

    ranges: dict[str, Range]
    num: int = 1
    magnitude: float | None = None


@dataclass(frozen=True)
class PolicyParams:
    """What a policy does to a micro-batch: operations in their order, with an array (B,) of magnitudes of each.

    Attributes:
        steps: names and magnitudes.
        chosen: bool (B,), the rows that it does them to.
    """

    steps: list[tuple[str, np.ndarray]]
    chosen: np.ndarray


def draw_policy(policy: Policy, rng: np.random.Generator, rows: int, strength: float = 1.0) -> PolicyParams:
    """Draw the operations, and for each row the magnitudes; the strength is the share of rows, in [0, 1]."""
    names = sorted(policy.ranges)
    steps = []
    for number in rng.permutation(len(names))[: policy.num]:
        name = names[number]
        low, high = policy.ranges[name]
        share, sign = rng.random((2, rows))
        magnitude = low + (high - low) * (share if policy.magnitude is None else np.full(rows, policy.magnitude))
        steps.append((name, magnitude * np.where(sign < 0.5, -1, 1) if name in _GEOMETRY else magnitude))
    return PolicyParams(steps, rng.random(rows) < strength)


def apply_policy(image: torch.Tensor, flip: np.ndarray, params: PolicyParams) -> torch.Tensor:
    """The images with what was drawn done to them; the input is left as it is.

    Args:
        image: uint8 (B, 3, H, W), or float32 in [0, 1].
        flip: bool (B,): the rows that are turned around before all else.

    Returns:
        float32 in [0, 1], of the same size; of a flip alone as the input.
    """
    height, width = image.shape[2:]
    # A flip comes before or after any operation of colour alike, so it waits for one of geometry.
    undo, moves, stages = _undone("flip", flip.astype(float), height, width), False, list[tuple[str, np.ndarray]]()

    def move() -> None:
        if moves:
            stages.append(("sample", grid_units(undo, height, width)))

    for name, magnitude in params.steps:
        if name in _GEOMETRY:
            of_rows = np.where(params.chosen, magnitude, 0.0)
            undo, moves = undo @ _undone(name, of_rows, height, width), True
        else:
            move()
            if moves:
                undo, moves = _undone("flip", np.zeros(len(flip)), height, width), False
            stages.append((name, magnitude[:, None]))
    move()
    if not moves and (undo[:, 0, 0] < 0).any():
        stages.insert(0, ("flip", flip[:, None]))
    numbers = np.concatenate([params.chosen[:, None], *(columns for _, columns in stages)], 1).astype(np.float32)
    packed = torch.from_numpy(numbers).to(image.device, non_blocking=True)
    chosen, at = packed[:, :1, None, None] > 0, 1
    for name, columns in stages:
        given, at = packed[:, at : at + columns.shape[1]], at + columns.shape[1]
        if name == "flip":
            image = torch.where(given[..., None, None] > 0, image.flip(3), image)
        elif name == "sample":
            unit, image = _unit(image), sampled(image, given.unflatten(1, (2, 3)))
            image = image.mul_(unit) if unit < 1 else image
        else:
            done = _OPERATIONS[name](image, given[..., None, None], _unit(image))
            image = done if params.chosen.all() else torch.where(chosen, done, _affine(image, _unit(image)))
    return image


def _unit(image: torch.Tensor) -> float:
    """What a value is multiplied by to be in [0, 1]."""
    return 1.0 if image.is_floating_point() else 1 / 255


# Geometry


def _undone(name: str, magnitude: np.ndarray, height: int, width: int) -> np.ndarray:
    """From a pixel of the result to the one that it shows, about the middle of the image: (B, 3, 3)."""
    matrix = np.tile(np.eye(3), (len(magnitude), 1, 1))
    if name == "flip":
        matrix[:, 0, 0] = 1 - 2 * magnitude
    elif name == "rotate":
        turn = np.deg2rad(magnitude)
        matrix[:, 0, 0] = matrix[:, 1, 1] = np.cos(turn)
        matrix[:, 1, 0], matrix[:, 0, 1] = np.sin(turn), -np.sin(turn)
    elif name.startswith("shear"):
        row = name == "shear_y"
        matrix[:, int(row), int(not row)] = np.tan(np.deg2rad(magnitude))
    else:
        row = name == "translate_y"
        matrix[:, int(row), 2] = -magnitude * (height if row else width)
    return matrix


# Colours: (image, magnitude (B, 1, 1, 1), what makes [0, 1] of its values) → float32 in [0, 1]


def _affine(image: torch.Tensor, scale: Any, shift: Any = 0.0) -> torch.Tensor:
    """In one pass, in the order of channels_last."""
    out = torch.empty(image.shape, device=image.device, memory_format=torch.channels_last)
    scale, shift = (
        each if isinstance(each, torch.Tensor) else torch.full((), each, device=image.device)
        for each in (scale, shift)
    )
    return torch.addcmul(shift, image, scale, out=out)


def _auto_contrast(image: torch.Tensor, magnitude: torch.Tensor, unit: float) -> torch.Tensor:
    low, high = (reduce(image, (2, 3), keepdim=True).float() for reduce in (torch.amin, torch.amax))
    scale = torch.where(high > low, 1 / (high - low), unit)
    return _affine(image, scale, torch.where(high > low, -low * scale, 0.0))


def _equalize(image: torch.Tensor, magnitude: torch.Tensor, unit: float) -> torch.Tensor:
    """As Pillow's, by a table of each channel of each image."""
    rows, channels, height, width = image.shape
    levels = (image if unit < 1 else _affine(image, 255.0, 0.5)).long()
    # Pixel by pixel, as they lie in memory.
    levels = levels.permute(0, 2, 3, 1).flatten(1, 2)
    counts = torch.zeros(rows, 256, channels, device=image.device)
    counts.scatter_add_(1, levels, counts.new_ones(()).expand(levels.shape))
    numbers = torch.arange(256, device=image.device)[:, None]
    last = counts.gather(1, torch.where(counts > 0, numbers, 0).amax(1, keepdim=True))
    step = torch.floor((height * width - last) / 255)
    # Of a level, what lies below it.
    below = counts.cumsum(1) - counts
    table = torch.floor((below + torch.floor(step / 2)) / step.clamp(min=1)).clamp_(0, 255)
    table = torch.where(step > 0, torch.where(numbers > 0, table, 0.0), numbers) * (1 / 255)
    return table.gather(1, levels).unflatten(1, (height, width)).permute(0, 3, 1, 2)


def _invert(image: torch.Tensor, magnitude: torch.Tensor, unit: float) -> torch.Tensor:
    return _affine(image, -unit, 1.0)


def _posterize(image: torch.Tensor, magnitude: torch.Tensor, unit: float) -> torch.Tensor:
    """To so many bits, of which a fraction is cut off."""
    size = torch.exp2(8 - torch.floor(magnitude))
    return _affine(image, 255 * unit / size, 1e-3).floor_().mul_(size / 255)


def _solarize(image: torch.Tensor, magnitude: torch.Tensor, unit: float) -> torch.Tensor:
    """What reaches the threshold is inverted."""
    image = _affine(image, unit) if unit < 1 else image
    return torch.where(image < magnitude, image, 1 - image)


def _solarize_add(image: torch.Tensor, magnitude: torch.Tensor, unit: float) -> torch.Tensor:
    """min(x, 1 - x) of what is brighter by the magnitude."""
    return torch.rsub(_affine(image, unit, magnitude - 0.5).abs_(), 0.5).clamp_(min=0)


def _color(image: torch.Tensor, magnitude: torch.Tensor, unit: float) -> torch.Tensor:
    return _affine(image, magnitude * unit, grey_of(image).mul_((1 - magnitude) * unit)).clamp_(0, 1)


def _contrast(image: torch.Tensor, magnitude: torch.Tensor, unit: float) -> torch.Tensor:
    """As Kornia's, of values about 0."""
    return _affine(image, magnitude * unit).clamp_(0, 1)


def _brightness(image: torch.Tensor, magnitude: torch.Tensor, unit: float) -> torch.Tensor:
    return _affine(image, unit, magnitude - 1).clamp_(0, 1)


def _sharpness(image: torch.Tensor, magnitude: torch.Tensor, unit: float) -> torch.Tensor:
    """Away from the mean of the neighbourhood, in which the middle counts five times; the rim stays as it is."""
    image = _affine(image, unit)
    image[:, :, 1:-1, 1:-1].lerp_(functional.avg_pool2d(image, 3, 1), (1 - magnitude) * (9 / 13))
    return image.clamp_(0, 1)


_OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]] = {
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
    "invert": _invert,
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "color": _color,
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
}
