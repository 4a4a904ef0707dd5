"""CPU transforms by name; see docs/transforms.md.

    none            nothing: images as they are stored
    light … small   programs of steps, see _STEPS; with targets, and of arrays, the same steps by Albumentations
    tv-light …      pipelines of torchvision.transforms.v2, with the arguments of its training scripts, see
                    _TORCHVISION; they import torch and torchvision into each process
    steps           a list of Albumentations transforms
    module:name     a function of the size that makes a transform, or a transform
    simclr, dino    several views of an image, as is a mapping of names, see `raypipe.transform.views`

Named transforms end at size × size, except "none"; for a size of (height, width), random crops have ratios
about that of the size, as about 1 for squares.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raypipe.errors import ConfigError
from raypipe.importing import import_name, raised_at
from raypipe.kernel import program_of
from raypipe.mistakes import choices
from raypipe.transform.ending import take_ending
from raypipe.transform.sizes import Size, sides_of
from raypipe.transform.targets import IGNORE
from raypipe.transform.transform_steps import Steps, StepSettings, build_steps
from raypipe.transform.user_code import NOT_OF_A_SAMPLE
from raypipe.transform.views import (
    VIEW_PRESETS,
    PresetSteps,
    color_jitter,
    find_views,
    makes_views,
)

Transform = Callable[..., Any]


def build_transform(transform: Any, size: Size, by_library: bool = False) -> Any:
    """Build a CPU transform, for `raypipe.transform.sample_transform.SampleTransform`.

    Args:
        transform: see the module's table; for steps, see `raypipe.transform.transform_steps`.
            Other values are returned as they are.
        size: side of the images of named transforms, pixels; or (height, width).
        by_library: images are arrays, for which Albumentations makes named steps.

    Returns:
        A callable on a uint8 RGB image (H, W, 3), or a `Program`; None for "none"; for views, `View` by name, with
        these. The pipeline of `module:name` lacks its ending, see `raypipe.transform.split_endings`.

    Raises:
        ConfigError: no such preset, module or name; steps that are wrong; the name is not a transform; or a preset
            needs RGB, and images are arrays.
    """
    if min(sides_of(size)) < 1:
        raise ConfigError(f"transform.size is {size}; it is at least 1 pixel")
    needs_rgb = {*PRESETS, *VIEW_PRESETS} - {*_OF_ARRAYS}
    if by_library and isinstance(transform, str) and transform in needs_rgb:
        raise ConfigError(
            f"the preset {transform!r} needs uint8 RGB, and transform.decode is 'array': use one of "
            f"{', '.join(('none', *_OF_ARRAYS))}, steps or your own code, or decode='cpu'"
        )
    if makes_views(transform):
        if not isinstance(size, int):
            raise ConfigError(
                "views have their own sizes, which buckets cannot set: use one image, or no buckets"
            )
        views = find_views(transform, size)
        for name, view in views.items():
            try:
                built = tuple(
                    build_transform(view_transform, view.size, by_library)
                    for view_transform in view.transforms
                )
            except ConfigError as error:
                raise ConfigError(f"view {name!r}: {error}") from error
            views[name] = replace(view, transforms=built)
        return views
    if isinstance(transform, str):
        check_name(transform)
        if transform == "none":
            return None
        if ":" in transform:
            pipeline = imported(transform, size)
            return pipeline if by_library else take_ending(pipeline)[0]
        if transform in _TORCHVISION:
            return _by_torchvision(transform, size)
        transform = PresetSteps(_STEPS[transform](size))
    if isinstance(transform, PresetSteps) and not by_library:
        return program_of(transform)
    if isinstance(transform, list):
        return build_steps(transform)
    return transform


def check_name(name: str) -> None:
    """Raise ConfigError for a text that is neither a name of a transform nor `module:name`."""
    if name.lstrip().startswith(("[", "{", "-")):
        # the settings' parser left this text unparsed
        raise ConfigError(
            f"transform {name!r} is not a list of steps: write [{{NAME: {{argument: value}}}}, …]"
        )
    preset_names = ["none", *PRESETS, *VIEW_PRESETS]
    if name in preset_names or ":" in name:
        return
    raise ConfigError(
        f"no transform preset {name!r}{choices(name, preset_names)}; module:name, and a list of steps "
        "will do as well"
    )


def is_preset(transform: object) -> bool:
    """True if a transform is named here and ends at size × size."""
    return isinstance(transform, str) and transform in PRESETS


def takes_size(transform: object) -> bool:
    """True if a transform may be built for several sizes; for "module:name" only building it shows."""
    return is_preset(transform) or (isinstance(transform, str) and ":" in transform)


def _crop_ratio(size: Size) -> dict[str, tuple[float, float]]:
    """The argument of a random crop of another ratio than a square's, whose default stays."""
    height, width = sides_of(size)
    if height == width:
        return {}
    return {"ratio": (3 / 4 * width / height, 4 / 3 * width / height)}


def _smallest(size: Size) -> StepSettings:
    """The resize before a center crop: 256 to 224 is ImageNet's; other sizes keep its proportion."""
    return {
        "SmallestMaxSize": {
            "max_size_hw": tuple(round(side * 256 / 224) for side in sides_of(size))
        }
    }


def _crop_and_flip(size: Size) -> Steps:
    return [
        {"RandomResizedCrop": {"size": sides_of(size), **_crop_ratio(size)}},
        {"HorizontalFlip": {"p": 0.5}},
    ]


def _box(name: str, size: Size) -> StepSettings:
    return {name: dict(zip(("height", "width"), sides_of(size), strict=True))}


_STEPS: dict[str, Callable[[Size], Steps]] = {
    "light": _crop_and_flip,
    "heavy": lambda size: [
        *_crop_and_flip(size),
        {"MotionBlur": {"p": 0.2}},
        color_jitter((0.2, 0.2, 0.2, 0.1), 1),
    ],
    "center": lambda size: [_smallest(size), _box("CenterCrop", size)],
    "resize": lambda size: [_box("Resize", size)],
    "flip-crop": lambda size: [
        {"Pad": {"padding": 4, "fill_mask": IGNORE}},
        _box("RandomCrop", size),
        {"HorizontalFlip": {"p": 0.5}},
    ],
    # A tenth of the side and ten degrees: a digit stays readable.
    "small": lambda size: [
        _box("Resize", size),
        {
            "Affine": {
                "translate_percent": {"x": (-0.1, 0.1), "y": (-0.1, 0.1)},
                "rotate": (-10, 10),
                "scale": (0.9, 1.1),
                "p": 1,
                "fill_mask": IGNORE,
            }
        },
    ],
}
# Those that only move pixels, of whatever they consist.
_OF_ARRAYS = ("light", "center", "resize", "flip-crop", "small")
# Step after a random resized crop and a flip: a transform of the library, and its arguments.
_TORCHVISION: dict[str, tuple[str, dict[str, int]]] = {
    "tv-light": ("", {}),
    "autoaugment": ("AutoAugment", {}),
    "randaugment": ("RandAugment", {"num_ops": 2, "magnitude": 9}),
    "trivialaugment": ("TrivialAugmentWide", {}),
    "augmix": ("AugMix", {"severity": 3}),
}
PRESETS = (*_STEPS, *_TORCHVISION)


def _by_torchvision(preset: str, size: Size) -> Transform:
    v2: Any = importlib.import_module("torchvision.transforms.v2")
    steps = [v2.RandomResizedCrop(size, **_crop_ratio(size)), v2.RandomHorizontalFlip()]
    name, arguments = _TORCHVISION[preset]
    if name:  # the library's default is the nearest pixel
        steps.append(
            getattr(v2, name)(**arguments, interpolation=v2.InterpolationMode.BILINEAR)
        )
    return v2.Compose(steps)


def imported(address: str, size: Size) -> Transform:
    """Return the transform of `module:name`: the object itself, or a function's result for the size."""
    imported_object = import_name(address, "transform", trusted=True)
    # A class or function is called with the size; an object (a Compose, a module) is the transform itself.
    transform: Any = imported_object
    if isinstance(imported_object, type) or hasattr(imported_object, "__code__"):
        try:
            transform = imported_object(size)
        except NOT_OF_A_SAMPLE:
            raise
        except Exception as error:
            raise ConfigError(
                f"transform {address!r} is called with the size, {size}, and returns a transform, a function of "
                f"an image: it failed at {raised_at(error)}: {type(error).__name__}: {error}"
            ) from error
    if not callable(transform):
        kind = type(transform).__name__
        raise ConfigError(
            f"transform {address!r} gives a {kind}: it must be a callable object, or a function of the "
            "size that returns one"
        )
    return transform
