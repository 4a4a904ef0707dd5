"""A user's own source, `module:name`: an iterable of samples, or a function that returns one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
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
    num = len(samples) if isinstance(samples, Sized) else None
    return Source(
        _without_label(samples, asked),
        None if classes is None else tuple(map(str, classes)),
        num,
    )


def _without_label(samples: Iterable[Any], asked: Asked) -> Iterator[Any]:
    for sample in samples:
        if not asked.label and isinstance(sample, dict):
            yield {name: value for name, value in sample.items() if name != "label"}
        else:
            yield sample
