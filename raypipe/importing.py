"""User code by name, `module:name`, and where in it an error was raised."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import raypipe
from raypipe.errors import ConfigError

_OURS = str(Path(raypipe.__file__).parent) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")
# Libraries of transforms: an error in one of these is reported at its caller.
_LIBRARIES = {
    "albumentations",
    "albucore",
    "torch",
    "torchvision",
    "numpy",
    "cv2",
    "PIL",
    "scipy",
    "skimage",
}


def search_here() -> bool:
    """Append the current folder to the module search path; False if PYTHONSAFEPATH or `python -P` forbids it."""
    folder = str(Path.cwd())
    if sys.flags.safe_path or os.environ.get("PYTHONSAFEPATH"):
        return False
    if folder not in sys.path:
        sys.path.append(folder)
    return True


def import_name(address: str, setting: str) -> Any:
    """Import the value of `module:name`; the name may have dots.

    The search path of Python comes first. Then comes the current folder, see `search_here`: Python's path has the
    folder of the script or command, not the user's.

    Args:
        address: `module:name`.
        setting: the setting with the address, for the error.

    Raises:
        ConfigError: it does not exist.
    """
    module_name, _, name = address.partition(":")
    if not (module_name and name):
        example = f"my_package.training:{name or 'make'}"
        raise ConfigError(
            f"{setting} must be module:name, such as {example}, got {address!r}"
        )
    is_open = search_here()
    try:
        value: Any = importlib.import_module(module_name)
        for attribute in name.split("."):
            value = getattr(value, attribute)
    except Exception as error:
        reason = with_origin(error)
        if not is_open and isinstance(error, ModuleNotFoundError):
            reason += (
                "; the current folder is not searched, since it contains the store or the run, or PYTHONSAFEPATH "
                "is set. Set PYTHONPATH to the folder of your code"
            )
        raise ConfigError(
            f"{setting} {address!r} cannot be imported: {reason}"
        ) from error
    return value


def with_origin(error: BaseException) -> str:
    """Return an error's type and message and, if it was raised in the user's code or in packages, where."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if any(_distance(frame) < 2 for frame in frames):
        text += f" (at {raised_at(error)})"
    return text


def raised_at(error: BaseException) -> str:
    """Return where an error was raised, `file.py:12 in function`: the last frame nearest to the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    nearest = min(map(_distance, frames))
    frame = [frame for frame in frames if _distance(frame) == nearest][-1]
    here = f"{Path.cwd()}{os.sep}"
    return f"{frame.filename.removeprefix(here)}:{frame.lineno} in {frame.name}"


def _distance(frame: traceback.FrameSummary) -> int:
    """Return how far a frame is from the user's own code, 0: other packages 1, libraries 2, raypipe 3."""
    name = frame.filename
    parts = Path(name).parts
    if name.startswith(_OURS):
        return 3
    package = next(
        (inner for outer, inner in pairwise(parts) if outer in _INSTALLED),
        None,
    )
    if package is None:
        if name.startswith((_STANDARD, "<frozen ")) or name.endswith(".pyx"):
            return 2
        return 0
    return 2 if package in _LIBRARIES else 1
