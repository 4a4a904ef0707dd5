"""Every error that raypipe raises on purpose.

    RaypipeError
    ├── ConfigError        a setting is wrong, or two settings contradict each other
    ├── StoreError         a store is missing, broken, of an unknown layout, or was asked for what it lacks
    ├── SampleError        one sample cannot be read, decoded or transformed
    ├── BadSamplesError    more bad samples than the run was told to tolerate
    ├── ResourceError      the cluster lacks what the run needs
    └── CursorError        a checkpoint belongs to another plan

Each message names the file, key, field or resource, and what to do about it. All of them survive
pickling, since most are raised in one process and read in another.
"""

from __future__ import annotations


class RaypipeError(Exception):
    """Base class of all errors that raypipe raises on purpose."""


class ConfigError(RaypipeError, ValueError):
    """A setting is wrong, or two settings contradict each other."""


class StoreError(RaypipeError):
    """A store is missing, broken, of an unknown layout, or was asked for what it lacks."""


class SampleError(RaypipeError):
    """One sample cannot be read, decoded or transformed."""


class BadSamplesError(RaypipeError):
    """More bad samples than the run was told to tolerate."""


class ResourceError(RaypipeError):
    """The cluster lacks what the run needs."""


class CursorError(RaypipeError):
    """A checkpoint belongs to another plan."""
