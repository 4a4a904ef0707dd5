"""Checks a user's module against the targets of a stream, before the first micro-batch. Knows torch, not Ray.

operation                          needs
geometry, erasing, with targets    an AugmentationSequential whose data_keys name all of the stream's targets;
                                   torchvision's are refused
MixUp, CutMix, PatchMix            a separate step; no mask, boxes or keypoints
RandomMosaic                       boxes in data_keys, or a stream without any target
RandomJigsaw                       no mask, boxes or keypoints
RandomTransplantation              a mask in data_keys
clips (VideoSequential, 3D)        refused: a stream has images
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from raypipe.device.kornia_targets import KEY_OF_TARGET, TARGET_OF_KEY
from raypipe.errors import ConfigError
from raypipe.importing import is_of
from raypipe.transform.fields import LABEL
from raypipe.transform.pipelines import leaves

_MIXES_LABELS = ("RandomMixUpV2", "RandomCutMixV2", "PatchMix")
# Targets that operations without a matrix move with the image; Kornia leaves the others behind.
_MOVED: Mapping[str, tuple[str, ...]] = {
    "RandomElasticTransform": ("mask",),
    "RandomThinPlateSpline": (),
    "RandomFisheye": (),
    "RandomJigsaw": (),
    "RandomMosaic": ("boxes",),
}


# Modules of torchvision's steps that move pixels, alone or among others.
_TORCHVISION_MOVES = (
    "torchvision.transforms.v2._geometry",
    "torchvision.transforms.v2._auto_augment",
)


def kornia_class(module: Any, *names: str) -> bool:
    """Return whether a module is an instance of one of these classes of Kornia's, which need not be imported."""
    return is_of(module, "kornia.augmentation", *names)


def mixes_labels(module: Any) -> bool:
    """Return whether a module mixes images of which each has one target."""
    return kornia_class(module, *_MIXES_LABELS)


def check_steps(
    module: Any, steps: Collection[Any], targets: Collection[str], has_label: bool
) -> None:
    """Raise ConfigError if a module would leave a target behind, or needs one that the stream has not.

    Args:
        module: the module; `steps`: the children that are called one by one, or itself.
        targets: names of the mask, boxes and keypoints of the stream.
        has_label: whether batches have a target.
    """
    for child in module.modules() if isinstance(module, nn.Module) else ():
        if kornia_class(child, "VideoSequential", "AugmentationBase3D"):
            raise ConfigError(
                f"augment.module has {_name(child)}, which takes clips (B, C, T, H, W), and a stream has images: "
                "use nn.Sequential, K.ImageSequential or K.AugmentationSequential"
            )
    if sum(map(mixes_labels, steps)) > 1:
        raise ConfigError(
            "augment.module mixes twice: keep one of MixUp, CutMix and PatchMix, or set augment.mixup_alpha "
            "and augment.cutmix_alpha"
        )
    for step in steps:
        if mixes_labels(step):
            if targets:
                raise ConfigError(
                    f"augment.module: {_name(step)} mixes images, not masks and the like: leave it out"
                )
            if getattr(getattr(step, "_param_generator", None), "num_mix", 1) != 1:
                raise ConfigError(
                    f"augment.module: {_name(step)} mixes more than two targets: set num_mix=1"
                )
        elif kornia_class(step, "AugmentationSequential"):
            _check_keys(step, targets, has_label)
        elif isinstance(step, nn.Module):
            _check_inner(step, [], targets, has_label)


def _check_keys(step: Any, targets: Collection[str], has_label: bool) -> None:
    """Check an `AugmentationSequential`."""
    if step.data_keys is None:
        keys = [name for name in targets if name in KEY_OF_TARGET]
    else:
        names = [key.name for key in step.data_keys]
        keys = [TARGET_OF_KEY[name] for name in names if name in TARGET_OF_KEY]
        if len(set(keys)) < len(names) - 1:
            raise ConfigError(f"augment.module: data_keys {names} name a target twice")
    for name in keys:
        if name not in targets and not (name == LABEL and has_label):
            raise ConfigError(
                f"augment.module: data_keys name {KEY_OF_TARGET[name]!r}, and batches have none: set "
                f"{'store.target_column' if name == LABEL else f'transform.targets.{name}'}, or leave the key out"
            )
    _check_inner(step, keys, targets, has_label)


def _check_inner(
    step: nn.Module, keys: Collection[str], targets: Collection[str], has_label: bool
) -> None:
    """Check the operations in a step that gets the image and the targets of some keys."""
    behind = [name for name in targets if name not in keys]
    for child in leaves(step) if behind else ():
        is_of_geometry = type(child).__module__ in _TORCHVISION_MOVES
        if is_of_geometry or is_of(child, "torchvision.transforms.v2", "RandomErasing"):
            raise _left_behind(f"torchvision's {_name(child)}", behind, targets)
    for child in step.modules():
        if not kornia_class(child, "AugmentationBase2D", "MixAugmentationBaseV2"):
            continue
        if mixes_labels(child):
            raise ConfigError(
                f"augment.module: {_name(child)} changes targets: make it a separate step, as nn.Sequential(…, "
                f"K.{_name(child)}(…))"
            )
        if behind and moves_pixels(child):
            raise _left_behind(_name(child), behind, targets)
        _check_operation(child, keys, has_label)


def _left_behind(
    name: str, behind: Sequence[str], targets: Collection[str]
) -> ConfigError:
    """Return the error of an operation that moves the image without these targets."""
    for target in targets:
        if target not in KEY_OF_TARGET:
            return ConfigError(
                f"augment.module moves pixels, and Kornia moves no {target}: leave it out, or move images in "
                "transform.train"
            )
    keys = ["input", *(KEY_OF_TARGET[target] for target in targets)]
    return ConfigError(
        f"augment.module: {name} moves or erases pixels, and leaves {behind[0]!r} behind: move both in "
        f"transform.train, or by Kornia's in K.AugmentationSequential(…, data_keys={keys})"
    )


def _check_operation(operation: Any, keys: Collection[str], has_label: bool) -> None:
    """Check an operation that gets the image and these targets."""
    targets = [key for key in keys if key != LABEL]
    for name, moved in _MOVED.items():
        behind = [target for target in targets if target not in moved]
        if behind and kornia_class(operation, name):
            raise ConfigError(
                f"augment.module: Kornia's {name} moves no {behind[0]}: leave it out, or move images in "
                "transform.train"
            )
    if kornia_class(operation, "RandomMosaic") and has_label and "boxes" not in targets:
        raise ConfigError(
            "augment.module: RandomMosaic makes an image of several, which have several targets: it needs boxes "
            "(transform.targets.boxes, and 'bbox_xyxy' in data_keys), or a stream without a target "
            "(target_column=None)"
        )
    if kornia_class(operation, "RandomTransplantation") and "mask" not in targets:
        raise ConfigError(
            "augment.module: RandomTransplantation needs a mask: set transform.targets.mask, and put it into "
            "K.AugmentationSequential(…, data_keys=['input', 'mask'])"
        )


def moves_pixels(operation: Any) -> bool:
    """Return whether an operation of Kornia's moves or erases pixels."""
    is_of_color = kornia_class(operation, "IntensityAugmentationBase2D")
    return not is_of_color or _name(operation) == "RandomErasing"


def _name(module: Any) -> str:
    return type(module).__name__
