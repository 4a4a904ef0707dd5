"""Errors that raypipe raises on purpose.

    RaypipeError
    ├── ConfigError        a setting is wrong, or two settings contradict each other
    ├── StoreError         a store is missing or broken, has an unknown layout, or lacks a column
    ├── SampleError        a sample cannot be read, decoded or transformed
    │   └── TransformError  the user's code failed on a sample
    ├── BadSamplesError    the number of bad samples exceeds the run's limit
    ├── ResourceError      the cluster lacks resources for the run
    │   └── NoRoomError        it had none in time, and may have them later: the same command tries again
    ├── OutageError        storage was unavailable for too long; a run returns to its last checkpoint
    ├── RunError           an error of other code, or the death of its trainers, ended a run
    └── CursorError        a checkpoint belongs to another plan

Each message names the file, key, field or resource, and a remedy. All errors survive pickling, since most are
raised in one process and read in another. None shows a credential.
"""

from __future__ import annotations

import re

# A login before a host, whose password may contain slashes; anonymous@ and Azure's container@ are not logins.
_LOGIN = re.compile(r"://[^\s@/:]*:\S*@|(?<!abfs)(?<!abfss)://(?!anonymous@)[^\s@/]+@")
# The value of an option, such as a token's `sig`.
_OPTION = re.compile(r"(?<=[?&])([\w.-]+=)[^\s&'\"]+")


def without_credentials(text: str) -> str:
    """Replace logins and option values of addresses in a text with …."""
    return _OPTION.sub(r"\1…", _LOGIN.sub("://…@", text))


DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of taking apart a value that is damaged, or that somebody else wrote."""


class RaypipeError(Exception):
    """Base class of the errors that raypipe raises on purpose; messages never show credentials of an address."""

    def __init__(self, *args: object) -> None:
        super().__init__(
            *(without_credentials(arg) if isinstance(arg, str) else arg for arg in args)
        )


class ConfigError(RaypipeError, ValueError):
    """A setting is wrong, or two settings contradict each other."""


class StoreError(RaypipeError):
    """A store is missing or broken, has an unknown layout, or lacks a column."""


class SampleError(RaypipeError):
    """A sample cannot be read, decoded or transformed.

    Attributes:
        fault: cause of the failure, for records of bad samples: store or transform.
        advice: the remedy.
    """

    fault = "store"
    advice = "repair the store"


class TransformError(SampleError):
    """The user's transform, or function of columns, failed on a sample."""

    fault = "transform"
    advice = "fix the transform: with pool.engine=inline a debugger stops in it"


class BadSamplesError(RaypipeError):
    """The number of bad samples exceeds the run's limit."""


class ResourceError(RaypipeError):
    """The cluster lacks resources for the run."""


class NoRoomError(ResourceError):
    """The cluster had no free resources in time, and may have them later."""


class OutageError(RaypipeError):
    """Storage was unavailable for too long. Unlike other errors, this one is retried like a death."""


class RunError(RaypipeError):
    """An error of other code, or the death of its trainers, ended a run."""


class CursorError(RaypipeError):
    """A checkpoint belongs to another plan."""
