"""Answers to unknown names, and to code that takes raypipe for another library: one line that says what to write.

Type checkers do not see the methods here, so they still report such code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_LOADER = "write raypipe.loader(raypipe.open_stream(…))"
_TARGET = "write batch.target"
_IMAGE = "write batch.image"
_BATCH_SIZE = "write plan=PlanConfig(micro_batch_size=…, global_batch_size=…), the second for a step of all GPUs"
_WORKERS = "GPU workers are ScalingConfig(num_workers=…), CPU actors are pool=PoolConfig(max_actors=…)"
_NOT_NEEDED = (
    "leave it out: raypipe batches, shuffles, shards and moves to the device by itself"
)

DID_YOU_MEAN = "; did you mean "
"""Begins the last part of a message, with names that are near; the command line makes a tip of it."""

NAMES = dict.fromkeys(["Dataset", "ImageFolder", "Loader", "StreamingDataset"], _LOADER)
"""Names that the module raypipe does not have → what to write."""

ATTRIBUTES = {
    **dict.fromkeys(["data", "images", "inputs", "pixel_values", "x"], _IMAGE),
    **dict.fromkeys(["class_index", "label", "labels", "y"], _TARGET),
    "to": "leave it out: the tensors of a batch are on the rank's device",
    "set_epoch": "leave it out: loader.epochs() continues after the last step of the run",
    "dataset": "its stores are in the StreamSpec, as spec.stores",
    "batch_size": "it is loader.plan.config.micro_batch_size",
}
"""Attributes that batches or loaders do not have → what to write."""

KEYWORDS = {
    **dict.fromkeys(["batch_size", "per_device_batch_size"], _BATCH_SIZE),
    **dict.fromkeys(["num_workers", "workers"], _WORKERS),
    **dict.fromkeys(
        ["collate_fn", "drop_last", "persistent_workers", "pin_memory"],
        _NOT_NEEDED,
    ),
    "sampler": "write plan=PlanConfig(sampler=…), see docs/sampling.md",
}
"""Arguments that nothing in raypipe takes → what to write."""


def did_you_mean(near: Iterable[str]) -> str:
    """Return the end of a message about an unknown name; empty if no name is near."""
    names = " or ".join(near)
    return f"{DID_YOU_MEAN}{names}?" if names else ""


def choices(name: str, names: Collection[str], those: str = "choose from") -> str:
    """Return the end of a message about an unknown name: similar names, and all known names.

    Args:
        names: names, or name → text in parentheses after it.
    """
    # makes label close to fine_label
    close = get_close_matches(name, names, cutoff=0.65)
    question = f"did you mean {' or '.join(close)}? " if close else ""
    listed = (
        [f"{entry} ({kind})" for entry, kind in names.items()]
        if isinstance(names, Mapping)
        else names
    )
    return f"; {question}{those} {', '.join(listed)}"


def _answer(
    name: str, answers: Mapping[str, str], names: Collection[str], prefix: str = ""
) -> str:
    """Return the end of a message about an unknown name."""
    by_lower_case = {
        similar.lower(): similar for similar in names if not similar.startswith("_")
    }
    near = get_close_matches(name.lower(), by_lower_case, 1)
    if name in answers:
        return f": {answers[name]}"
    return did_you_mean(prefix + by_lower_case[similar] for similar in near)


def missing_name(name: str, names: Collection[str]) -> AttributeError:
    """Make the error about a name that the module raypipe does not have."""
    return AttributeError(
        f"module 'raypipe' has no attribute {name!r}{_answer(name, NAMES, names, 'raypipe.')}"
    )


def check_keywords(owner: str, keywords: Iterable[str], names: Collection[str]) -> None:
    """Raise TypeError for an argument that a class or function does not have."""
    for name in keywords:
        if name not in names:
            raise TypeError(
                f"{owner} has no argument {name!r}{_answer(name, KEYWORDS, names)}"
            )


def checks_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function with `check_keywords`."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*arguments: P.args, **keywords: P.kwargs) -> R:
        check_keywords(f"raypipe.{function.__name__}", keywords, names)
        return function(*arguments, **keywords)

    return checked


class Unlike:
    """Base class of what is neither a sequence nor a mapping: iterating, indexing and len() say what to write."""

    _instead: ClassVar[str]

    def __init_subclass__(cls, instead: str = "") -> None:
        if instead:
            cls._instead = instead

    if not TYPE_CHECKING:

        def __getitem__(self, key: object) -> None:
            # iterating calls it too, since there is no __iter__
            raise TypeError(
                f"{type(self).__name__} has no items and no length: {self._instead}"
            )

        def __len__(self) -> int:
            return self[0]

        def __bool__(self) -> bool:
            return True

        def __getattr__(self, name: str) -> None:
            owner = type(self)
            names = [*dir(type(self)), *self.__dict__]
            message = f"{owner.__name__} has no attribute {name!r}{_answer(name, ATTRIBUTES, names)}"
            raise AttributeError(message)
