"""Access to the compiled extension, and the reason if it is missing."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

INTERFACE_VERSION = 8
"""Version of the extension's interface that this program calls; the same as in csrc/kernel.c."""


@functools.cache
def why_missing() -> str:
    """Return the reason for a missing extension; empty = it is available."""
    try:
        version = importlib.import_module("_raypipe_kernel").INTERFACE_VERSION
    except ImportError as error:
        return f"not built, or its libjpeg-turbo is missing ({error})"
    if version != INTERFACE_VERSION:
        return f"built from another version of raypipe ({version}, not {INTERFACE_VERSION})"
    return ""


def module() -> ModuleType | None:
    """Return the extension; None if it is missing, see `why_missing`."""
    if why_missing():
        return None
    return importlib.import_module("_raypipe_kernel")
