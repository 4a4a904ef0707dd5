"""CPU transforms by name.

    name         for                          does
    none         any                          nothing: images as they are stored
    light        training, photographs        random resized crop, flip
    heavy        training, photographs        light, then motion blur (0.2) and colour jitter
    center       validation, photographs      short side to size × 256/224, centre crop
    resize       validation, tiny images      resize, whatever the proportions
    flip-crop    training, CIFAR and alike    pad 4, random crop, flip
    small        training, tiny images        resize, then a small shift, turn and scale; no flip
    module:name                               a function of the size that makes a transform, or a transform

All of them end at size × size, except "none". They are Albumentations pipelines, imported without their
torch part: 0.7 s per process instead of 2.5 to 4 s.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from raypipe.errors import ConfigError
from raypipe.lookup import import_name

Transform = Callable[..., Any]


def build_transform(name: str, size: int) -> Transform | None:
    """Build a CPU transform, for `raypipe.transform.SampleTransform`.

    Args:
        name: see the module's table.
        size: side of the images that come out, pixels.

    Returns:
        A callable on a uint8 RGB image (H, W, 3); None for "none".

    Raises:
        ConfigError: no such preset, module or name; or what was found there makes no transform.
    """
    if size < 1:
        raise ConfigError(f"transform.size is {size}; it is at least 1 pixel")
    if name == "none":
        return None
    if ":" in name:
        return _imported(name, size)
    if name not in _PRESETS:
        known = ", ".join(["none", *_PRESETS])
        raise ConfigError(f"there is no transform preset {name!r}; known are {known}, and module:name")
    return _PRESETS[name](_albumentations(), size)


def is_preset(transform: object) -> bool:
    """Whether a transform is named here and ends at size × size."""
    return isinstance(transform, str) and transform in _PRESETS


def _albumentations() -> Any:
    # It asks the network for a newer version at import, in every actor; and the newer one is AGPL.
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    if "albumentations" in sys.modules or "torch" in sys.modules:
        return importlib.import_module("albumentations")
    # It goes on without its torch part where that cannot be imported, as without torch. The presets have no
    # use for it, and an actor starts 2 to 3 s sooner.
    sys.modules["albumentations.pytorch"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("albumentations")
    finally:
        del sys.modules["albumentations.pytorch"]


def _light(A: Any, size: int) -> Transform:
    return A.Compose([A.RandomResizedCrop((size, size)), A.HorizontalFlip(p=0.5)])


def _heavy(A: Any, size: int) -> Transform:
    return A.Compose(
        [
            A.RandomResizedCrop((size, size)),
            A.HorizontalFlip(p=0.5),
            A.MotionBlur(p=0.2),
            A.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2, hue=0.1, p=1),
        ]
    )


def _center(A: Any, size: int) -> Transform:
    # 256 to 224 is the usual validation of ImageNet; other sizes keep its proportion.
    return A.Compose([A.SmallestMaxSize(round(size * 256 / 224)), A.CenterCrop(size, size)])


def _resize(A: Any, size: int) -> Transform:
    return A.Compose([A.Resize(size, size)])


def _flip_crop(A: Any, size: int) -> Transform:
    return A.Compose([A.Pad(4), A.RandomCrop(size, size), A.HorizontalFlip(p=0.5)])


def _small(A: Any, size: int) -> Transform:
    # A tenth of the side and ten degrees: what a digit bears and stays itself.
    shake = A.Affine(
        translate_percent={"x": (-0.1, 0.1), "y": (-0.1, 0.1)}, rotate=(-10, 10), scale=(0.9, 1.1), p=1
    )
    return A.Compose([A.Resize(size, size), shake])


_PRESETS: dict[str, Callable[[Any, int], Transform]] = {
    "light": _light,
    "heavy": _heavy,
    "center": _center,
    "resize": _resize,
    "flip-crop": _flip_crop,
    "small": _small,
}


def _imported(address: str, size: int) -> Transform:
    """What `module:name` names: a transform as it stands, or what a function makes of the size."""
    found = import_name(address, "transform")
    # A class or function is called with the size; an object (a Compose, a module) is the transform itself.
    transform: Any = found(size) if isinstance(found, type) or hasattr(found, "__code__") else found
    if not callable(transform):
        what = type(transform).__name__
        raise ConfigError(
            f"transform {address!r} gives a {what}: expected is a function of the size that"
            " returns a callable, or a callable object"
        )
    return transform
