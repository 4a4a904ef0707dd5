"""Cuts, resizes and turns of a group of images at once, in whole numbers, on any device. Knows torch, not Ray.

    boxes of images, of any sizes → one uint8 array, each at its upper left corner → each resize: rows, columns

A resize is two products of matrices. Its filter is that of torch's `interpolate(antialias=True)` and of Pillow, a
triangle or a cubic that is as wide as the scale. Its weights are multiples of 2^-11 whose sum is 1, and pixels
between two products are multiples of 2^-3: all sums are whole numbers below 2^24, which float32 holds exactly, in
any order, with TF32 or without. So the device, its threads and its settings change no bit. torch's own result in
floats differs by at most a level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from raypipe.kernel import CUBIC
from raypipe.transform.encoded_map import (
    AT,
    FILL,
    FILTER,
    KEPT,
    LENGTH,
    NUM_RESIZE,
    RESIZED,
    RESIZES,
    SIDE,
    START,
    STEP,
    TURNED,
    axis_columns,
)

_WEIGHT = 1 << 11
_BETWEEN = 1 << 3


def resize_boxes(images: Sequence[torch.Tensor], maps: np.ndarray) -> torch.Tensor:
    """Cut, resize and turn images by their maps, all at once.

    Args:
        images: the boxes that are needed of them, each uint8 (3, h, w), on one device.
        maps: int32 (n, …), see `raypipe.transform.encoded`.

    Returns:
        uint8 (n, H, W, 3).
    """
    device = images[0].device
    axes = np.stack(
        [maps[:, axis_columns(maps.shape[1], axis)] for axis in (0, 1)]
    ).astype(np.int64)
    if _are_whole(axes) and not maps[:, TURNED].any():
        return torch.stack(list(images)).permute(0, 2, 3, 1)
    lengths = axes[:, :, LENGTH]
    scale = 1
    fill = to_device(maps[0, FILL].astype(np.uint8), device).view(3, 1)
    spans = _spans(images, maps[:, TURNED] != 0, axes, fill)
    # beyond the edges is nothing then, also behind a resize
    pixels = spans.float() - fill
    for column in range(RESIZES, axes.shape[2], NUM_RESIZE):
        of_resize = axes[:, :, column : column + NUM_RESIZE]
        by_row = _weights(of_resize[0], lengths[0], pixels.shape[1], device)
        pixels = _product(by_row, pixels.flatten(2), scale).unflatten(2, (3, -1))
        by_column = _weights(of_resize[1], lengths[1], pixels.shape[3], device)
        pixels = _product(pixels.flatten(1, 2), by_column.mT, _BETWEEN).unflatten(
            1, (-1, 3)
        )
        lengths = of_resize[:, :, KEPT]
        scale = _BETWEEN
    pixels = pixels.div_(_BETWEEN).add_(0.5).floor_() + fill
    return pixels.clamp_(0, 255).to(torch.uint8).transpose(2, 3).contiguous()


def _are_whole(axes: np.ndarray) -> bool:
    """Return whether maps, by axis (2, n, …), have one resize, and leave all pixels where they are."""
    side = axes[:, :, SIDE]
    start = np.zeros_like(side)
    resize = [axes[:, :, RESIZES + FILTER], side, start, start + 1, side]
    return np.array_equal(axes, np.stack([side, start, side, *resize], axis=-1))


def _spans(
    images: Sequence[torch.Tensor],
    are_turned: np.ndarray,
    axes: np.ndarray,
    fill: torch.Tensor,
) -> torch.Tensor:
    """Put images, each at its start, into one array: uint8 (n, rows, 3, columns), with `fill` around them."""
    lengths = axes[:, :, LENGTH]
    starts = axes[:, :, START]
    firsts = np.maximum(0, -starts)
    ends = np.minimum(axes[:, :, SIDE], starts + lengths)
    counts = np.maximum(0, ends - np.maximum(0, starts))
    height, width = lengths.max(axis=1).tolist()
    shape = (len(images), height, 3, width)
    spans = torch.zeros(shape, dtype=torch.uint8, device=fill.device) + fill
    for number, image in enumerate(images):
        upright = image.transpose(1, 2) if are_turned[number] else image
        top, left = firsts[:, number].tolist()
        rows, columns = counts[:, number].tolist()
        visible = upright[:, :rows, :columns].transpose(0, 1)
        spans[number, top : top + rows, :, left : left + columns] = visible
    return spans


def _product(a: torch.Tensor, b: torch.Tensor, scale: int) -> torch.Tensor:
    """Multiply weights and pixels that are multiples of 1 / `scale`, and round to multiples of 1 / _BETWEEN."""
    return torch.bmm(a, b).mul_(_BETWEEN / (_WEIGHT * scale)).add_(0.5).floor_()


def _weights(
    of_resize: np.ndarray, lengths: np.ndarray, num: int, device: torch.device
) -> torch.Tensor:
    """The weights of `num` pixels before a resize in each pixel behind it, float32 (n, kept, num), whole numbers.

    Args:
        of_resize: int64 (n, NUM_RESIZE), see `raypipe.transform.encoded`.
        lengths: int64 (n,), how many of the pixels before it there are.
    """
    is_cubic = int(of_resize[0, FILTER]) == CUBIC
    radius = 2 if is_cubic else 1
    # at most so many pixels before the resize make one behind it
    most = radius * max(1.0, (lengths / of_resize[:, RESIZED]).max())
    num_taps = 2 * math.ceil(most) + 2
    columns = np.column_stack([lengths, of_resize[:, [RESIZED, AT, STEP]]])
    length, resized, first_position, step = (
        to_device(columns[:, :, None, None], device).double().unbind(1)
    )
    kept = torch.arange(int(of_resize[:, KEPT].max()), device=device)[:, None]
    position = first_position + step * kept
    is_inside = (position >= 0) & (position < resized)
    position = torch.where(is_inside, position, 0)
    # In halves of a pixel, times `resized`: whole numbers, so that every device has the same.
    middle = (2 * position + 1) * length
    first = torch.floor(
        middle / (2 * resized) - radius * torch.clamp_min(length / resized, 1)
    ).clamp_min_(-num_taps)
    taps = first + torch.arange(num_taps, device=device)
    distance = ((2 * taps + 1) * resized - middle).abs_()
    wide = 2 * torch.maximum(length, resized)
    if is_cubic:
        weights = _cubic(distance, wide)
    else:
        weights = (wide - distance).clamp_min_(0)
    weights = torch.where((taps >= 0) & (taps < length), weights, 0)
    weights = torch.where(is_inside, _in_whole_numbers(weights), 0)
    return _spread(weights.float(), taps.long(), num)


def _in_whole_numbers(weights: torch.Tensor) -> torch.Tensor:
    """Weights (…, taps) as whole numbers whose sum is _WEIGHT."""
    sums = weights.cumsum(2)
    sums = torch.round(sums * _WEIGHT / sums[:, :, -1:])
    return torch.diff(sums, dim=2, prepend=torch.zeros_like(sums[:, :, :1]))


def _spread(weights: torch.Tensor, taps: torch.Tensor, num: int) -> torch.Tensor:
    """Weights (n, kept, taps) at their taps, of `num` pixels: (n, kept, num); taps beyond these have no weight."""
    num_taps = weights.shape[2]
    shape = (*weights.shape[:2], num + 2 * num_taps)
    wider = torch.zeros(shape, device=weights.device)
    wider.scatter_(2, taps + num_taps, weights)
    return wider[:, :, num_taps : num_taps + num]


def _cubic(distance: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Keys's filter with a = -0.5, times 2 · one³."""
    near = 3 * distance**3 - 5 * unit * distance**2 + 2 * unit**3
    far = -(distance**3) + 5 * unit * distance**2 - 8 * unit**2 * distance + 4 * unit**3
    return torch.where(distance < unit, near, torch.where(distance < 2 * unit, far, 0))


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on a device, without waiting for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
