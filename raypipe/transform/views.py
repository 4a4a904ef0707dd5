"""Several views of one image, for contrastive training and the like: their settings.

    {global: {transform: light, count: 2, size: 224}, local: {transform: light, count: 8, size: 96}}

    count   a sample's view        key of its crop i
    1       uint8 (H, W, 3)        hash of the sample's key, the view's name, 0
    n       uint8 (n, H, W, 3)     hash of the sample's key, the view's name, i

The image is decoded once. In Python a view may also be `(transform, count)`, or only a transform. A view whose
crops differ has `transforms`, one for each. A function of an image may also return `{name: array}`; it gets the
sample's key, and draws all of its views from one generator.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.config import Crops, Side
from raypipe.errors import ConfigError
from raypipe.plan.order import Domain
from raypipe.section import check
from raypipe.transform.transform_steps import Steps, StepSettings

_NAME = re.compile(r"[\w-]+")
_KNOWN = ("transform", "transforms", "count", "size")
_GIVEN = ({"transform"}, {"transform", "count"}, {"transforms"})


@dataclass(frozen=True)
class View:
    """Settings of a view.

    Attributes:
        transforms: one for all crops, or one for each.
        count: number of crops.
        size: side of the crops that presets make, pixels.
    """

    transforms: tuple[Any, ...]
    count: int
    size: int


class PresetSteps(list[StepSettings]):
    """Steps of a raypipe preset, whose values need no check."""


def _crop(size: int, scale: list[float]) -> StepSettings:
    cubic = 2  # OpenCV's number of it, as DINO's code has it
    return {
        "RandomResizedCrop": {
            "size": [size, size],
            "scale": scale,
            "interpolation": cubic,
        }
    }


def color_jitter(strengths: Sequence[float], p: float) -> StepSettings:
    """A ColorJitter by how far its factors go from 1, and by how far the hue turns."""
    *factors, hue = strengths
    names = ("brightness", "contrast", "saturation")
    limits = {
        name: (1 - factor, 1 + factor)
        for name, factor in zip(names, factors, strict=True)
    }
    return {"ColorJitter": {**limits, "hue": (-hue, hue), "p": p}}


def _colors(*strengths: float) -> Steps:
    """A flip, and the distortion of colors: jitter in 8 of 10, gray in 2 of 10."""
    return [
        {"HorizontalFlip": {"p": 0.5}},
        color_jitter(strengths, 0.8),
        {"ToGray": {"p": 0.2}},
    ]


def _blur(p: float) -> StepSettings:
    return {"GaussianBlur": {"sigma_limit": [0.1, 2.0], "p": p}}


def _simclr(size: int) -> dict[str, Any]:
    """Chen et al. 2020, arXiv:2002.05709, appendix A, with colors of strength 1."""
    steps = PresetSteps(
        [_crop(size, [0.08, 1.0]), *_colors(0.8, 0.8, 0.8, 0.2), _blur(0.5)]
    )
    return {"pair": {"transform": steps, "count": 2, "size": size}}


def _dino(size: int) -> dict[str, Any]:
    """Caron et al. 2021, arXiv:2104.14294, with the numbers of its code: 8 local crops of 96 and 2 of 224."""
    small = max(1, round(size * 96 / 224))
    colors = _colors(0.4, 0.4, 0.2, 0.1)
    first = PresetSteps([_crop(size, [0.4, 1.0]), *colors, _blur(1.0)])
    second = PresetSteps(
        [_crop(size, [0.4, 1.0]), *colors, _blur(0.1), {"Solarize": {"p": 0.2}}]
    )
    local = PresetSteps([_crop(small, [0.05, 0.4]), *colors, _blur(0.5)])
    return {
        "global": {"transforms": [first, second], "size": size},
        "local": {"transform": local, "count": 8, "size": small},
    }


VIEW_PRESETS: dict[str, Callable[[int], dict[str, Any]]] = {
    "simclr": _simclr,
    "dino": _dino,
}


def makes_views(transform: object) -> bool:
    """True if a transform is a mapping or a preset of views; a function shows it only by its result."""
    return isinstance(transform, Mapping) or (
        isinstance(transform, str) and transform in VIEW_PRESETS
    )


def find_views(transform: Any, size: int) -> dict[str, View]:
    """Return the views of `transform.train` or `transform.val`, by name; see `makes_views`.

    Args:
        size: default size of views.

    Raises:
        ConfigError: a name, a count or a key is wrong.
    """
    given = VIEW_PRESETS[transform](size) if isinstance(transform, str) else transform
    if not given:
        raise ConfigError(
            "transform is a mapping without views: write {NAME: {transform: …, count: …}, …}"
        )
    return {name: _view(name, entry, size) for name, entry in given.items()}


def _view(name: object, entry: Any, size: int) -> View:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"transform: {name!r} is not a valid name of a view: use letters, digits, _ and -"
        )
    if isinstance(entry, View):
        return entry
    where = f"transform, view {name!r}"
    if isinstance(entry, tuple) and len(entry) == 2:
        entry = {"transform": entry[0], "count": entry[1]}
    if not isinstance(entry, Mapping):
        entry = {"transform": entry}
    if unknown := [key for key in entry if key not in _KNOWN]:
        raise ConfigError(
            f"{where}: there is no {unknown[0]!r}; choose from {', '.join(_KNOWN)}. (Steps of a pipeline "
            "are a list, [{NAME: {argument: value}}, …].)"
        )
    count = check(f"{where}: count", entry.get("count", 1), Crops)
    size = check(f"{where}: size", entry.get("size", size), Side)
    if {*entry} - {"size"} not in _GIVEN:
        raise ConfigError(
            f"{where}: it needs a transform, with a count or without, or else transforms"
        )
    transforms = entry.get("transforms", [entry.get("transform")])
    if not isinstance(transforms, list | tuple) or not transforms:
        raise ConfigError(
            f"{where}: transforms must be a list of them, one for each crop, got {transforms!r}"
        )
    if any(map(makes_views, transforms)):
        raise ConfigError(
            f"{where}: its transform makes views itself, and a view is one image"
        )
    return View(tuple(transforms), max(count, len(transforms)), size)


@functools.lru_cache
def view_key(
    name: str, number: int, domain: Domain = Domain.VIEW, *more: int
) -> np.ndarray:
    """Two words, uint64 (2,), that no other crop of a view has; with more parts, of those as well."""
    text = name.encode()
    words = (domain, len(text), int.from_bytes(text, "little"), number, *more)
    return np.random.SeedSequence(words).generate_state(2, np.uint64)
