"""Last steps of a pipeline that make floats: dtype and normalization, which the training device does instead.

    A.Normalize, A.ToFloat, ToTensorV2
    ToImage, ToDtype, Normalize, ToPureTensor, RGB of torchvision v2
    ToTensor, PILToTensor, ConvertImageDtype, Normalize of torchvision

A pipeline without them makes uint8, a quarter of the bytes, and may be a program. On pixels x in [0, 1] they are
(x - mean) / std. Where another step follows one of them, the library does it all, and the floats travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raypipe.config import AugmentConfig
from raypipe.errors import ConfigError
from raypipe.transform.forms import forms_of, probed
from raypipe.transform.pipelines import (
    leaves,
    package_of,
    rebuilt,
    steps_of,
    transform_kind,
)
from raypipe.transform.pixels import RGB, is_rgb

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
    every = list(leaves(pipeline))
    if any(type(step).__name__ == "FromFloat" for step in every):
        return pipeline, None  # its floats become bytes again
    middle = next(
        (
            number
            for number, step in enumerate(every[: -len(steps) or None])
            if _makes_floats(step)
        ),
        -1,
    )
    if middle >= 0:
        return pipeline, _by_library(every, middle)
    if not steps:
        return pipeline, None
    folded = _folded(steps)
    if folded is None:
        if all(package_of(step) and type(step).__name__ != "Lambda" for step in every):
            raise ConfigError(
                "torchvision's Normalize needs float images, and these are uint8: write "
                "v2.ToDtype(torch.float32, scale=True) before it"
            )
        return pipeline, None  # a step of the user's may make floats
    if folded.dtype == "uint8":
        return without_ending, None
    if without_ending is None:
        return None, folded
    kind = transform_kind(pipeline)
    if kind == "pil":
        found = probed(pipeline, forms_of(kind))
        if found and found[0] == "tensor":
            from torchvision.transforms import v2

            # Only the steps that are taken off say so.
            without_ending = v2.Compose([without_ending])
    if _makes_rgb(without_ending):
        return without_ending, folded
    first = folded.steps.partition(",")[0]
    because = f"the steps before {first} do not make uint8 RGB"
    return pipeline, replace(folded, on_device=False, because=because)


def _makes_rgb(pipeline: Any) -> bool:
    """False if a pipeline makes something else than uint8 RGB of a probe; True also where it fails on probes."""
    kind = transform_kind(pipeline)
    found = probed(pipeline, forms_of(kind))
    if found is None:
        return True
    try:
        return is_rgb(RGB.of_image(found[1], kind))
    except ConfigError:
        return False


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


def _split(pipeline: Any) -> tuple[Any, list[Any]]:
    """The pipeline without its last steps of this module, and these; None: nothing is left."""
    steps = steps_of(pipeline)
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
    return rebuilt(pipeline, kept) if kept or is_more else None, ending


def _is_ending(step: Any) -> bool:
    name = type(step).__name__
    if package_of(step) == "torchvision":
        return name in _OF_TORCHVISION and not (
            name == "ToDtype" and _dtype_of(step) not in _KNOWN_DTYPES
        )
    if (
        package_of(step) != "albumentations"
        or name not in _OF_ALBUMENTATIONS
        or step.p < 1
    ):
        return False
    return name != "Normalize" or step.normalization == "standard"


def _makes_floats(step: Any) -> bool:
    name = type(step).__name__
    if package_of(step) == "albumentations":
        return name in ("Normalize", "ToFloat")
    if package_of(step) != "torchvision":
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
            target_dtype = "float32" if name == "ToTensor" else _dtype_of(step)
            if target_dtype == "uint8" and not is_byte:
                return None
            if is_byte and target_dtype in _FLOATS and getattr(step, "scale", True):
                std = np.ones(1)
            if target_dtype and (is_byte or name != "ToTensor"):
                dtype = target_dtype
        elif name == "ToFloat":
            std = std * (step.max_value or (_MAX if is_byte else 1))
            dtype = "float32"
        elif package_of(step) == "torchvision" and is_byte:
            return None
        else:
            whole = step.max_pixel_value if package_of(step) == "albumentations" else 1
            mean = mean + std * _numbers(step, "mean") * whole
            std = std * _numbers(step, "std") * whole
            normalizes = True
            if package_of(step) == "albumentations":
                dtype = "float32"
    names = ", ".join(
        type(step).__name__ for step in steps if type(step).__name__ not in _LAYOUT
    )
    return Ending(names, dtype, _for_channels(mean), _for_channels(std), normalizes)


def _by_library(every: Sequence[Any], first: int) -> Ending:
    """The ending of a pipeline that makes floats before it ends."""
    name = type(every[first]).__name__
    behind = [step for step in every[first + 1 :] if not _is_ending(step)]
    because = f"{name} is applied by chance, or depends on the image"
    if behind:
        because = f"{name} stands before {type(behind[0]).__name__}"
    float_steps = [step for step in every[first:] if _is_ending(step)]
    folded = _folded(float_steps)
    normalizes = any(type(step).__name__ == "Normalize" for step in every)
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
