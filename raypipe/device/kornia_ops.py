"""Kornia's operations by name, drawn on the host and applied to whole micro-batches.

A configuration lists operations in order, each as `{op: NAME, parameter: value, …}`, where NAME is a 2D
augmentation of `kornia.augmentation` or a policy of `kornia.augmentation.auto`. A policy chooses its operations
once per micro-batch, for all of its rows, as Kornia's do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import kornia.augmentation
import kornia.augmentation.auto
import torch
from kornia.augmentation._2d.base import AugmentationBase2D
from kornia.augmentation._2d.intensity.base import IntensityAugmentationBase2D
from kornia.augmentation.auto.base import PolicyAugmentBase

from raypipe.config import AugmentConfig
from raypipe.errors import ConfigError

Operation = Callable[[torch.Tensor, float], torch.Tensor]
"""(float images (B, 3, H, W) in [0, 1], strength in [0, 1]) → the same kind, random by torch's CPU generator."""

_FLIP = {"op": "RandomHorizontalFlip", "p": 0.5}
_ERASE = {"op": "RandomErasing", "p": 0.25, "scale": [0.02, 0.2]}
PRESETS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "light": [_FLIP],
    # A fixed order leaves the hue out, the dearest of the four, and reads no drawn order on the host.
    "standard": [
        _FLIP,
        {
            "op": "ColorJitter",
            "brightness": 0.2,
            "contrast": 0.2,
            "saturation": 0.2,
            "p": 0.8,
            "order": [0, 1, 2],
        },
        _ERASE,
    ],
    "strong": [
        _FLIP,
        {"op": "RandomAffine", "degrees": 15.0, "translate": [0.1, 0.1], "scale": [0.8, 1.2], "p": 0.5},
        {"op": "ColorJitter", "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "p": 0.8},
        {"op": "RandomGrayscale", "p": 0.1},
        {"op": "RandomGaussianBlur", "kernel_size": [5, 5], "sigma": [0.1, 2.0], "p": 0.2},
        _ERASE,
    ],
    # Cubuk et al. 2020, arXiv:1909.13719: N = 2, M = 9 of 30 is their setting for ResNet-50 on ImageNet.
    "randaugment": [_FLIP, {"op": "RandAugment", "n": 2, "m": 9}],
    # Müller & Hutter 2021, arXiv:2103.10158: one operation of a random magnitude; no parameter.
    "trivialaugment": [_FLIP, {"op": "TrivialAugment"}],
}

# They make the size of the images: applied to some rows only, the rows would not fit together.
_CHANGES_SIZE = {
    "CenterCrop",
    "LongestMaxSize",
    "PadTo",
    "RandomCrop",
    "RandomResizedCrop",
    "Resize",
    "SmallestMaxSize",
}


def build_operations(config: AugmentConfig, targets: bool = False) -> list[Operation]:
    """The operations of a configuration: those of its preset, then its own.

    Args:
        targets: whether there are masks or boxes, so that pixels must stay where they are.

    Raises:
        ConfigError: an operation is not there, or refuses its parameters; or moves or erases pixels of targets.
    """
    return [_operation(dict(entry), targets) for entry in [*PRESETS[config.preset], *config.ops]]


def _operation(entry: dict[str, Any], targets: bool) -> Operation:
    shown = dict(entry)
    name = entry.pop("op")
    found: Any = getattr(kornia.augmentation, name, None) or getattr(kornia.augmentation.auto, name, None)
    if not (inspect.isclass(found) and issubclass(found, AugmentationBase2D | PolicyAugmentBase)):
        raise ConfigError(
            f"augment.ops: {name!r} is no 2D operation of kornia.augmentation or kornia.augmentation.auto "
            "(mixing has settings of its own: augment.mixup_alpha and augment.cutmix_alpha)"
        )
    # A policy has geometric operations among its own.
    if targets and (not issubclass(found, IntensityAugmentationBase2D) or name == "RandomErasing"):
        raise ConfigError(
            f"augment: {name} moves or erases pixels on the device, where masks and boxes stay as they are: use "
            "transform.train for geometry, and augment.ops for operations of colour alone"
        )
    parameters = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    try:
        module: Any = found(**parameters)  # type: ignore[arg-type]
        # What the parameters are worth is seen when they are used.
        with torch.random.fork_rng([]):
            probe = torch.full((2, 3, 32, 32), 0.5)
            result = module(probe, params=module.forward_parameters(probe.shape))
    except Exception as error:
        raise ConfigError(f"augment.ops: {shown}: {type(error).__name__}: {error}") from error
    if not isinstance(result, torch.Tensor) or result.ndim != 4 or result.shape[:2] != probe.shape[:2]:
        raise ConfigError(f"augment.ops: {shown} does not make images of images")
    return _Policy(module) if isinstance(module, PolicyAugmentBase) else _Single(module)


class _Single:
    """One operation; the strength scales its probability, unless it makes the size of the images."""

    def __init__(self, module: Any) -> None:
        self._module, self._p = module, float(module.p)
        self._scaled = type(module).__name__ not in _CHANGES_SIZE

    def __call__(self, image: torch.Tensor, strength: float) -> torch.Tensor:
        if self._scaled:
            self._module.p = self._p * strength
        # Drawn on the host: the module was never moved to the device. Kornia moves what it needs, not waiting.
        return self._module(image, params=self._module.forward_parameters(image.shape))


class _Policy:
    """A policy; the strength is the share of rows that it is applied to."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, image: torch.Tensor, strength: float) -> torch.Tensor:
        chosen = torch.rand(len(image)) < strength
        result = self._module(image, params=self._module.forward_parameters(image.shape))
        if strength >= 1:
            return result
        return torch.where(chosen.view(-1, 1, 1, 1).to(image.device, non_blocking=True), result, image)
