"""User code by name."""

from __future__ import annotations

import importlib
from typing import Any

from raypipe.errors import ConfigError


def import_name(address: str, setting: str) -> Any:
    """What `module:name` names; the name may have dots.

    Args:
        address: `module:name`.
        setting: whose value it is, for the error.

    Raises:
        ConfigError: there is no such thing.
    """
    module_name, _, name = address.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{setting} {address!r} cannot be imported: {type(error).__name__}: {error}") from error
    return found
