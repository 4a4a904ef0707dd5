"""Sections of settings: frozen dataclasses whose fields are checked by their types, as on the command line.

    kind            accepts                                     converts to
    int             whole numbers, also numpy's, not bools      int, by default in [0, 2^31)
    float           numbers, also numpy's, not bools            int or float, by default finite and at least 0
    str             strings without NUL, and paths              str
    bool, Literal   these values, of exactly this type          the value
    list, tuple     lists, tuples and arrays                    list or tuple
    dict            mappings                                    dict
    a class         its instances                               the value

`Annotated[int, Limits(…)]` sets other limits, unions are tried in order, and Any accepts everything.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from raypipe.errors import ConfigError
from raypipe.mistakes import check_keywords

MAX_INT = (1 << 31) - 1
_MAX_FLOAT = sys.float_info.max
# Limits beyond this only prevent overflows, so messages show them only to values that exceed them.
_SHOWN = 1000


class Limits(NamedTuple):
    """Range of a setting's numbers, which never includes NaN.

    Attributes:
        minimum, maximum: the bounds.
        above, below: whether the range excludes these bounds.
    """

    minimum: float = 0
    maximum: float = _MAX_FLOAT
    above: bool = False
    below: bool = False

    def hold(self, value: float) -> bool:
        """Return whether a number is within the limits."""
        if self.above:
            is_large_enough = self.minimum < value
        else:
            is_large_enough = self.minimum <= value
        if self.below:
            return is_large_enough and value < self.maximum
        return is_large_enough and value <= self.maximum

    def words(self, kind: type, value: object) -> str:
        """Describe the limits, for the message about a value."""
        number = value if type(value) in (int, float) else math.nan
        low = self.minimum > -_SHOWN or number < self.minimum  # type: ignore[operator]
        high = self.maximum < _SHOWN or math.inf > number > self.maximum  # type: ignore[operator]
        if low and high and not (self.above or self.below):
            within = f" from {self.minimum} to {self.maximum}"
        else:
            ends = [
                f"above {self.minimum}" if self.above else f"of at least {self.minimum}"
            ] * low
            ends += [
                f"below {self.maximum}" if self.below else f"at most {self.maximum}"
            ] * high
            within = f" {' and '.join(ends)}" if ends else ""
        if kind is int:
            noun = "a whole number"
        elif self.maximum < _SHOWN:
            noun = "a number"
        else:
            noun = "a finite number"
        return noun + within


_DEFAULT = {int: Limits(maximum=MAX_INT), float: Limits()}
ANY_NUMBER = Limits(-math.inf, math.inf)


class _UnfitError(Exception):
    """A value, or an item of it at a path such as `[0]['size']`, has the wrong kind."""

    def __init__(self, kind: Any, value: object, path: tuple[object, ...]) -> None:
        self.kind = kind
        self.value = value
        self.path = path


def check(name: str, value: object, kind: Any) -> Any:
    """Convert a value to a kind, see the module's table; raise ConfigError, with the name, if it does not fit."""
    try:
        return _as_kind(value, kind)
    except _UnfitError as error:
        path = "".join(f"[{shown(key)}]" for key in error.path)
        description = expected(error.kind, error.value)
        raise ConfigError(
            f"{name}{path} must be {description}, got {shown(error.value)}"
        ) from None


def _as_kind(value: Any, kind: Any, path: tuple[object, ...] = ()) -> Any:
    if kind is Any:
        return value
    if hasattr(value, "tolist") and not isinstance(value, type):
        # numpy's and torch's numbers and arrays
        value = value.tolist()
    plain, limits = _parts(kind)
    origin = get_origin(plain)
    parts = get_args(plain)
    if limits is not None:
        if _is_number(value, plain) and (limits is ANY_NUMBER or limits.hold(value)):
            return value
    elif plain is str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(text, str) and "\0" not in text:
            return str(text)
    elif origin is Literal:
        if isinstance(value, str) and value in parts:
            return str(value)
    elif origin in (Union, UnionType):
        return _as_one_of(value, kind, parts, path)
    elif origin in (list, tuple):
        if isinstance(value, list | tuple):
            return origin(
                [
                    _as_kind(entry, parts[0], (*path, number))
                    for number, entry in enumerate(value)
                ]
            )
    elif origin is dict:
        if isinstance(value, Mapping) and all(fits(key, parts[0]) for key in value):
            return {
                _as_kind(key, parts[0]): _as_kind(entry, parts[1], (*path, key))
                for key, entry in value.items()
            }
    elif isinstance(value, plain):
        return value
    raise _UnfitError(kind, value, path)


def _is_number(value: Any, kind: type) -> bool:
    """Return whether a value is an integer, or, for float, a number; a bool is neither."""
    accepted = int if kind is int else int | float
    return isinstance(value, accepted) and not isinstance(value, bool)


def _parts(kind: Any) -> tuple[Any, Limits | None]:
    """Return a kind without its limits, and the limits; None = not a number."""
    plain, *limits = get_args(kind) if get_origin(kind) is Annotated else [kind]
    return plain, limits[0] if limits else _DEFAULT.get(plain)


def fits(value: Any, kind: Any) -> bool:
    """Return whether `check` accepts a value."""
    try:
        _as_kind(value, kind)
    except _UnfitError:
        return False
    return True


def _as_one_of(
    value: Any, kind: Any, parts: tuple[Any, ...], path: tuple[object, ...]
) -> Any:
    """Convert to the first alternative that fits; else raise the error of one that fits except for an item."""
    nearest = _UnfitError(kind, value, path)
    for alternative in parts:
        try:
            return _as_kind(value, alternative, path)
        except _UnfitError as error:
            nearest = error if len(error.path) > len(path) else nearest
    raise nearest


def expected(kind: Any, value: object = None) -> str:
    """Describe what a value must be; a number's large limits are omitted unless the value exceeds them."""
    *first, last = dict.fromkeys(_alternatives(kind, value))
    return f"{', '.join(first)} or {last}" if first else last


def _alternatives(kind: Any, value: object, inside: bool = False) -> list[str]:
    plain, limits = _parts(kind)
    origin = get_origin(plain)
    parts = get_args(plain)
    if origin in (Union, UnionType):
        return [
            words
            for alternative in parts
            for words in _alternatives(alternative, value, inside)
        ]
    if origin is Literal:
        return [*map(repr, parts)]
    if plain is bool:
        return ["true", "false"]
    if limits is not None and not inside:
        return ["a number" if limits is ANY_NUMBER else limits.words(plain, value)]
    within = [
        "/".join(_alternatives(alternative, None, True))
        for alternative in parts
        if alternative is not ...
    ]
    if origin in (list, tuple):
        return [f"[{within[0]}, …]"]
    if origin is dict:
        return [f"{{{within[0]}: {within[1]}, …}}"]
    noun = _NOUNS.get(plain, getattr(plain, "__name__", str(plain)))
    return [
        noun
        if inside or plain is NoneType
        else f"{'an' if noun[0] in 'AEIOU' else 'a'} {noun}"
    ]


_NOUNS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "string",
    NoneType: "none",
    type: "class",
    Any: "value",
}
_NOUNS[Callable] = "module"


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = 200
        self.maxother = 200
        self.maxlong = 60

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to format longer integers, and the message would contain that error.
        if x.bit_length() < 10_000:
            return super().repr_int(x, level)
        return f"an integer of {x.bit_length()} bits"


shown = _Shown().repr
"""Format a value for a message: its repr, shortened if long, safe for any value."""


@cache
def kinds_of(section: type) -> dict[str, Any]:
    """Return the type of each field of a section."""
    hints = get_type_hints(section, include_extras=True)
    return {setting.name: hints[setting.name] for setting in fields(section)}


@dataclass(frozen=True)
class Section:
    """Base class of settings that are checked by their types, also in scripts without the command line."""

    _prefix: ClassVar[str]

    def __init_subclass__(cls, prefix: str) -> None:
        cls._prefix = prefix

    def __new__(cls, *arguments: object, **settings: object) -> Self:
        check_keywords(cls.__name__, settings, kinds_of(cls))  # type: ignore[arg-type] # a class is hashable
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, kind in kinds_of(type(self)).items():  # type: ignore[arg-type] # a class is hashable
            value = check(self._prefix + name, getattr(self, name), kind)
            object.__setattr__(self, name, value)  # the class is frozen

    def _require(self, ok: bool, name: str, expected: str) -> None:
        if not ok:
            value = shown(getattr(self, name))
            raise ConfigError(f"{self._prefix}{name} must be {expected}, got {value}")


class Ramped(Section, prefix=""):
    """Section with a strength that follows the run."""

    strength = cast(Any, 1.0)

    @property
    def _ramp(self) -> tuple[float, ...]:
        if isinstance(self.strength, tuple):
            return self.strength
        return (0.0, self.strength, 0.0)

    def _check_strength(self) -> None:
        ok = len(self._ramp) == 3
        self._require(ok, "strength", "a number, or [RISE, PEAK, FALL]")
        ok = self._ramp[0] + self._ramp[2] <= 1
        self._require(ok, "strength", "[RISE, PEAK, FALL] with RISE + FALL at most 1")

    def strength_at(self, progress: float) -> float:
        """Return the strength at a share of the run, in [0, 1]."""
        rise, peak, fall = self._ramp
        if progress < rise:
            return peak * progress / rise
        if progress > 1 - fall:
            return peak * (1 - progress) / fall
        return peak


def is_section(kind: Any) -> bool:
    """Return whether a type is a section of settings."""
    return isinstance(kind, type) and issubclass(kind, Section)


class Setting(NamedTuple):
    """A setting: its type, its default, and its text in the docstring of its section."""

    kind: Any
    default: Any
    about: str


def settings_of(section: type[Section]) -> dict[str, Setting]:
    """Collect the settings of a section and its sections by whole names, such as `augment.strength`."""
    settings: dict[str, Setting] = {}
    default = section()
    about = texts_of(section)
    for name, kind in kinds_of(section).items():  # type: ignore[arg-type] # a class is hashable
        if is_section(kind):
            settings |= settings_of(kind)
        else:
            settings[section._prefix + name] = Setting(
                kind, getattr(default, name), about.get(name, "")
            )
    return settings


def build(section: type[Section], values: Mapping[str, Any]) -> Any:
    """Build a section from settings by whole name, with defaults for others; raise ConfigError for a wrong one."""
    by_name: dict[str, Any] = {}
    for name, kind in kinds_of(section).items():  # type: ignore[arg-type]
        if is_section(kind):
            by_name[name] = build(kind, values)
        elif section._prefix + name in values:
            by_name[name] = values[section._prefix + name]
    return section(**by_name)


def texts_of(documented: Any) -> dict[str, str]:
    """Parse the docstring of a section or a function: the text of each attribute or argument."""
    entries = re.findall(
        r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(documented) or "", re.MULTILINE
    )
    return {name: " ".join(text.split()) for name, text in entries}
