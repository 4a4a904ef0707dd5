"""What there is: user code and installed packages, by name, and CPUs."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

from raypipe.errors import ConfigError

# Whatever reads, decodes, transforms or draws at random on the CPU.
_PACKAGES = (
    "raypipe",
    "ray",
    "numpy",
    "pyarrow",
    "simplejpeg",
    "opencv-python-headless",
    "pillow",
    "albumentations",
    "albucore",
    "torch",
    "torchvision",
)


def import_name(address: str, setting: str) -> Any:
    """What `module:name` names; the name may have dots.

    The module is looked for where Python looks, and then in the current folder, as Ray's workers do of themselves:
    a script's own folder, or that of a command, is where Python begins, and not where the user is.

    Args:
        address: `module:name`.
        setting: whose value it is, for the error.

    Raises:
        ConfigError: there is no such thing.
    """
    module_name, _, name = address.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and not sys.flags.safe_path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{setting} {address!r} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def choices(name: str, known: Collection[str], those: str = "known are") -> str:
    """The names that could have been meant by a name, and all that there are, to end a message with.

    Args:
        known: names, or name → what stands behind it in parentheses.
    """
    close = get_close_matches(name, known, cutoff=0.65)  # so that label is near fine_label
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    shown = [f"{each} ({kind})" for each, kind in known.items()] if isinstance(known, Mapping) else known
    return f"; {meant}{those} {', '.join(shown)}"


def version_of(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def num_cpus() -> int:
    """CPUs that this process may run on; where the system does not say, as on macOS, those of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str | None]:
    """The versions of all that pixels may depend on; None = it is not installed."""
    return {name: version_of(name) for name in _PACKAGES} | {"python": platform.python_version()}
