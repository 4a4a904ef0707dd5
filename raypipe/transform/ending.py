"""Last steps of a pipeline that make floats: dtype and normalization, which the training device does instead.

A pipeline without them makes uint8, a quarter of the bytes, and may be a program. Such a step is recognized by a
look: it is a library's, draws nothing, and with those before it makes (x - mean) / std of two images of noise, for
pixels x in [0, 1]. Where another step follows one of them, the library does it all, and the floats travel.

The user's own code is never one of them: on other images than noise it may do anything.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from raypipe.config import AugmentConfig
from raypipe.errors import ConfigError
from raypipe.transform.forms import Form, called, for_form, forms_of, in_form, probed
from raypipe.transform.pipelines import (
    flat,
    has_user_code,
    leaves,
    package_of,
    shortened,
    transform_kind,
)
from raypipe.transform.pixels import channels_last, is_pil, is_rgb, is_tensor
from raypipe.transform.process_state import (
    process_kept,
    with_draws,
)
from raypipe.transform.user_code import copied

# Sides that no crop has, with all values in each channel.
_VALUES = np.repeat(np.arange(17 * 19) % 256, 3).reshape(-1, 3).astype(np.uint8)
_NOISE = np.random.default_rng(0).permuted(_VALUES, axis=0).reshape(17, 19, 3)
# The dark one differs in what depends on the whole image.
_PROBES = np.stack([_NOISE, _NOISE // 3])
_EPSILONS = {"float16": 2**-12, "bfloat16": 2**-9}  # less than theirs: few steps round
_EPSILON = 2**-23  # float32 has it
_MAX_DIGITS = 9
_NO_RGB = "the steps before {} do not make uint8 RGB"
_BY_CHANCE = "{} is applied by chance, or depends on the whole image"


@dataclass(frozen=True)
class Ending:
    """Dtype and normalization of a split's images.

    Attributes:
        steps: names of the pipeline's steps, for messages.
        dtype: torch's name of the images' dtype.
        mean, std: of each channel: images are (x - mean) / std, of pixels x in [0, 1].
        normalizes: whether a step with a mean and a std is in the pipeline.
        because: why the library makes the floats; empty: the device does.
        is_own: whether the split's own pipeline has these steps. Otherwise they are the other split's, for its
            uint8 images.
    """

    steps: str
    dtype: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    normalizes: bool
    because: str = ""
    is_own: bool = True

    @property
    def on_device(self) -> bool:
        """True if the device makes the floats, not the library."""
        return not self.because

    @property
    def described(self) -> str:
        """The dtype and numbers, for messages and fingerprints."""
        return f"{self.dtype}, mean {_text(self.mean)}, std {_text(self.std)}"


WithoutEnding = tuple[Any, Ending | None]
"""A pipeline without its ending, and that; None = it has none."""


class _Look(NamedTuple):
    """The probes, as steps have made them.

    Attributes:
        form: the type of the images.
        dtype: of their values.
        mean, std: of each channel, with which they are (x - mean) / std of pixels x; empty: they are not.
    """

    images: list[Any]
    form: str = ""
    dtype: str = ""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def take_ending(pipeline: Any) -> WithoutEnding:
    """Split a pipeline into the steps that make uint8, and its ending.

    Args:
        pipeline: what `build_transform` gives, of a split with uint8 RGB images.

    Returns:
        The pipeline without these steps; None if no step is left. And None where it has none that changes values,
        or only the user's own code makes floats.

    Raises:
        ConfigError: a Normalize does not take the images that it gets.
    """
    if all(map(has_user_code, flat(pipeline))):
        return pipeline, None
    with process_kept():
        return _taken(pipeline)


def _taken(pipeline: Any) -> WithoutEnding:
    kind = transform_kind(pipeline)
    forms = forms_of(kind)
    form = probed(pipeline, forms) if len(forms) > 1 else forms[0]
    steps = list(flat(for_form(copied(pipeline), form)))
    given = _given(steps, in_form(np.tile(_NOISE, (4, 4, 1)), form))
    if not _is_float(given[-1]):
        return pipeline, None
    num_kept = max(number for number, image in enumerate(given) if not _is_float(image))
    ending = _ending(steps[num_kept:], given[num_kept:])
    if ending is None or not ending.on_device:
        return pipeline, ending
    without_ending = shortened(pipeline, num_kept)
    if without_ending is not None and kind == "pil" and form == "tensor":
        from torchvision.transforms import v2

        # Only the steps that are taken off say so.
        without_ending = v2.Compose([without_ending])
    return without_ending, ending


def _given(steps: Sequence[Any], image: Any) -> list[Any]:
    """The image that each step is given, and the last one's result."""
    given = [image]
    for step in steps:
        try:
            image = called(step, copy.deepcopy(image))
        except Exception as error:
            # One that needs a box, or a larger image, leaves the image as it is.
            if _has_numbers(step) and not any(map(has_user_code, steps)):
                raise ConfigError(
                    f"{_name(step)} fails on the images that it gets ({error}): it takes floats (write "
                    "v2.ToDtype(torch.float32, scale=True) before it), and a number for each channel"
                ) from error
        given.append(image)
    return given


def _ending(steps: Sequence[Any], given: Sequence[Any]) -> Ending | None:
    """The ending that the last steps of a pipeline are, or why they are none, in `because`.

    Args:
        steps: the first makes floats.
        given: the image that each step is given, and the last one's result.

    Returns:
        None, if only the user's own code makes floats.
    """
    look = _looked(_probes(given[0]))
    names = list[str]()
    because = "" if is_rgb(channels_last(given[0])) else _NO_RGB
    for number, step in enumerate(steps):
        seen = _looked(_made(step, look.images))
        if seen.mean and (_has_numbers(step) or seen[1:] != look[1:]):
            look = seen
        elif number:
            because = because or f"{_name(steps[0])} stands before {_name(step)}"
            continue
        else:
            look = _looked(_probes(given[1], as_floats=True))
            because = _NO_RGB
            # A library's whole pipeline in one step, which resizes, is as the user's own.
            if has_user_code(step) or (seen.images and not seen.dtype):
                continue
            because = _BY_CHANCE
        names.append(_name(step))
    if not names:
        return None
    return Ending(
        ", ".join(names),
        look.dtype,
        look.mean,
        look.std,
        any(map(_has_numbers, steps)),
        because.format(names[0]),
    )


def _made(step: Any, images: Sequence[Any]) -> list[Any]:
    """Return what a step makes of images; empty: it fails on them, draws, or is the user's."""
    if has_user_code(step):
        return []
    if package_of(step) == "albumentations":
        step.set_random_state(None, None)  # it fails if it draws
    try:
        made, drawn_from = with_draws(
            lambda: [called(step, copy.deepcopy(image)) for image in images]
        )
    except Exception:
        return []
    return [] if drawn_from else made


def _looked(images: list[Any]) -> _Look:
    """Look at the probes, as a step has made them."""
    arrays = list(map(channels_last, images))
    if [array.shape for array in arrays] != [_NOISE.shape] * len(_PROBES):
        return _Look(images)
    form = type(images[0]).__name__
    dtype = _dtype(images[0])
    values = np.stack(arrays).reshape(-1, 3).astype(float)
    pixels = _PROBES.reshape(-1, 3) / 255
    limit = 4 * _EPSILONS.get(dtype, _EPSILON) * np.abs(values).max()
    scale = np.ptp(values, axis=0)  # 0 and 1 are among the pixels
    for digits in range(1, _MAX_DIGITS) if scale.all() else ():
        # the shortest numbers that make these values
        mean = (0 - (values.min(axis=0) / scale).round(digits)).tolist()
        std = [float(f"{1 / number:.{digits}g}") for number in scale]
        if np.abs((pixels - mean) / std - values).max() < limit:
            return _Look(images, form, dtype, tuple(mean), tuple(std))
    return _Look(images, form, dtype)


def _probes(image: Any, as_floats: bool = False) -> list[Any]:
    """The probes in the form of an image; or as floats in [0, 1]."""
    form: Form = "array"
    if is_pil(image):
        form = "pil"
    elif is_tensor(image):
        form = "tensor"
    probes = _PROBES / np.float32(255) if as_floats else _PROBES
    return [in_form(probe, form) for probe in probes]


def _dtype(image: Any) -> str:
    """torch's name of the dtype of an image's values."""
    return str(getattr(image, "dtype", "uint8")).removeprefix("torch.")


def _is_float(image: Any) -> bool:
    return "float" in _dtype(image)


def _has_numbers(step: Any) -> bool:
    """True for a library's step that has a mean and a std, or may run one that has."""
    return any(
        package_of(leaf) and hasattr(leaf, "mean") and hasattr(leaf, "std")
        for leaf in leaves(step)
    )


def _name(step: Any) -> str:
    return type(step).__name__


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
        if not ending.on_device:
            return None
        augment = AugmentConfig()
    numbers = (augment.mean, augment.std)
    of_pipeline = (ending.mean, ending.std)
    if numbers not in ((AugmentConfig.mean, AugmentConfig.std), of_pipeline):
        raise ConfigError(
            f"transform.{split} ends with {ending.steps} (mean {_text(ending.mean)}, std {_text(ending.std)}), "
            f"and augment.mean is {_text(augment.mean)}, augment.std {_text(augment.std)}: images are normalized "
            "once, so leave one of them out"
        )
    if ending.on_device:
        return replace(augment, mean=ending.mean, std=ending.std)
    if augment.preset != "none" or augment.ops or augment.module:
        raise ConfigError(
            f"transform.{split} normalizes on the CPU, since {ending.because}, and augment.preset, ops and module "
            "take images in [0, 1]: end the pipeline with its Normalize, which then follows the augmentation on "
            "the device"
        )
    num_channels = len(ending.mean)
    return replace(augment, mean=(0.0,) * num_channels, std=(1.0,) * num_channels)


def _text(numbers: Sequence[float]) -> str:
    return "(" + ", ".join(f"{number:.6g}" for number in numbers) + ")"
