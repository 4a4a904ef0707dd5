"""Pipelines of the libraries that raypipe knows by the names of their classes, and need not import."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from raypipe.errors import ConfigError
from raypipe.importing import is_of
from raypipe.kernel import Program

TransformKind = Literal[
    "none", "program", "albumentations", "torchvision", "pil", "plain"
]
"""Kind of a transform; "pil" is an old one of torchvision, "torchvision" one of v2, or a module of torch."""


RANDOM_STATE = re.compile(
    r"(_configured_|_concurrent_)?(random_generator|py_random)|_thread_rng_streams|_manual_random_state|"
    r"_rng_(context|initialized|epoch|process_id|source_thread_id)"
)
"""Names of attributes by which a pipeline of Albumentations and its steps draw."""
_KINDS: dict[str, TransformKind] = {
    "albumentations.": "albumentations",
    "torchvision.transforms.v2.": "torchvision",
    "torchvision.transforms.": "pil",
    "torch.nn.modules.module": "torchvision",
}


def transform_kind(transform: Any) -> TransformKind:
    """The kind of a transform; raises ConfigError if it is none."""
    if transform is None:
        return "none"
    if isinstance(transform, Program):
        return "program"
    if not callable(transform):
        raise ConfigError(
            f"the transform is a {type(transform).__name__}, which cannot be called"
        )
    for cls in type(transform).__mro__:
        for modules, kind in _KINDS.items():
            if cls.__module__.startswith(modules):
                return kind
    return "plain"


def steps_of(pipeline: Any) -> Sequence[Any] | None:
    """The steps of a plain sequence of steps; None: it is something else."""
    kind = type(pipeline)
    package = kind.__module__.partition(".")[0]
    if has_hooks(pipeline):
        return None
    is_compose = kind.__name__ == "Compose" and getattr(pipeline, "p", 1) == 1
    if is_compose and package in ("albumentations", "torchvision"):
        return list(pipeline.transforms)
    if package == "torch" and kind.__name__ == "Sequential":
        return list(pipeline)
    return None


def is_compose(pipeline: Any) -> bool:
    """True for a Compose of Albumentations', and none of a subclass."""
    kind = getattr(sys.modules.get("albumentations"), "Compose", None)
    return type(pipeline) is kind


def has_hooks(step: Any) -> bool:
    """True for a module of torch's that calls more than itself."""
    attributes = getattr(step, "__dict__", {})
    return any(value for name, value in attributes.items() if name.endswith("_hooks"))


def rebuilt(pipeline: Any, steps: list[Any]) -> Any:
    """A pipeline like another one, of other steps."""
    kind = type(pipeline)
    if kind.__name__ == "Sequential":
        return kind(*steps)
    if kind.__module__.startswith("torchvision."):
        return kind(steps)
    pipeline = copy.copy(pipeline)  # the copy keeps its boxes and other targets
    pipeline.transforms = steps
    return copy.copy(pipeline)  # AlbumentationsX looks at the steps of a copy


def leaves(pipeline: Any) -> Iterator[Any]:
    """The steps of a pipeline, and of the pipelines in it."""
    steps = steps_of(pipeline)
    if steps is None and is_composition(pipeline):  # one of several, or by chance
        steps = getattr(pipeline, "transforms", None)
    if not isinstance(steps, list | tuple):
        yield pipeline
        return
    for step in steps:
        yield from leaves(step)


def flat(pipeline: Any) -> Iterator[Any]:
    """The steps of a pipeline, and of the plain sequences of steps in it."""
    steps = steps_of(pipeline)
    if steps is None:
        yield pipeline
        return
    for step in steps:
        yield from flat(step)


def shortened(pipeline: Any, num_steps: int) -> Any:
    """A pipeline of the first steps of another one's `flat`; None: there are none, and nothing else is in it."""
    steps = steps_of(pipeline)
    if steps is None:
        return pipeline if num_steps else None
    kept = []
    for step in steps:
        first_steps = shortened(step, num_steps)
        if first_steps is not None:
            kept.append(first_steps)
        num_steps = max(0, num_steps - len(list(flat(step))))
    is_more = getattr(pipeline, "processors", None) or getattr(
        pipeline, "additional_targets", None
    )
    return rebuilt(pipeline, kept) if kept or is_more else None


def has_user_code(pipeline: Any) -> bool:
    """True if a pipeline of a library has steps of the user's, which may draw from any generator."""
    if pipeline is None or isinstance(pipeline, Program):
        return False
    return any(
        package_of(step) == "" or type(step).__name__ == "Lambda"
        for step in leaves(pipeline)
    )


def is_composition(step: Any) -> bool:
    """True for a library's step that is made of others, not of functions as Albumentations' ColorJitter."""
    if package_of(step) == "albumentations":
        return is_of(step, "albumentations", "BaseCompose")
    return package_of(step) != "" and hasattr(step, "transforms")


def package_of(step: Any) -> str:
    """The library that a step is of; empty: it is the user's."""
    package = type(step).__module__.partition(".")[0]
    if package in ("albumentations", "torchvision", "torch"):
        return package
    return ""
