"""A user's own source, `module:name`: an iterable of samples, or a function that returns one."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

from raypipe.errors import ConfigError
from raypipe.importing import import_name
from raypipe.stores.sources.format_source import Asked, Source, check_unasked


def open_user(address: str, asked: Asked) -> Source:
    """Import it; it may have an attribute `classes`, the class names by label."""
    check_unasked("your own function", asked)
    value = import_name(address, "the source", trusted=True)
    samples: Any = value() if callable(value) else value
    if not isinstance(samples, Iterable):
        raise ConfigError(
            f"{address} gives a {type(samples).__name__}: it must be a generator function, or an iterable, of "
            "samples, each a dict such as {'image': bytes, 'label': 3}"
        )
    classes = getattr(value, "classes", None)
    return Source(
        iter(samples) if asked.label else map(_without_label, samples),
        None if classes is None else tuple(map(str, classes)),
        len(samples) if isinstance(samples, Sized) else None,
    )


def _without_label(sample: Any) -> Any:
    if isinstance(sample, dict):
        return {name: value for name, value in sample.items() if name != "label"}
    return sample
