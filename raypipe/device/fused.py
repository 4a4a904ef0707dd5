"""The presets' operations in a few passes over the images, instead of several for each. Knows torch, not Ray.

    draw_params  what a micro-batch does, row by row, on the host
    pack         → one small float32 array (B, COLUMNS), the only thing that is sent to the device
    apply        uint8 images → flip, or one affine sampling of all geometry → blur → one map of color → erase

The operations follow those of Kornia, with their own generator. The differences:

- Brightness, contrast, saturation, hue and gray are one affine map of color: what one of them would cut off at 0
  or 1 is cut off once, at the end. Contrast's mean of gray is that of the image as it was before the colors.
- Hue turns the color about the axis of grays in YIQ, as NVIDIA's DALI does. Kornia's HSV is not affine.
- A blur comes before the color, with which it commutes, and is the same for both axes.
- The ratio of an erased box's sides is drawn evenly in its logarithm.

No operation depends on an image's content, so nothing waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

# ITU-R BT.601, as in Kornia; the other two rows of YIQ are those of the FCC's NTSC.
_RED = 0.299
_GREEN = 0.587
_BLUE = 0.114
GRAY = np.array([_RED, _GREEN, _BLUE])
_YIQ = np.array([GRAY, [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
_RGB = np.linalg.inv(_YIQ)

# Columns of the packed array. Distances are in pixels from the middle of the image.
_FLIP = 0
_SAMPLE = slice(1, 7)
_COLOR = slice(7, 16)
_MEAN = slice(16, 19)
_BLUR = slice(19, 24)
_ERASE = slice(24, 28)
_BLEND = slice(7, 9)
_MEAN_GRAY = 9  # replace the matrix if there is no hue
COLUMNS = 28

Interval = tuple[float, float]


@dataclass(frozen=True)
class Fused:
    """Settings of the fused operations; a probability of 0 = never.

    Attributes:
        flip, affine, jitter, gray, blur, erase: probabilities, of each row.
        degrees, translate, scale: affine map: largest turn; largest shifts as shares of the image, in x and y;
            range of scales.
        brightness, contrast, saturation: ranges of factors.
        hue: the range, in turns.
        sigma: the range of the blur's standard deviation, pixels.
        area, ratio: ranges of the box that is erased: its share of the image, and height to width.
    """

    flip: float = 0.0
    affine: float = 0.0
    degrees: float = 0.0
    translate: tuple[float, float] = (0.0, 0.0)
    scale: Interval = (1.0, 1.0)
    jitter: float = 0.0
    brightness: Interval = (1.0, 1.0)
    contrast: Interval = (1.0, 1.0)
    saturation: Interval = (1.0, 1.0)
    hue: Interval = (0.0, 0.0)
    gray: float = 0.0
    blur: float = 0.0
    sigma: Interval = (1.0, 1.0)
    erase: float = 0.0
    area: Interval = (0.02, 0.33)
    ratio: Interval = (0.3, 3.3)

    @property
    def turns_hue(self) -> bool:
        """Else a color is blended with its gray, which takes fewer passes than a matrix."""
        return self.hue != (0.0, 0.0)

    @property
    def changes_color(self) -> bool:
        return self.jitter > 0 or self.gray > 0 or self.erase > 0


PRESETS: dict[str, Fused | None] = {
    "none": None,
    "light": Fused(flip=0.5),
    # Without the hue, the dearest of the four.
    "standard": Fused(
        flip=0.5,
        jitter=0.8,
        brightness=(0.8, 1.2),
        contrast=(0.8, 1.2),
        saturation=(0.8, 1.2),
        erase=0.25,
        area=(0.02, 0.2),
    ),
    "strong": Fused(
        flip=0.5,
        affine=0.5,
        degrees=15.0,
        translate=(0.1, 0.1),
        scale=(0.8, 1.2),
        jitter=0.8,
        brightness=(0.6, 1.4),
        contrast=(0.6, 1.4),
        saturation=(0.6, 1.4),
        hue=(-0.1, 0.1),
        gray=0.1,
        blur=0.2,
        sigma=(0.1, 2.0),
        erase=0.25,
        area=(0.02, 0.2),
    ),
}
"""By the name in `AugmentConfig.preset`."""


@dataclass
class FusedParams:
    """Draws for a micro-batch: an array (B,) for each parameter, neutral in rows without the operation.

    Attributes:
        flip: bool.
        degrees, x, y, scale: affine map: turn, shift in pixels and scale.
        brightness, contrast, saturation: factors.
        hue: turns.
        gray: bool.
        sigma: the blur's standard deviation; 0 = none.
        box: int (B, 4): top, bottom, left and right of the erased box; empty = none.
    """

    flip: np.ndarray
    degrees: np.ndarray
    x: np.ndarray
    y: np.ndarray
    scale: np.ndarray
    brightness: np.ndarray
    contrast: np.ndarray
    saturation: np.ndarray
    hue: np.ndarray
    gray: np.ndarray
    sigma: np.ndarray
    box: np.ndarray


def draw_params(
    fused: Fused,
    rng: np.random.Generator,
    rows: int,
    height: int,
    width: int,
    strength: float = 1.0,
) -> FusedParams:
    """Draw the parameters of a micro-batch.

    Args:
        rng: the micro-batch's own generator. A row's draws do not depend on what is fused.
        rows, height, width: B, and the size of the images in pixels.
        strength: scales all probabilities, in [0, 1].
    """
    shares = rng.random((19, rows))
    chances = np.array(
        [fused.flip, fused.affine, fused.jitter, fused.gray, fused.blur, fused.erase]
    )
    flip, affine, jitter, gray, blur, erase = shares[:6] < strength * chances[:, None]
    x_most = fused.translate[0] * width
    y_most = fused.translate[1] * height
    of_affine = [
        (-fused.degrees, fused.degrees),
        (-x_most, x_most),
        (-y_most, y_most),
        fused.scale,
    ]
    of_jitter = [fused.brightness, fused.contrast, fused.saturation, fused.hue]
    low, high = np.array([*of_affine, *of_jitter, fused.sigma]).T[:, :, None]
    happens = [affine] * len(of_affine) + [jitter] * len(of_jitter) + [blur]
    neutral = np.array([0.0, 0, 0, 1, 1, 1, 1, 0, 0])[:, None]
    drawn = np.where(happens, _between(low, high, shares[6:15]), neutral)
    box = _draw_boxes(fused, erase, shares[15:], height, width)
    degrees, x, y, scale, light, contrast, saturation, hue, sigma = drawn
    of_color = (light, contrast, saturation, hue)
    return FusedParams(flip, degrees, x, y, scale, *of_color, gray, sigma, box)


def _between(low: Any, high: Any, share: np.ndarray) -> np.ndarray:
    """Return numbers at shares, in [0, 1), of the way from low to high."""
    return low + (high - low) * share


def _draw_boxes(
    fused: Fused, erase: np.ndarray, shares: np.ndarray, height: int, width: int
) -> np.ndarray:
    """Draw the box that is erased of each row, see `FusedParams`.

    Args:
        erase: bool (B,), the rows with a box.
        shares: the box's area, ratio, top and left, as numbers in [0, 1), (4, B).
    """
    area = height * width * _between(*fused.area, shares[0])
    low, high = map(math.log, fused.ratio)
    ratio = np.exp(_between(low, high, shares[1]))
    box_height = np.clip(np.rint(np.sqrt(area * ratio)), 1, height)
    box_width = np.clip(np.rint(np.sqrt(area / ratio)), 1, width)
    top = np.floor(shares[2] * (height - box_height + 1))
    left = np.floor(shares[3] * (width - box_width + 1))
    box = np.where(erase, [top, top + box_height, left, left + box_width], 0.0)
    return box.T.astype(np.int64)


def pack(fused: Fused, params: FusedParams, height: int, width: int) -> np.ndarray:
    """Pack the draws for images of a size, as `apply` needs them: float32 (B, COLUMNS)."""
    packed = np.zeros((len(params.flip), COLUMNS), np.float32)
    packed[:, _FLIP] = params.flip
    if fused.affine:
        packed[:, _SAMPLE] = _maps(params, height, width)
    if fused.blur:
        weights = np.exp(
            -0.5 * (np.arange(-2, 3) / np.maximum(params.sigma, 1e-6)[:, None]) ** 2
        )
        packed[:, _BLUR] = weights / weights.sum(1, keepdims=True)
    if fused.changes_color:
        # What contrast adds is a gray, which neither saturation nor hue changes.
        by_mean = (1 - params.contrast) * params.brightness / 255
        if fused.turns_hue:
            packed[:, _COLOR] = _colors(params)
            packed[:, _MEAN] = by_mean[:, None] * GRAY
        else:
            # the shares of a row's color and of its gray, from [0, 255] to [0, 1]
            saturation = np.where(params.gray, 0.0, params.saturation)
            shares = np.stack([saturation, 1 - saturation], 1)
            lights = params.brightness * params.contrast / 255
            packed[:, _BLEND] = shares * lights[:, None]
            packed[:, _MEAN_GRAY] = by_mean
        packed[:, _ERASE] = params.box
    return packed


def _maps(params: FusedParams, height: int, width: int) -> np.ndarray:
    """Return affine maps (B, 6) from the result to the source: shift, turn and scale undone, then the flip."""
    turn = np.deg2rad(params.degrees)
    cos = np.cos(turn) / params.scale
    sin = np.sin(turn) / params.scale
    undo = np.array([[cos, -sin], [sin, cos]])  # (2, 2, B)
    undo = np.concatenate(
        [undo, -(undo * np.array([params.x, params.y])).sum(1, keepdims=True)], 1
    )
    undo[0] *= np.where(params.flip, -1, 1)
    # `_sampled` counts half the image's sides as 1
    maps = np.moveaxis(undo, 2, 0) * (2 / np.array([width, height]))[:, None]
    return maps.reshape(len(maps), 6)


def _colors(params: FusedParams) -> np.ndarray:
    """The matrix of each row, from [0, 255] to [0, 1], column by column; (B, 9)."""
    to_gray = np.broadcast_to(GRAY, (3, 3))
    turn = -2 * np.pi * params.hue  # from red to yellow, as in HSV
    zeros = np.zeros_like(turn)
    ones = np.ones_like(turn)
    cos = np.cos(turn)
    sin = np.sin(turn)
    about_gray = np.array([[ones, zeros, zeros], [zeros, cos, -sin], [zeros, sin, cos]])
    saturation = params.saturation[:, None, None]
    color = (
        _RGB
        @ np.moveaxis(about_gray, 2, 0)
        @ _YIQ
        @ (saturation * np.eye(3) + (1 - saturation) * to_gray)
    )
    color = np.where(params.gray[:, None, None], to_gray, color)
    color = color * (params.brightness * params.contrast / 255)[:, None, None]
    return np.swapaxes(color, 1, 2).reshape(-1, 9)


def apply(fused: Fused, image: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Apply the drawn operations; the input is not changed.

    Args:
        image: uint8 (B, 3, H, W), or float32 in [0, 1], which without colors may have any channels.
        packed: float32 (B, COLUMNS), from `pack`, on the same device.

    Returns:
        Images of the same size: in the input's dtype after only a flip, else float32 in [0, 1].
    """
    in_255 = not image.is_floating_point()
    if fused.changes_color and not in_255:
        image, in_255 = image * 255, True
    if fused.affine:
        image = _sampled(image, packed[:, _SAMPLE].unflatten(1, (2, 3)))
    elif fused.flip:
        image = torch.where(
            packed[:, _FLIP].view(-1, 1, 1, 1) > 0, image.flip(3), image
        )
    if fused.blur:
        image = _blurred(image.float(), packed[:, _BLUR])
    if fused.changes_color:
        return _erased(
            (_turned if fused.turns_hue else _blended)(image, packed), packed
        )
    if in_255 and image.is_floating_point():
        return image * (1 / 255)
    return image


def _sampled(image: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Sample each row through its affine map of places about the middle, float32 (B, 2, 3); outside pixels are
    0."""
    _, _, height, width = image.shape
    x, y = (
        torch.arange((1 - n) / 2, n / 2, device=image.device, dtype=torch.float32)
        for n in (width, height)
    )
    across = x[:, None] * maps[:, None, None, :, 0]
    along = torch.addcmul(
        maps[:, None, None, :, 2], y[:, None, None], maps[:, None, None, :, 1]
    )
    return functional.grid_sample(
        image.float(), across + along, padding_mode="zeros", align_corners=False
    )


def _blurred(image: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Blur each row by its own five weights, along both axes; float32 (B, C, H, W), and (B, 5)."""
    shape = rows, channels, height, width = image.shape
    flat = image.reshape(1, rows * channels, height, width)
    of_channel = weights.repeat_interleave(channels, 0)
    kernels = of_channel[:, None, :, None], of_channel[:, None, None]
    for padding, kernel in zip(((0, 0, 2, 2), (2, 2, 0, 0)), kernels, strict=True):
        padded = functional.pad(flat, padding, mode="reflect")
        flat = functional.conv2d(padded, kernel, groups=rows * channels)
    return flat.view(shape)


def _turned(image: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Map the colors of each row by its own matrix, without a limit to their range."""
    means = image.mean((2, 3), dtype=torch.float32)
    offset = (means * packed[:, _MEAN]).sum(1).view(-1, 1, 1, 1)
    color = packed[:, _COLOR].unflatten(1, (3, 3))[..., None, None]
    out = addcmul(offset, image[:, 0:1], color[:, 0])
    # Channel by channel: as a product of matrices it might be taken in TF32, of ten bits.
    return out.addcmul_(image[:, 1:2], color[:, 1]).addcmul_(image[:, 2:3], color[:, 2])


def _blended(image: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Apply the color map without hue: shares of the image, of its gray, and of the mean gray."""
    gray = (
        (image[:, 0:1] * _RED)
        .add_(image[:, 1:2], alpha=_GREEN)
        .add_(image[:, 2:3], alpha=_BLUE)
    )
    offset = gray.mean((2, 3), keepdim=True) * packed[:, _MEAN_GRAY].view(-1, 1, 1, 1)
    of_color, of_gray = packed[:, _BLEND, None, None, None].unbind(1)
    return addcmul(torch.addcmul(offset, gray, of_gray), image, of_color)


def addcmul(
    offset: torch.Tensor,
    image: torch.Tensor,
    factor: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """offset + image · factor of images, in one kernel: (B, C, H, W), channels_last, computed in float32."""
    if torch.is_grad_enabled() and image.requires_grad:
        # torch takes no gradient through `out`
        return (
            torch.addcmul(offset, image, factor)
            .to(dtype)
            .contiguous(memory_format=torch.channels_last)
        )
    # torch's own imports a computer algebra system for shapes of symbols
    shape = np.broadcast_shapes(offset.shape, image.shape, factor.shape)
    out = torch.empty(
        shape, dtype=dtype, device=image.device, memory_format=torch.channels_last
    )
    return torch.addcmul(offset, image, factor, out=out)


def _erased(out: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Limit the values in place, to [0, 1], and to 0 in the box that is erased."""
    height, width = out.shape[2:]
    places = torch.arange(max(height, width), device=out.device)
    box = packed[:, _ERASE].unflatten(1, (2, 2, 1))
    inside = (places >= box[:, :, 0]) & (places < box[:, :, 1])
    rows = inside[:, 0, :height]
    columns = inside[:, 1, :width]
    kept = (~(rows[:, None, :, None] & columns[:, None, None, :])).float()
    return out.clamp_(kept.new_zeros(()), kept)
