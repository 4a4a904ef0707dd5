"""CPU transforms as data: a list of steps, each a transform of Albumentations by its name, with its arguments.

    - RandomResizedCrop: {size: [224, 224], scale: [0.2, 1.0]}
    - HorizontalFlip: {p: 0.5}
    - OneOf: {transforms: [{Blur: {p: 1}}, {MotionBlur: {p: 1}}], p: 0.3}

Steps come from a run's YAML, from the command line, or from a file of their own, which may be one that
`albumentations.save` wrote. `albumentations.from_dict` builds them, of public transforms of Albumentations and
nothing else: no name in them is imported, and none of a function is called.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import json
import os
import sys
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

_NAME = "__class_fullname__"  # what the library calls it
_BASES = {"BaseCompose", "BasicTransform", "DualTransform", "ImageOnlyTransform", "Transform3D"}
_OF_FLOATS = {"Normalize", "ToFloat", "FromFloat", "ToTensorV2", "ToTensor3D"}
# They ask for these in the middle of their work, and do not say so before.
_NEED = {
    **dict.fromkeys(("AtLeastOneBBoxRandomCrop", "BBoxSafeRandomCrop", "RandomSizedBBoxSafeCrop"), ("bboxes",)),
    **dict.fromkeys(("ConstrainedCoarseDropout", "CropNonEmptyMaskIfExists"), ("mask",)),
}

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
    """The same with the steps in place of the files that hold them, so that nobody need read these again."""
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
        step = _from_saved(content["transform"], address)
        compose = step.get("Compose", {})
        # What it writes for a Compose about which nothing was said.
        silent: dict[str, Any] = {"p": 1.0, "bbox_params": None, "keypoint_params": None, "additional_targets": {}}
        is_silent = compose == {**silent, "is_check_shapes": True, "transforms": compose.get("transforms")}
        return compose["transforms"] if is_silent else [step]
    if not isinstance(content, list):
        raise ConfigError(
            f"{address} holds no transform: expected is a list of steps `- NAME: {{argument: value, …}}`, or what"
            " albumentations.save writes"
        )
    return content


def _from_saved(saved: Any, address: str) -> dict[str, Any]:
    """The step of a transform, or pipeline, that `albumentations.save` wrote."""
    name = saved.get(_NAME) if isinstance(saved, dict) else None
    nested = saved.get("transforms", []) if isinstance(saved, dict) else None
    if not isinstance(name, str) or not isinstance(nested, list):
        raise ConfigError(f"{address}: {_cut(saved)} is no transform that albumentations.save wrote")
    # Old versions wrote the module as well; the name of anybody else's class stays whole, and is refused.
    name = name.rpartition(".")[2] if name.startswith("albumentations.") else name
    ignored = {_NAME, *_OF_PARENTS.get(name, ())}
    arguments = {key: value for key, value in saved.items() if key not in ignored}
    if "transforms" in saved:
        arguments["transforms"] = [_from_saved(each, address) for each in nested]
    return {name: arguments}


def albumentations() -> Any:
    """The library, imported without its torch part: 0.7 s in each process instead of 2.5 to 4 s."""
    # It asks the network for a newer version at import, in every actor; and the newer one is AGPL.
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    with _without_torch():
        return importlib.import_module("albumentations")


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Within, Albumentations goes on as where there is no torch, unless torch is imported already."""
    hides = "torch" not in sys.modules and "albumentations.pytorch" not in sys.modules
    if hides:
        sys.modules["albumentations.pytorch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hides:
            del sys.modules["albumentations.pytorch"]


def build_steps(steps: Steps) -> Any:
    """Build the pipeline that steps describe.

    Returns:
        A Compose of them; a single Compose as it is.

    Raises:
        ConfigError: a name, an argument or a value is wrong; the message names the step and what is known.
    """
    _check_plain(steps, "transform")
    if not steps:
        raise ConfigError("transform is an empty list of steps; the preset 'none' leaves images as they are")
    forms = _forms(steps, "transform")
    is_pipeline = len(forms) == 1 and forms[0][_NAME] == "Compose"
    return _made(forms[0] if is_pipeline else {_NAME: "Compose", "transforms": forms})


def _made(form: dict[str, Any]) -> Any:
    library = albumentations()
    with _without_torch():
        return library.from_dict({"transform": form})


def _forms(steps: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(steps, list):
        raise ConfigError(f"{where}: expected is a list of steps, got {_cut(steps)}")
    return [_form(step, f"{where} step {number}") for number, step in enumerate(steps, 1)]


def _form(step: Any, where: str) -> dict[str, Any]:
    """A step as `from_dict` takes it, which then makes a transform of an image alone."""
    if not isinstance(step, dict) or len(step) != 1:
        raise ConfigError(f"{where}: expected is one NAME: {{argument: value, …}}, got {_cut(step)}")
    ((name, arguments),) = step.items()
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ConfigError(f"{where}: expected is {name}: {{argument: value, …}}, got {_cut(arguments)}")
    kind = _class_of(name, where)
    where = f"{where}, {name}"
    parameters = dict(inspect.signature(kind).parameters)
    form = {_NAME: name, "p": parameters["p"].default, **arguments}  # it would take 0.5 where there is no p
    is_composition = issubclass(kind, albumentations().BaseCompose)
    if is_composition:  # the transforms of OneOrOther have two names each
        parameters = {each: of for each, of in parameters.items() if each not in ("first", "second", "kwargs")}
    for argument in arguments:
        if argument not in parameters:
            meant = _meant(argument, parameters) or ";"
            raise ConfigError(f"{where}: there is no argument {argument!r}{meant} {_known(parameters)}")
    if is_composition:
        _check_composition(arguments, where)
        form["transforms"] = _forms(arguments["transforms"], where)
    elif kind.__init__.__code__.co_flags & inspect.CO_VARKEYWORDS:
        # Around most constructors there is a check of Albumentations', which warns and takes the defaults where it
        # fails itself.
        form["strict"] = True
    try:
        made = _made(form)
    except Exception as error:
        raise ConfigError(f"{where}: {_reason(error, arguments)}; {_known(parameters)}") from error
    needed = {*getattr(made, "targets_as_params", ()), *_NEED.get(name, ())} - {"image"}
    if "image" not in made.available_keys:
        needed = {"volume"}
    if needed:
        what = ", ".join(sorted(needed))
        raise ConfigError(f"{where}: it needs {what}, and a step must do with the image alone: leave it out")
    return form


def _class_of(name: str, where: str) -> Any:
    """The public transform of Albumentations that has a name; raises ConfigError."""
    library = albumentations()
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
    if not found[name].is_serializable():
        raise ConfigError(f"{where}: {name} needs a Python function: give the whole pipeline as module:function")
    return found[name]


def _check_composition(arguments: dict[str, Any], where: str) -> None:
    """What a composition is given it hardly checks."""
    if not arguments.get("transforms"):
        raise ConfigError(f"{where}: transforms are missing: expected is a list of steps")
    p, n = arguments.get("p", 1), arguments.get("n", 1)
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        raise ConfigError(f"{where}: p must be in [0, 1], got {_cut(p)}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError(f"{where}: n must be a whole number of at least 1, got {_cut(n)}")
    for name in ("bbox_params", "keypoint_params", "additional_targets"):
        if arguments.get(name):
            what = "transform.mask_column and transform.boxes_column say what goes with the image"
            raise ConfigError(f"{where}: leave out {name}: {what}")
    if arguments.get("seed") is not None:
        raise ConfigError(f"{where}: leave out seed: each sample has one of its own, from plan.seed")


def _check_plain(content: Any, where: str) -> None:
    """Raise ConfigError unless it is lists, dicts with names as keys, and scalars; not too many, not too deep."""
    todo, num_values, num_characters = [(content, 0)], 0, 0
    while todo:
        value, depth = todo.pop()
        num_values += 1
        num_characters += len(value) if isinstance(value, str) else 1
        if num_values > _MAX_VALUES or num_characters > _MAX_BYTES:
            limits = f"{_MAX_VALUES:,} names and values, or {_MAX_BYTES:,} characters"
            raise ConfigError(f"{where}: more than {limits}")
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{where}: nested more than {_MAX_DEPTH} deep")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise ConfigError(f"{where}: expected is a name, got {_cut(key)}")
            todo += [(each, depth + 1) for item in value.items() for each in item]
        elif isinstance(value, list | tuple):
            todo += [(each, depth + 1) for each in value]
        elif not isinstance(value, str | int | float | None):
            raise ConfigError(f"{where}: {_cut(value)} is a {type(value).__name__}, which is no argument")


def _reason(error: Exception, arguments: dict[str, Any]) -> str:
    """What was wrong with arguments, on one line."""
    errors = getattr(error.__cause__, "errors", None)  # of Pydantic, by which Albumentations checks values
    if errors is None:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    reasons = []
    for each in errors():
        name = str(each["loc"][0]) if each["loc"] else ""
        reason = f"{name} is missing" if each["type"] == "missing" else each["msg"]
        reasons.append(f"{name}: {reason}, got {_cut(arguments[name])}" if name in arguments else reason)
    return "; ".join(dict.fromkeys(reasons))


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 3, 0.7)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _known(names: Iterable[str]) -> str:
    return f"known are {', '.join(names)}"


def _cut(value: Any) -> str:
    """A value for a message, however long or large it is."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text[:80] + "…") if len(text) > 80 else repr(value)
