"""The compiled extension: where it comes from, and why it is not there."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

INTERFACE_VERSION = 5
"""Of the extension that this program can call; csrc/kernel.c has the same."""


@functools.cache
def why_missing() -> str:
    """Why there is no extension; empty = there is."""
    try:
        found = importlib.import_module("_raypipe_kernel").INTERFACE_VERSION
    except ImportError as error:
        return f"not built, or its libjpeg-turbo is missing ({error})"
    if found != INTERFACE_VERSION:
        return f"built from another version of raypipe ({found}, not {INTERFACE_VERSION})"
    return ""


def module() -> ModuleType | None:
    """The extension; None: `why_missing` says why."""
    return None if why_missing() else importlib.import_module("_raypipe_kernel")
