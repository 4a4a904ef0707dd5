"""Endings of a stream's transforms: taken from the pipelines of its splits, before these go to the actors.

A preset has none, and takes the other split's. Two pipelines with different endings keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raypipe.config import TransformConfig
from raypipe.errors import ConfigError
from raypipe.plan.places import Split
from raypipe.transform.ending import Ending, WithoutEnding, take_ending
from raypipe.transform.pipelines import flat, transform_kind
from raypipe.transform.presets import imported
from raypipe.transform.transform_steps import Steps, brief, build_steps
from raypipe.transform.views import find_views


def take_endings(
    transforms: Mapping[Split, Any], config: TransformConfig
) -> tuple[dict[Split, Any], dict[Split, Ending]]:
    """Split the transforms of a stream, values of `transform.train` or objects, into the rest and the endings.

    Raises:
        ConfigError: a pipeline of one split normalizes, and that of the other does not; or views differ.
    """
    if config.decode == "array":  # arrays may be floats, which the library makes
        return dict(transforms), {}
    without_endings = dict[Split, Any]()
    endings = dict[Split, Ending]()
    for split, transform in transforms.items():
        without_endings[split], ending = _taken(transform, config.final_size)
        if ending:
            endings[split] = ending
    for split in transforms.keys() - endings.keys() if endings else ():
        ((other_split, ending),) = endings.items()
        _check_agreement(split, transforms[split], other_split, ending)
        endings[split] = replace(ending, because="", is_own=False)
    return without_endings, endings


def _check_agreement(
    split: Split, transform: Any, other_split: Split, ending: Ending
) -> None:
    """Raise ConfigError for a library's pipeline without an ending, where the other split has one."""
    is_pipeline = isinstance(transform, list | Mapping)
    if not isinstance(transform, str | list | Mapping):
        kind = transform_kind(transform)
        is_pipeline = kind not in ("none", "program", "plain")
    if is_pipeline and ending.normalizes:
        raise ConfigError(
            f"transform.{other_split} ends with {ending.steps}, and transform.{split} is {brief(transform)} "
            "without it: the model would see two kinds of images; end both alike, or use a preset for one, "
            "which takes the other's normalization"
        )


def _taken(transform: Any, size: int) -> WithoutEnding:
    if _is_named(transform):
        return transform, None
    if isinstance(transform, str):  # actors build it by its name
        return transform, take_ending(imported(transform, size))[1]
    if isinstance(transform, Mapping):
        return _taken_from_views(transform, size)
    if isinstance(transform, list):
        return _taken_from_steps(transform)
    return take_ending(transform)


def _taken_from_steps(steps: Steps) -> WithoutEnding:
    pipeline = build_steps(steps)
    without_ending, ending = take_ending(pipeline)
    if without_ending is pipeline:
        return steps, ending
    if without_ending is None:
        return "none", ending
    if len(list(flat(pipeline))) != len(steps):
        # They are in a pipeline within the list.
        return without_ending, ending
    return steps[: len(list(flat(without_ending)))], ending


def _taken_from_views(
    views: Mapping[str, Any], size: int
) -> tuple[dict[str, Any], Ending | None]:
    """Split views, which must end alike; presets among them follow the others."""
    without_endings = dict[str, Any]()
    found = list[tuple[str, Ending | None]]()
    for name, view in find_views(views, size).items():
        kept = list[Any]()
        for transform in view.transforms:
            without_ending, ending = _taken(transform, size)
            kept.append(without_ending)
            if not _is_named(transform):
                found.append((name, ending))
        without_endings[name] = replace(view, transforms=tuple(kept))
    first_name, first = found[0] if found else ("", None)
    for name, ending in found:
        if (ending and ending.described) != (first and first.described):
            raise ConfigError(
                f"view {name!r} ends with {_described(ending)}, and view {first_name!r} with "
                f"{_described(first)}: end the pipelines of all views alike"
            )
    return without_endings, first


def _is_named(transform: Any) -> bool:
    """True for a preset, or nothing."""
    return transform is None or (isinstance(transform, str) and ":" not in transform)


def _described(ending: Ending | None) -> str:
    if ending:
        return f"{ending.steps} ({ending.described})"
    return "no step that makes floats"
