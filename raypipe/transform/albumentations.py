"""Pipelines of Albumentations: the steps that raypipe makes itself, and a description of all steps.

AlbumentationsX, its successor, has the same module. It has other names for some attributes of steps, and keeps its
generators for one thread.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from typing import Any

import numpy as np

from raypipe.kernel import Program, Step, native_step
from raypipe.transform.pipelines import (
    RANDOM_STATE,
    has_user_code,
    is_compose,
    package_of,
)

_RENAMED = {
    "brightness_range": "brightness",
    "contrast_range": "contrast",
    "saturation_range": "saturation",
    "hue_range": "hue",
    "blur_range": "blur_limit",
    "sigma_range": "sigma_limit",
}
# Options that only AlbumentationsX has, with the values that the other library stands for.
_ADDED = {"sampling_method": "standard", "group_element": None, "group_elements": None}
_OURS = {"codes", "spread"}  # fields of steps that the library does not have


def _native(step: Any) -> Step | None:
    """The step of a transform of Albumentations', None = it is unknown here."""
    name = type(step).__name__
    if type(step) is not getattr(sys.modules["albumentations"], name, None):
        return None
    arguments = {_RENAMED.get(key, key): value for key, value in vars(step).items()}
    if any(arguments.get(key, value) != value for key, value in _ADDED.items()):
        return None
    native = native_step(name, arguments)
    if native and {field.name for field in fields(native)} - _OURS - arguments.keys():
        return None  # a release that has other names
    return native


def why_no_program(pipeline: Any) -> str:
    """Say in a few words, which name the step, why a pipeline is not a program as a whole; empty: it is one."""
    program, remaining_steps = find_program(pipeline)
    if program and not remaining_steps:
        return ""
    if not is_compose(pipeline):
        return f"{type(pipeline).__name__} is not a list of Albumentations' steps"
    for step in pipeline.transforms:
        if _native(step) is None:
            return f"the step {type(step).__name__} is not among those that raypipe makes itself"
    return "its images have no fixed size, or it is more than its steps (boxes, a chance, saved parameters)"


def find_program(pipeline: Any) -> tuple[Program | None, list[Any]]:
    """The program that a pipeline begins with, and the steps of Albumentations' that are left after it.

    None: the library does it all. That is so where the first step is not known, where what the program would make
    has no fixed size, and where the pipeline is more than its steps (a chance, boxes, saved parameters, …).

    Args:
        pipeline: a program, an Albumentations Compose, or any transform.
    """
    if isinstance(pipeline, Program):
        return pipeline, []
    if not is_compose(pipeline):
        return None, []
    special = (
        pipeline.processors
        or pipeline.additional_targets
        or pipeline.save_applied_params
    )
    steps = list(pipeline.transforms)
    replays = any(
        getattr(step, "deterministic", False) or getattr(step, "replay_mode", False)
        for step in steps
    )
    if special or replays or pipeline.p != 1:
        return None, []
    native = list[Step]()
    for step in steps:
        native_step = _native(step)
        if native_step is None:
            break
        native.append(native_step)
    program = Program(native)
    remaining_steps = steps[len(native) :]
    return (program, remaining_steps) if native and program.size else (None, [])


# A step draws from generators that raypipe seeds; the rest follows from its class or its other attributes.
_NOT_DECIDING = (
    "seed",
    "_key2func",
    "params",
    "invalid_args",
)


def described(pipeline: Any) -> dict[str, Any] | None:
    """Return a pipeline of the library's own steps as JSON, from which `from_dict` makes the same one.

    None: it has steps of the user's, or the library's own description leaves some of their arguments out.
    """
    if package_of(pipeline) != "albumentations" or has_user_code(pipeline):
        return None
    library = sys.modules["albumentations"]
    try:
        description = json.loads(json.dumps(library.to_dict(pipeline)))
        is_whole = _state(library.from_dict(description)) == _state(pipeline)
    except Exception:  # a library raises any type for steps that it cannot describe
        return None
    return description if is_whole else None


def _state(pipeline: Any) -> Any:
    """Return the values that decide the result of a pipeline, as JSON, where 0 equals 0.0."""
    return json.loads(json.dumps(pipeline, default=_parts_of))


def _parts_of(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return [value.dtype.str, value.tolist()]
    name = type(value).__name__
    if not type(value).__module__.startswith("albumentations."):
        return name
    return [
        name,
        {
            key: inner
            for key, inner in value.__getstate__().items()
            if key not in _NOT_DECIDING and not RANDOM_STATE.fullmatch(key)
        },
    ]
