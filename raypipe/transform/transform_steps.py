"""CPU transforms as data: a list of steps, each a transform of Albumentations by its name, with its arguments.

    - RandomResizedCrop: {size: [224, 224], scale: [0.2, 1.0]}
    - HorizontalFlip: {p: 0.5}
    - OneOf: {transforms: [{Blur: {p: 1}}, {MotionBlur: {p: 1}}], p: 0.3}

Steps come from a run's YAML, or from the command line. They are built only from public transforms of
Albumentations: they cannot import modules or call functions by name.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from raypipe.config import AtLeast1, Share
from raypipe.errors import ConfigError
from raypipe.mistakes import choices
from raypipe.packages import how_to_get, installed_version
from raypipe.section import check, shown

# The library asks the network for a newer version when it is imported, and AlbumentationsX tells it of pipelines.
# Each process that unpickles a stream's transforms imports this module first.
for _name in ("NO_ALBUMENTATIONS_UPDATE", "ALBUMENTATIONS_NO_TELEMETRY"):
    os.environ.setdefault(_name, "1")

StepSettings = dict[str, Any]
Steps = list[StepSettings]
"""Each `{NAME: {argument: value, …}}`; the arguments of a step without any may be None."""

# A YAML of a few lines can stand for billions of values (aliases of aliases), and for lists that hold themselves.
_MAX_CHARACTERS = 1 << 20

_BASES = {
    "BaseCompose",
    "BasicTransform",
    "DualTransform",
    "ImageOnlyTransform",
    "Transform3D",
}
_OF_OTHERS = {"FromFloat", "ToTensor3D"}
# A pipeline's own, of a composition; and OneOrOther's second names of its transforms.
_NOT_OF_STEPS = (
    "first",
    "second",
    "kwargs",
    "seed",
    "bbox_params",
    "keypoint_params",
    "additional_targets",
)
# They ask for these in the middle of their work, and do not say so before.
_NEED = {
    "AtLeastOneBBoxRandomCrop": "bboxes",
    "BBoxSafeRandomCrop": "bboxes",
    "BBoxSubsetSafeRandomCrop": "bboxes",
    "RandomSizedBBoxSafeCrop": "bboxes",
    "ConstrainedCoarseDropout": "mask",
    "CropNonEmptyMaskIfExists": "mask",
}


def brief(transform: Any) -> str:
    """A transform in a few words."""
    if isinstance(transform, Mapping):
        return f"views {', '.join(transform)}"
    if isinstance(transform, list):
        return "+".join(str(name) for step in transform for name in step)
    if isinstance(transform, str | None):
        return str(transform)
    return f"a {type(transform).__name__}"


def albumentations() -> Any:
    """The library, or its successor AlbumentationsX; raise ConfigError if neither can be imported.

    The first is imported without its torch part, in 0.7 s instead of 2.5 to 4 s, in each process.
    """
    hides = not (
        {"torch", "albumentations.pytorch"} & sys.modules.keys()
        or installed_version("albumentationsx")
    )
    if hides:
        sys.modules["albumentations.pytorch"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("albumentations")
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"Albumentations makes these steps: {reason}{how_to_get('albumentations')}"
        ) from error
    finally:
        if hides:
            del sys.modules["albumentations.pytorch"]


def build_steps(steps: Steps) -> Any:
    """Build the pipeline that steps describe: a Compose of them, or a single Compose as it is.

    Raises:
        ConfigError: a name, an argument or a value is wrong; the message names the step and the known choices.
    """
    try:
        _check_plain(steps)
        built = _built(steps, "transform")
    except RecursionError as error:
        raise ConfigError("transform: its steps are nested too deep") from error
    if not steps:
        raise ConfigError(
            "transform is an empty list of steps; the preset 'none' leaves images as they are"
        )
    library = albumentations()
    is_pipeline = len(built) == 1 and type(built[0]) is library.Compose
    return built[0] if is_pipeline else library.Compose(built)


def _built(steps: Any, where: str) -> list[Any]:
    if not isinstance(steps, list):
        raise ConfigError(f"{where}: must be a list of steps, got {shown(steps)}")
    return [
        _step(step, f"{where} step {number}") for number, step in enumerate(steps, 1)
    ]


def _step(step: Any, where: str) -> Any:
    """Return the image-only transform that a step names."""
    if not isinstance(step, dict) or len(step) != 1:
        raise ConfigError(
            f"{where}: must be one NAME: {{argument: value, …}}, got {shown(step)}"
        )
    ((name, arguments),) = step.items()
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"{where}: must be {name}: {{argument: value, …}}, got {shown(arguments)}"
        )
    kind = _class_of(str(name), where)
    where = f"{where}, {name}"
    is_composition = issubclass(kind, albumentations().BaseCompose)
    parameters = [
        parameter
        for parameter in inspect.signature(kind).parameters
        if not is_composition or parameter not in _NOT_OF_STEPS
    ]
    for argument in arguments:
        if argument not in parameters:
            raise ConfigError(
                f"{where}: unknown argument {argument!r}{choices(str(argument), parameters)}"
            )
    given = dict(arguments)
    if is_composition:  # it hardly checks its arguments
        check(f"{where}: p", arguments.get("p", 1), Share)
        check(f"{where}: n", arguments.get("n", 1), AtLeast1)
        given["transforms"] = _built(arguments.get("transforms"), where)
    elif kind.__init__.__code__.co_flags & inspect.CO_VARKEYWORDS:
        # Around it is a check of Albumentations', which warns and takes the defaults where it fails, but for this.
        given["strict"] = True
    try:
        transform = kind(**given)
    except Exception as error:
        raise ConfigError(
            f"{where}: {_reason(error, arguments)}; choose from {', '.join(parameters)}"
        ) from error
    _check_takes_image(transform, name, where)
    return transform


def _check_takes_image(transform: Any, name: str, where: str) -> None:
    """Raise ConfigError for a step that needs more than the image, or something else."""
    needed = {*getattr(transform, "targets_as_params", ()), _NEED.get(name, "image")}
    if "image" not in transform.available_keys:
        needed = {"volume"}
    if needed - {"image"}:
        missing = ", ".join(sorted(needed - {"image"}))
        raise ConfigError(
            f"{where}: it needs {missing}, but a step gets only the image: leave it out"
        )


def _class_of(name: str, where: str) -> Any:
    """The public transform of Albumentations that has a name; raises ConfigError."""
    library = albumentations()
    classes: dict[str, Any] = {
        class_name: kind
        for class_name, kind in vars(library).items()
        if isinstance(kind, type)
        and issubclass(kind, library.BasicTransform | library.BaseCompose)
        and class_name not in _BASES
    }
    if name == "ToTensorV2":  # the part that needs torch
        classes[name] = importlib.import_module("albumentations.pytorch").ToTensorV2
    if name in _OF_OTHERS:
        why = f"{name} takes no uint8 images: leave it out"
    elif name not in classes:
        why = (
            f"Albumentations has no transform {name!r}{choices(name, sorted(classes))}"
        )
    elif not classes[name].is_serializable():
        why = f"{name} needs a Python function: give the whole pipeline as module:function"
    else:
        return classes[name]
    raise ConfigError(f"{where}: {why}")


def _check_plain(steps: Steps) -> None:
    """Raise ConfigError unless steps are lists and dicts of text and numbers, as in JSON, and not too long."""
    num_characters = 0
    try:
        for text in json.JSONEncoder().iterencode(steps):
            num_characters += len(text)
            if num_characters > _MAX_CHARACTERS:
                raise ConfigError(
                    f"transform: its steps have more than {_MAX_CHARACTERS:,} characters"
                )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"transform: {error}. Steps are lists, text and numbers; objects go into an albumentations.Compose, "
            "or one of torchvision's, and the pipelines of views into a dict, {name: pipeline, …}"
        ) from error


def _reason(error: Exception, arguments: dict[str, Any]) -> str:
    """Describe an error in arguments, on one line."""
    # Pydantic's, with which Albumentations checks values
    errors = getattr(error.__cause__, "errors", None)
    if errors is None:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    reasons = dict[str, None]()
    for detail in errors():
        name = str(detail["loc"][0]) if detail["loc"] else ""
        reasons[f"{name}: {detail['msg']}, got {shown(arguments.get(name))}"] = None
    return "; ".join(reasons)
