"""Last steps of a pipeline that make floats: dtype and normalization, which the training device does instead.

    A.Normalize, A.ToFloat, ToTensorV2
    ToImage, ToDtype, Normalize, ToPureTensor, RGB of torchvision v2
    ToTensor, PILToTensor, ConvertImageDtype, Normalize of torchvision

A pipeline without them makes uint8, a quarter of the bytes, and may be a program. On pixels x in [0, 1] they are
(x - mean) / std. Where another step follows one of them, the library does it all, and the floats travel.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raypipe.config import AugmentConfig
from raypipe.errors import ConfigError

_LAYOUT = {"ToTensorV2", "ToImage", "ToPureTensor", "PILToTensor", "RGB"}
"""Steps that change neither the values nor the dtype of an RGB image."""
_CONVERTS = {"ToTensor", "ToDtype", "ConvertImageDtype"}
_OF_ALBUMENTATIONS = {"Normalize", "ToFloat", "ToTensorV2"}
_OF_TORCHVISION = {*_LAYOUT, *_CONVERTS, "Normalize"} - {"ToTensorV2"}
_MAX = 255


@dataclass(frozen=True)
class Ending:
    """Dtype and normalization of a split's images.

    Attributes:
        steps: names of the pipeline's steps, for messages.
        dtype: torch's name of the images' dtype.
        mean, std: of each channel: images are (x - mean) / std, of pixels x in [0, 1].
        normalizes: whether a Normalize is among the steps.
        on_device: whether the device does it. Otherwise the library makes the floats.
        because: why the library makes them.
        is_own: whether the split's own pipeline has these steps. Otherwise they are the other split's, for its
            uint8 images.
    """

    steps: str
    dtype: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    normalizes: bool
    on_device: bool = True
    because: str = ""
    is_own: bool = True

    @property
    def described(self) -> str:
        """The dtype and numbers, for messages and fingerprints."""
        return f"{self.dtype}, mean {_text(self.mean)}, std {_text(self.std)}"


def take_ending(pipeline: Any) -> tuple[Any, Ending | None]:
    """Split a pipeline into the steps that make uint8, and its ending.

    Args:
        pipeline: what `build_transform` gives, of a split with uint8 RGB images.

    Returns:
        The pipeline without these steps; None if no step is left. And None where it has none that changes values.

    Raises:
        ConfigError: Normalize has a wrong number of channels, or gets uint8 images.
    """
    without_ending, steps = _split(pipeline)
    leaves = list(_leaves(pipeline))
    if any(type(step).__name__ == "FromFloat" for step in leaves):
        return pipeline, None  # its floats become bytes again
    middle = next(
        (
            number
            for number, step in enumerate(leaves[: -len(steps) or None])
            if _makes_floats(step)
        ),
        -1,
    )
    if middle >= 0:
        return pipeline, _by_library(leaves, middle)
    if not steps:
        return pipeline, None
    folded = _folded(steps)
    if folded is None:
        if all(_package(step) and type(step).__name__ != "Lambda" for step in leaves):
            raise ConfigError(
                "torchvision's Normalize needs float images, and these are uint8: write "
                "v2.ToDtype(torch.float32, scale=True) before it"
            )
        return pipeline, None  # a step of the user's may make floats
    return without_ending, folded if folded.dtype != "uint8" else None


def normalization(
    augment: AugmentConfig | None, ending: Ending | None, split: str = "train"
) -> AugmentConfig | None:
    """The augmentation with the mean and std that hold: those of a Normalize in the pipeline come before its own.

    Returns:
        None: images stay as they come.

    Raises:
        ConfigError: both name a normalization, and these differ; or device operations would get normalized images.
    """
    if ending is None or (augment is not None and not ending.normalizes):
        return augment
    if augment is None:
        if ending.on_device:
            return AugmentConfig(mean=ending.mean, std=ending.std)
        return None
    of_pipeline = AugmentConfig(mean=ending.mean, std=ending.std)
    numbers = augment.mean, augment.std
    if numbers not in (
        (AugmentConfig.mean, AugmentConfig.std),
        (of_pipeline.mean, of_pipeline.std),
    ):
        raise ConfigError(
            f"transform.{split} ends with {ending.steps} (mean {_text(ending.mean)}, std {_text(ending.std)}), "
            f"and augment.mean is {_text(augment.mean)}, augment.std {_text(augment.std)}: images are normalized "
            "once, so leave one of them out"
        )
    if ending.on_device:
        return replace(augment, mean=of_pipeline.mean, std=of_pipeline.std)
    if augment.preset != "none" or augment.ops or augment.module:
        raise ConfigError(
            f"transform.{split} normalizes on the CPU, since {ending.because}, and augment.preset, ops and module "
            "take images in [0, 1]: end the pipeline with its Normalize, which then follows the augmentation on "
            "the device"
        )
    return replace(
        augment, mean=(0.0,) * len(ending.mean), std=(1.0,) * len(ending.std)
    )


def for_tensors(transform: Any) -> Any:
    """A pipeline of torchvision whose steps take tensors: those for PIL images are replaced by their like."""
    if not any(_is_for_pil(step) for step in _leaves(transform)):
        return transform
    if _is_for_pil(transform):
        import torch
        from torchvision.transforms import v2

        is_scaling = type(transform).__name__ == "ToTensor"
        if is_scaling:
            return v2.ToDtype(torch.float32, scale=True)
        return v2.Identity()
    return _rebuilt(
        transform, [for_tensors(step) for step in _steps_of(transform) or ()]
    )


def _split(pipeline: Any) -> tuple[Any, list[Any]]:
    """The pipeline without its last steps of this module, and these; None: nothing is left."""
    steps = _steps_of(pipeline)
    if steps is None:
        if _is_ending(pipeline):
            return (None, [pipeline])
        return (pipeline, [])
    kept = list(steps)
    ending = list[Any]()
    while kept:
        remaining, last_steps = _split(kept[-1])
        if not last_steps:
            break
        ending = last_steps + ending
        kept.pop()
        if remaining is not None:
            kept.append(remaining)
            break
    if not ending:
        return pipeline, []
    is_more = getattr(pipeline, "processors", None) or getattr(
        pipeline, "additional_targets", None
    )
    return _rebuilt(pipeline, kept) if kept or is_more else None, ending


def _steps_of(pipeline: Any) -> Sequence[Any] | None:
    """The steps of a plain sequence of steps; None: it is something else."""
    kind = type(pipeline)
    package = kind.__module__.partition(".")[0]
    if any(
        value
        for name, value in getattr(pipeline, "__dict__", {}).items()
        if name.endswith("_hooks")
    ):
        return None
    if package == "albumentations" and kind.__name__ == "Compose" and pipeline.p == 1:
        return list(pipeline.transforms)
    if package == "torchvision" and kind.__name__ == "Compose":
        return list(pipeline.transforms)
    if package == "torch" and kind.__name__ == "Sequential":
        return list(pipeline)
    return None


def _rebuilt(pipeline: Any, steps: list[Any]) -> Any:
    kind = type(pipeline)
    if kind.__name__ == "Sequential":
        return kind(*steps)
    if kind.__module__.startswith("torchvision."):
        return kind(steps)
    pipeline = copy.copy(pipeline)  # the copy keeps its boxes and other targets
    pipeline.transforms = steps
    return pipeline


def _leaves(pipeline: Any) -> Iterator[Any]:
    """The steps of a pipeline, and of the pipelines in it."""
    steps = _steps_of(pipeline)
    if steps is None and is_composition(pipeline):  # one of several, or by chance
        steps = getattr(pipeline, "transforms", None)
    if not isinstance(steps, list | tuple):
        yield pipeline
        return
    for step in steps:
        yield from _leaves(step)


def is_composition(step: Any) -> bool:
    """True for a library's step that is made of others, not of functions as Albumentations' ColorJitter."""
    if _package(step) == "albumentations":
        return any(kind.__name__ == "BaseCompose" for kind in type(step).__mro__)
    return _package(step) != "" and hasattr(step, "transforms")


def _package(step: Any) -> str:
    """The library that a step is of; empty: it is the user's."""
    package = type(step).__module__.partition(".")[0]
    if package in ("albumentations", "torchvision", "torch"):
        return package
    return ""


def _is_ending(step: Any) -> bool:
    name = type(step).__name__
    if _package(step) == "torchvision":
        return name in _OF_TORCHVISION and not (
            name == "ToDtype" and _dtype_of(step) not in _KNOWN_DTYPES
        )
    if (
        _package(step) != "albumentations"
        or name not in _OF_ALBUMENTATIONS
        or step.p < 1
    ):
        return False
    return name != "Normalize" or step.normalization == "standard"


def _is_for_pil(step: Any) -> bool:
    return _package(step) == "torchvision" and type(step).__name__ in (
        "ToTensor",
        "PILToTensor",
    )


def _makes_floats(step: Any) -> bool:
    name = type(step).__name__
    if _package(step) == "albumentations":
        return name in ("Normalize", "ToFloat")
    if _package(step) != "torchvision":
        return False
    return name == "ToTensor" or (name in _CONVERTS and _dtype_of(step) in _FLOATS)


_FLOATS = {"float16", "bfloat16", "float32", "float64"}
_KNOWN_DTYPES = {"", "uint8", *_FLOATS}


def _dtype_of(step: Any) -> str:
    """The dtype that a conversion of torchvision gives to images; empty: it leaves them."""
    dtype = step.dtype
    if isinstance(dtype, dict):
        by_name = {
            getattr(kind, "__name__", kind): value for kind, value in dtype.items()
        }
        dtype = by_name.get("Image", by_name.get("Tensor", by_name.get("others")))
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _folded(steps: Sequence[Any]) -> Ending | None:
    """The ending of steps on uint8 images; None: one of them needs floats."""
    mean = np.zeros(1)
    std = np.ones(1) / _MAX
    dtype = "uint8"
    normalizes = False
    for step in steps:
        name = type(step).__name__
        is_byte = dtype == "uint8"
        if name in _LAYOUT:
            continue
        if name in _CONVERTS:
            if name == "ToTensor":
                target_dtype = "float32"
            else:
                target_dtype = _dtype_of(step)
            if target_dtype == "uint8" and not is_byte:
                return None
            if is_byte and target_dtype in _FLOATS and getattr(step, "scale", True):
                std = np.ones(1)
            if target_dtype and not (name == "ToTensor" and not is_byte):
                dtype = target_dtype
            else:
                dtype = dtype
        elif name == "ToFloat":
            std = std * (step.max_value or (_MAX if is_byte else 1))
            dtype = "float32"
        elif _package(step) == "torchvision" and is_byte:
            return None
        else:
            if _package(step) == "albumentations":
                whole = step.max_pixel_value
            else:
                whole = 1
            mean = mean + std * _numbers(step, "mean") * whole
            std = std * _numbers(step, "std") * whole
            normalizes = True
            if _package(step) == "albumentations":
                dtype = "float32"
            else:
                dtype = dtype
    names = ", ".join(
        type(step).__name__ for step in steps if type(step).__name__ not in _LAYOUT
    )
    return Ending(names, dtype, _for_channels(mean), _for_channels(std), normalizes)


def _by_library(leaves: Sequence[Any], first: int) -> Ending:
    """The ending of a pipeline that makes floats before it ends."""
    name = type(leaves[first]).__name__
    behind = [step for step in leaves[first + 1 :] if not _is_ending(step)]
    because = f"{name} is applied by chance, or depends on the image"
    if behind:
        because = f"{name} stands before {type(behind[0]).__name__}"
    float_steps = [step for step in leaves[first:] if _is_ending(step)]
    folded = _folded(float_steps)
    normalizes = any(type(step).__name__ == "Normalize" for step in leaves)
    if folded is None or folded.dtype == "uint8":
        return Ending(
            name, "float32", (0.0,) * 3, (1.0,) * 3, normalizes, False, because
        )
    return replace(folded, normalizes=normalizes, on_device=False, because=because)


def _numbers(step: Any, name: str) -> np.ndarray:
    return np.asarray(getattr(step, name), np.float64).ravel()


def _for_channels(numbers: np.ndarray) -> tuple[float, ...]:
    if numbers.size not in (1, 3):
        raise ConfigError(
            f"Normalize has {numbers.size} channels, and images have 3: give 3 numbers, or one"
        )
    # 12 digits: a division by 255 and its opposite are to leave the number that was given.
    return tuple(float(f"{number:.12g}") for number in np.broadcast_to(numbers, 3))


def _text(numbers: Sequence[float]) -> str:
    return "(" + ", ".join(f"{number:.6g}" for number in numbers) + ")"
