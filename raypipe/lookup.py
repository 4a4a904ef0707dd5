"""Look-ups of user code and installed packages, by name, and of CPUs."""

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

import raypipe
from raypipe.errors import ConfigError

DISTRIBUTION = "raypipe-data"
"""What pip calls raypipe. The package `raypipe` of PyPI is another one."""

# Whatever reads, decodes, transforms or draws at random on the CPU, besides raypipe.
_PACKAGES = (
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


def search_here() -> bool:
    """Let modules be found in the current folder, after all other places; False where it is closed.

    PYTHONSAFEPATH and `python -P` close it.
    """
    here = str(Path.cwd())
    if sys.flags.safe_path or os.environ.get("PYTHONSAFEPATH"):
        return False
    if here not in sys.path:
        sys.path.append(here)
    return True


def import_name(address: str, setting: str) -> Any:
    """Import the value of `module:name`; the name may have dots.

    The module is looked for where Python looks, and then in the current folder, unless that is closed: a script's
    own folder, or that of a command, is where Python begins, and not where the user is.

    Args:
        address: `module:name`.
        setting: whose value it is, for the error.

    Raises:
        ConfigError: it does not exist.
    """
    module_name, _, name = address.partition(":")
    is_open = search_here()
    try:
        value: Any = importlib.import_module(module_name)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        if not is_open and isinstance(error, ModuleNotFoundError):
            why += (
                "; the current folder is not searched: it holds the store or the run, or PYTHONSAFEPATH is set. "
                "Set PYTHONPATH to the folder of your code"
            )
        raise ConfigError(f"{setting} {address!r} cannot be imported: {why}") from error
    return value


def choices(name: str, known: Collection[str], those: str = "known are") -> str:
    """The names that could have been meant by a name, and all that there are, to end a message with.

    Args:
        known: names, or name → the words behind it in parentheses.
    """
    close = get_close_matches(name, known, cutoff=0.65)  # so that label is near fine_label
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    shown = [f"{one} ({kind})" for one, kind in known.items()] if isinstance(known, Mapping) else known
    return f"; {meant}{those} {', '.join(shown)}"


def to_install(extra: str) -> str:
    """Return the command that installs an extra of raypipe, for errors."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


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
    # raypipe's is that of the sources that run: Ray may have put a folder of them before an installed one.
    own: dict[str, str | None] = {"raypipe": raypipe.__version__}
    return own | {name: version_of(name) for name in _PACKAGES} | {"python": platform.python_version()}
