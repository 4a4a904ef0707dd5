"""Every error that raypipe raises on purpose.

    RaypipeError
    ├── ConfigError        a setting is wrong, or two settings contradict each other
    ├── StoreError         a store is missing, broken, of an unknown layout, or was asked for what it lacks
    ├── SampleError        one sample cannot be read, decoded or transformed
    │   └── TransformError  the user's code failed on it
    ├── BadSamplesError    more bad samples than the run was told to tolerate
    ├── ResourceError      the cluster lacks what the run needs
    ├── OutageError        storage has been waited for in vain; a run goes back to its last checkpoint
    ├── RunError           a run was ended by an error of other code, or by the death of its trainers
    └── CursorError        a checkpoint belongs to another plan

Each message names the file, key, field or resource, and what to do about it. All of them survive
pickling, since most are raised in one process and read in another. None shows a credential.
"""

from __future__ import annotations

import re

# The part before a host: a login, whose password may hold slashes, but for anonymous@ and Azure's container@.
_LOGIN = re.compile(r"://[^\s@/:]*:\S*@|(?<!abfs)(?<!abfss)://(?!anonymous@)[^\s@/]+@")
# The value of an option, such as a token's `sig`.
_OPTION = re.compile(r"(?<=[?&])([\w.-]+=)[^\s&'\"]+")


def without_credentials(text: str) -> str:
    """Replace with … the logins and the options of addresses in a text."""
    return _OPTION.sub(r"\1…", _LOGIN.sub("://…@", text))


class RaypipeError(Exception):
    """Base class of all errors that raypipe raises on purpose; its message shows no credentials of an address."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_credentials(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(RaypipeError, ValueError):
    """A setting is wrong, or two settings contradict each other."""


class StoreError(RaypipeError):
    """A store is missing, broken, of an unknown layout, or was asked for what it lacks."""


class SampleError(RaypipeError):
    """A sample cannot be read, decoded or transformed.

    Attributes:
        fault: whose fault it is, for records of bad samples.
        advice: the remedy.
    """

    fault = "store"
    advice = "repair the store"


class TransformError(SampleError):
    """The user's transform, or function of columns, failed on a sample."""

    fault = "transform"
    advice = "fix the transform: with pool.engine=inline a debugger stops in it"


class BadSamplesError(RaypipeError):
    """More bad samples than the run was told to tolerate."""


class ResourceError(RaypipeError):
    """The cluster lacks what the run needs."""


class OutageError(RaypipeError):
    """Storage has been waited for in vain. Unlike the others, it counts as something that died."""


class RunError(RaypipeError):
    """A run was ended by an error of other code, or by the death of its trainers."""


class CursorError(RaypipeError):
    """A checkpoint belongs to another plan."""
