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
from raypipe.transform.ending import Ending, take_ending
from raypipe.transform.pipelines import transform_kind
from raypipe.transform.presets import imported
from raypipe.transform.transform_steps import Steps, brief, build_steps

_ENDING_STEPS = {"Normalize", "ToFloat", "ToTensorV2"}


def take_endings(
    transforms: Mapping[Split, Any], config: TransformConfig
) -> tuple[dict[Split, Any], dict[Split, Ending]]:
    """Split the transforms of a stream, values of `transform.train` or objects, into the rest and the endings.

    Raises:
        ConfigError: a pipeline of one split normalizes, and that of the other does not; or views differ.
    """
    if config.decode_as == "array":  # arrays may be floats, which the library makes
        return dict(transforms), {}
    rests = dict[Split, Any]()
    endings = dict[Split, Ending]()
    for split, transform in transforms.items():
        rests[split], ending = _taken(transform, config.final_size)
        if ending:
            endings[split] = ending
    for split in transforms.keys() - endings.keys():
        for other_split, ending in endings.items():
            _check_agreement(split, transforms[split], other_split, ending)
            endings[split] = replace(ending, on_device=True, because="", is_own=False)
            break
    return rests, endings


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


def _taken(transform: Any, size: int) -> tuple[Any, Ending | None]:
    if transform is None or isinstance(transform, str):
        if transform is None or ":" not in transform:
            return transform, None
        # actors build it by its name
        return transform, take_ending(imported(transform, size))[1]
    if isinstance(transform, Mapping):
        return _taken_from_views(transform, size)
    if isinstance(transform, list):
        return _taken_from_steps(transform)
    return take_ending(transform)


def _taken_from_steps(steps: Steps) -> tuple[Any, Ending | None]:
    built = build_steps(steps)
    without_ending, ending = take_ending(built)
    if without_ending is built:
        return steps, ending
    kept = list(steps)
    while kept and _ENDING_STEPS & kept[-1].keys():
        kept.pop()
    if len(kept) == len(steps):  # they are in a pipeline within the list
        return without_ending, ending
    return kept or "none", ending


def _taken_from_views(
    views: Mapping[str, Any], size: int
) -> tuple[dict[str, Any], Ending | None]:
    """Split views, which must end alike; presets among them follow the others."""
    rests = dict[str, Any]()
    ending_by_view = dict[str, Ending | None]()

    def taken(name: str, transform: Any) -> Any:
        without_ending, ending = _taken(transform, size)
        is_preset = transform is None or (
            isinstance(transform, str) and ":" not in transform
        )
        if not is_preset:
            before = ending_by_view.setdefault(name, ending)
            first = next(iter(ending_by_view.values()))
            if (ending and ending.described) != (
                first and first.described
            ) or before != ending:
                raise ConfigError(
                    f"view {name!r} ends with {_described(ending)}, and view {next(iter(ending_by_view))!r} with "
                    f"{_described(first)}: end the pipelines of all views alike"
                )
        return without_ending

    for name, entry in views.items():
        if isinstance(entry, tuple) and len(entry) == 2:
            rests[name] = (taken(name, entry[0]), entry[1])
        elif not isinstance(entry, Mapping):
            rests[name] = taken(name, entry)
        elif isinstance(entry.get("transforms"), list | tuple):
            rests[name] = {
                **entry,
                "transforms": [
                    taken(name, entry_transform)
                    for entry_transform in entry["transforms"]
                ],
            }
        else:
            rests[name] = {**entry, "transform": taken(name, entry.get("transform"))}
    return rests, next(filter(None, ending_by_view.values()), None)


def _described(ending: Ending | None) -> str:
    if ending:
        return f"{ending.steps} ({ending.described})"
    return "no step that makes floats"
