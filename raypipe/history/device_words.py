"""The numbers that the device augmentation drew for the images of a micro-batch, in words.

preset         drawn again, which needs only the size of the images
augment.ops    read from Kornia's modules, once the micro-batch was made again
augment.module the same, where it consists of Kornia's operations
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from raypipe.device.augment import DeviceAugment, preset_params, view_seed
from raypipe.device.fused import FusedParams
from raypipe.device.prefetcher import Batch

# The same for all images, or not about one.
_NOT_SHOWN = {
    "batch_prob",
    "center",
    "data_keys",
    "dst",
    "forward_input_shape",
    "input_size",
    "order",
    "output_size",
}
_MOST_NUMBERS = 4  # a parameter with more is not shown


def preset_words(
    augment: DeviceAugment, seed: int, shape: tuple[int, int, int], strength: float
) -> list[list[str]]:
    """Return phrases for each image of a micro-batch, for what the preset drew.

    Args:
        seed: the micro-batch's, or that of the crops of a view.
        shape: (B, H, W).
    """
    if augment.preset is None:
        return [[] for _ in range(shape[0])]
    params = preset_params(augment.preset, seed, shape, strength)
    return [list(_of_row(params, row)) for row in range(shape[0])]


def view_words(
    augment: DeviceAugment, arrived: Batch, strength: float
) -> list[list[str]]:
    """Return phrases for each sample with views, for what the preset drew for each of its crops."""
    words: list[list[str]] = [[] for _ in arrived.index]
    for name, view in arrived.views.items():
        num_crops = 1 if view.ndim == 4 else view.shape[1]
        shape = (view.shape[0], view.shape[-2], view.shape[-1])
        for number in range(num_crops):
            title = name if view.ndim == 4 else f"{name} {number}"
            seed = view_seed(name, number, arrived.seed)
            of_crop = preset_words(augment, seed, shape, strength)
            for row, phrases in enumerate(of_crop):
                if phrases:
                    words[row].append(f"{title}: {', '.join(phrases)}")
    return words


def kornia_words(augment: DeviceAugment, num_rows: int) -> list[list[str]]:
    """Return phrases for each image of the micro-batch that was augmented last, for what Kornia's modules drew."""
    words: list[list[str]] = [[] for _ in range(num_rows)]
    for operation in augment.operations:
        drawn = operation.module._params
        for row, phrases in enumerate(words):
            if operation.chosen is None or operation.chosen[row]:
                phrases += _of_params(operation.op, drawn, row)
    for name, drawn in _kept_params(augment.config.module):
        for row, phrases in enumerate(words):
            phrases += _of_params(name, drawn, row)
    return words


def draws_by_kornia(augment: DeviceAugment) -> bool:
    """Return whether Kornia's modules draw anything."""
    return bool(augment.operations) or isinstance(
        augment.config.module, torch.nn.Module
    )


def _of_row(params: FusedParams, row: int) -> Iterator[str]:
    if params.flip[row]:
        yield "flipped left to right"
    turn = params.degrees[row]
    scale = params.scale[row]
    right = params.x[row]
    down = params.y[row]
    if turn or right or down or scale != 1:
        yield (
            f"turned by {turn:.1f} degrees, scaled by {scale:.2f}, moved by {right:.1f} px to the right and "
            f"{down:.1f} px down"
        )
    if params.sigma[row]:
        yield f"blurred, sigma {params.sigma[row]:.2f} px"
    for name in ("brightness", "contrast", "saturation"):
        factor = getattr(params, name)[row]
        if factor != 1:
            yield f"{name} x {factor:.2f}"
    if params.hue[row]:
        yield f"hue {params.hue[row] * 360:+.0f} degrees"
    if params.gray[row]:
        yield "gray"
    top, bottom, left, right_edge = params.box[row].tolist()
    if bottom > top:
        yield f"a box of {bottom - top} x {right_edge - left} at ({top}, {left}) erased"


def _kept_params(module: Any) -> Iterator[tuple[str, Any]]:
    """The parameters that Kornia's operations in a module keep, by their names, in order."""
    drawn = getattr(module, "_params", None)
    if drawn and type(module).__module__.startswith("kornia."):
        # those of a container name the ones of its children
        yield type(module).__name__, drawn
        return
    if isinstance(module, torch.nn.Module):
        for child in module.children():
            yield from _kept_params(child)


def _of_params(name: str, drawn: Any, row: int) -> list[str]:
    """Return the phrase of an operation that was applied to a row, or those of a policy's operations."""
    if isinstance(drawn, list):
        return [
            phrase
            for chosen in drawn
            for phrase in _of_params(_plain(chosen.name), chosen.data, row)
        ]
    if not isinstance(drawn, Mapping) or not _is_applied(drawn, row):
        return []
    values = [
        f"{title.removesuffix('_factor').replace('_', ' ')} {_numbers(value[row])}"
        for title, value in drawn.items()
        if title not in _NOT_SHOWN and _has_number_of(value, row)
    ]
    if "src" in drawn:
        values.insert(0, _crop(drawn["src"][row]))
    return [": ".join(filter(None, [name, ", ".join(values)]))]


def _is_applied(drawn: Mapping[str, Any], row: int) -> bool:
    probability = drawn.get("batch_prob")
    if not isinstance(probability, torch.Tensor):
        return False
    # one for all rows, or one for each
    of_row = row if len(probability) > 1 else 0
    return row < len(probability) and bool(probability[of_row] > 0.5)


def _has_number_of(value: Any, row: int) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.ndim > 0
        and row < len(value)
        and 0 < value[row].numel() <= _MOST_NUMBERS
    )


def _numbers(value: torch.Tensor) -> str:
    return " ".join(f"{number:.3g}" for number in value.flatten().tolist())


def _crop(corners: torch.Tensor) -> str:
    """A crop by its corners (4, 2), x and y, the last pixels included."""
    left, top = corners[0].tolist()
    right, bottom = corners[2].tolist()
    return f"crop {bottom - top + 1:.0f} x {right - left + 1:.0f} at ({top:.0f}, {left:.0f})"


def _plain(name: str) -> str:
    """The name of an operation in a container, without the number that follows it there."""
    title, _, number = name.rpartition("_")
    return title if number.isdecimal() else name
