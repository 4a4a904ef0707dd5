"""CPU transforms as data: a list of steps, each a transform of Albumentations by its name, with its arguments.

    - RandomResizedCrop: {size: [224, 224], scale: [0.2, 1.0]}
    - HorizontalFlip: {p: 0.5}
    - OneOf: {transforms: [{Blur: {p: 1}}, {MotionBlur: {p: 1}}], p: 0.3}

Steps come from a run's YAML, from the command line, or from a file of their own, which may be one that
`albumentations.save` wrote. They can make public transforms of Albumentations and nothing else: no name in them is
imported, and none of a function is called. Albumentations itself is handed in by who has a use for it.

read_steps    a file → steps
build_steps   steps → a pipeline
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import yaml

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.storage.whole_file import read_text

Steps = list[dict[str, Any]]
"""Each `{NAME: {argument: value, …}}`; the arguments of a step without any may be None."""

T = TypeVar("T")

# A long policy has a hundred values and is four deep. A YAML of a few lines can stand for billions (aliases of
# aliases), and for lists that hold themselves.
_MAX_BYTES, _MAX_VALUES, _MAX_DEPTH = 1 << 20, 10_000, 24

_BASES = {"BaseCompose", "BasicTransform", "DualTransform", "ImageOnlyTransform", "Transform3D"}
_OF_FLOATS = {"Normalize", "ToFloat", "FromFloat", "ToTensorV2", "ToTensor3D"}
# They ask for these in the middle of their work, and do not say so before.
_NEED_BOXES = {"AtLeastOneBBoxRandomCrop", "BBoxSafeRandomCrop", "RandomSizedBBoxSafeCrop"}
_NEED_MASKS = {"ConstrainedCoarseDropout", "CropNonEmptyMaskIfExists"}

# What albumentations.save writes beside all arguments of these: those of their parents, which they do not take.
_MASKING = {"fill", "fill_mask", "mask_x_length", "mask_y_length", "num_masks_x", "num_masks_y"}
_OF_PARENTS = {
    "FrequencyMasking": _MASKING,
    "TimeMasking": _MASKING,
    "PadIfNeeded": {"padding"},
    "RGBShift": {"approximation", "noise_params", "noise_type", "spatial_mode"},
    "SafeRotate": {"balanced_scale", "fit_output", "keep_ratio", "rotate", "scale", "shear"}
    | {"translate_percent", "translate_px"},
}


def is_file(transform: object) -> bool:
    """Whether a transform is the address of a file of steps."""
    return isinstance(transform, str) and transform.lower().endswith((".yaml", ".yml", ".json"))


def without_files(transform: T) -> T | Steps:
    """A transform, with the steps in place of the address of a file that holds them; see `read_steps`."""
    return read_steps(transform) if isinstance(transform, str) and is_file(transform) else transform


def config_without_files(config: TransformConfig) -> TransformConfig:
    """The same with the steps in place of the files that hold them, so that nobody need read these again.

    Raises:
        ConfigError: see `read_steps`.
    """
    return replace(config, train=without_files(config.train), val=without_files(config.val))


def brief(transform: str | Steps) -> str:
    """A transform in a few words."""
    return transform if isinstance(transform, str) else "+".join(str(name) for step in transform for name in step)


def read_steps(address: str) -> Steps:
    """The steps of a file: a list of them, as JSON or YAML, or what `albumentations.save` writes.

    Args:
        address: a local path or a URI.

    Raises:
        ConfigError: it cannot be read, or holds no steps. Whether they can be built, `build_steps` tells.
    """
    text = read_text(address, _MAX_BYTES)
    try:
        content = json.loads(text)  # not as YAML, for which 1e-05 is a word; the file's name is no proof of either
    except (ValueError, RecursionError):
        try:
            content = yaml.safe_load(text)
        except Exception as error:  # PyYAML has more kinds than its own: KeyError for !!bool x, RecursionError
            reason = " ".join(str(error).split())
            raise ConfigError(f"{address} is neither JSON nor YAML: {type(error).__name__}: {reason}") from None
    _check_plain(content, address)
    if isinstance(content, dict) and isinstance(content.get("transform"), dict):
        return _from_saved(content["transform"], address)
    if not isinstance(content, list):
        raise ConfigError(
            f"{address} holds no transform: expected is a list of steps `- NAME: {{argument: value, …}}`, or what"
            " albumentations.save writes"
        )
    return content


def _from_saved(saved: dict[str, Any], address: str) -> Steps:
    """The steps of a pipeline that `albumentations.save` wrote."""
    step = _step_from_saved(saved, address)
    of_compose = step.get("Compose")
    if of_compose is None:
        return [step]
    # What it writes for a Compose about which nothing was said.
    silent: dict[str, Any] = {"p": 1.0, "bbox_params": None, "keypoint_params": None, "additional_targets": {}}
    silent |= {"is_check_shapes": True, "transforms": of_compose.get("transforms")}
    return of_compose["transforms"] if of_compose == silent else [step]


def _step_from_saved(saved: Any, address: str) -> dict[str, Any]:
    name = saved.get("__class_fullname__") if isinstance(saved, dict) else None
    nested = saved.get("transforms", []) if isinstance(saved, dict) else None
    if not isinstance(name, str) or not isinstance(nested, list):
        raise ConfigError(f"{address}: {_cut(saved)} is no transform that albumentations.save wrote")
    # Old versions wrote the module as well; the name of anybody else's class stays whole, and is refused.
    name = name.rpartition(".")[2] if name.startswith("albumentations.") else name
    ignored = {"__class_fullname__", *_OF_PARENTS.get(name, ())}
    arguments = {key: value for key, value in saved.items() if key not in ignored}
    if "transforms" in saved:
        arguments["transforms"] = [_step_from_saved(each, address) for each in nested]
    return {name: arguments}


def build_steps(steps: Steps, albumentations: Any) -> Any:
    """Build the pipeline that steps describe.

    Args:
        steps: see the module.
        albumentations: the library.

    Returns:
        A Compose of them; a single Compose as it is.

    Raises:
        ConfigError: a name, an argument or a value is wrong; the message names the step and what is known.
    """
    _check_plain(steps, "transform")
    if not steps:
        raise ConfigError("transform is an empty list of steps; the preset 'none' leaves images as they are")
    made = _built(steps, "transform", albumentations)
    return made[0] if len(made) == 1 and type(made[0]) is albumentations.Compose else albumentations.Compose(made)


def _built(steps: Any, where: str, library: Any) -> list[Any]:
    if not isinstance(steps, list):
        raise ConfigError(f"{where}: expected is a list of steps, got {_cut(steps)}")
    return [_built_step(step, f"{where} step {number}", library) for number, step in enumerate(steps, 1)]


def _built_step(step: Any, where: str, library: Any) -> Any:
    if not isinstance(step, dict) or len(step) != 1:
        raise ConfigError(f"{where}: expected is one NAME: {{argument: value, …}}, got {_cut(step)}")
    ((name, arguments),) = step.items()
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ConfigError(f"{where}: expected is {name}: {{argument: value, …}}, got {_cut(arguments)}")
    kind = _class_of(name, where, library)
    where = f"{where}, {name}"
    is_composition = issubclass(kind, library.BaseCompose)
    known = [each for each in inspect.signature(kind.__init__).parameters if each != "self"]
    if is_composition:  # the transforms of OneOrOther have two names each
        known = [each for each in known if each not in ("first", "second", "kwargs")]
    for argument in arguments:
        if argument not in known:
            meant = _meant(argument, known) or ";"
            raise ConfigError(f"{where}: there is no argument {argument!r}{meant} {_known(known)}")
    if is_composition:
        arguments = _arguments_of_composition(arguments, where, library)
    else:
        arguments = dict(arguments)
        # Around most constructors there is a check of Albumentations', which warns and takes the defaults where it
        # fails itself.
        if kind.__init__.__code__.co_flags & inspect.CO_VARKEYWORDS:
            arguments["strict"] = True
    try:
        made = kind(**arguments)
    except Exception as error:
        raise ConfigError(f"{where}: {_reason(error, arguments)}; {_known(known)}") from error
    _check_image_alone(made, name, where)
    return made


def _class_of(name: str, where: str, library: Any) -> Any:
    """The public transform of Albumentations that has a name; raises ConfigError."""
    both = (library.BasicTransform, library.BaseCompose)
    found: dict[str, Any] = {
        each: kind
        for each, kind in vars(library).items()
        if isinstance(kind, type) and issubclass(kind, both) and each not in _BASES
    }
    if name in _OF_FLOATS:
        raise ConfigError(
            f"{where}: {name} is of floats; leave it out: images stay uint8 here, and the device normalises them"
        )
    if name not in found:
        meant = _meant(name, found) or f"; {_known(sorted(found))}"
        raise ConfigError(f"{where}: Albumentations has no transform {name!r}{meant}")
    if not found[name].is_serializable():  # type: ignore[attr-defined]
        raise ConfigError(f"{where}: {name} needs a Python function: give the whole pipeline as module:function")
    return found[name]


def _arguments_of_composition(arguments: dict[str, Any], where: str, library: Any) -> dict[str, Any]:
    """With its transforms built. What a composition is given it hardly checks."""
    if not arguments.get("transforms"):
        raise ConfigError(f"{where}: transforms are missing: expected is a list of steps")
    for name, value in arguments.items():
        if name == "p" and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1):
            raise ConfigError(f"{where}: p must be in [0, 1], got {_cut(value)}")
        if name == "n" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{where}: n must be a whole number of at least 1, got {_cut(value)}")
        if name in ("bbox_params", "keypoint_params", "additional_targets") and value:
            what = "transform.mask_column and transform.boxes_column say what goes with the image"
            raise ConfigError(f"{where}: leave out {name}: {what}")
        if name == "seed" and value is not None:
            raise ConfigError(f"{where}: leave out seed: each sample has one of its own, from plan.seed")
    return {**arguments, "transforms": _built(arguments["transforms"], where, library)}


def _check_image_alone(made: Any, name: str, where: str) -> None:
    """Raise ConfigError for a transform that cannot work on an image alone."""
    needed = set(getattr(made, "targets_as_params", ())) - {"image"}
    if name in _NEED_BOXES:
        needed = {"bboxes"}
    if name in _NEED_MASKS:
        needed = {"mask"}
    if "image" not in made.available_keys:
        needed = {"volume"}
    if needed:
        what = ", ".join(sorted(needed))
        raise ConfigError(f"{where}: it needs {what}, and a step must do with the image alone: leave it out")


def _check_plain(content: Any, where: str) -> None:
    """Raise ConfigError unless it is lists, dicts with names as keys, and scalars; not too many, not too deep."""

    def sizes(value: Any, depth: int) -> Iterator[int]:
        yield len(value) if isinstance(value, str) else 1
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{where}: nested more than {_MAX_DEPTH} deep")
        if isinstance(value, dict):
            for key, each in value.items():
                if not isinstance(key, str):
                    raise ConfigError(f"{where}: expected is a name, got {_cut(key)}")
                yield len(key)
                yield from sizes(each, depth + 1)
        elif isinstance(value, list | tuple):
            for each in value:
                yield from sizes(each, depth + 1)
        elif not isinstance(value, str | int | float | None):
            raise ConfigError(f"{where}: {_cut(value)} is a {type(value).__name__}, which is no argument")

    for number, size in enumerate(itertools.accumulate(sizes(content, 0))):
        if number >= _MAX_VALUES or size > _MAX_BYTES:
            raise ConfigError(f"{where}: more than {_MAX_VALUES:,} names and values, or {_MAX_BYTES:,} characters")


def _reason(error: Exception, arguments: dict[str, Any]) -> str:
    """What was wrong with arguments, on one line."""
    errors = getattr(error.__cause__, "errors", None)  # of Pydantic, by which Albumentations checks values
    if errors is None:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    messages: dict[str, dict[str, None]] = {}  # by argument, each once: of a union each alternative has its own
    for each in errors():
        name = str(each["loc"][0]) if each["loc"] else ""
        message = f"{name} is missing" if each["type"] == "missing" else each["msg"]
        messages.setdefault(name, {})[message] = None
    return "; ".join(
        f"{name}: {' / '.join(of_name)}, got {_cut(arguments[name])}" if name in arguments else " / ".join(of_name)
        for name, of_name in messages.items()
    )


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 3, 0.7)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _known(names: Iterable[str]) -> str:
    return f"known are {', '.join(names)}"


def _cut(value: Any) -> str:
    """A value for a message, however long or large it is."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text[:80] + "…") if len(text) > 80 else repr(value)
