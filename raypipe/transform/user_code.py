"""Errors of the user's code: which of them make a bad sample, and where in that code they were raised."""

from __future__ import annotations

import bdb
import inspect
import os
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import raypipe
from raypipe.errors import ConfigError, SampleError, TransformError

# Errors on purpose, the machine's state, and the end of a debugger: no fault of the sample.
NOT_OF_A_SAMPLE = (SampleError, ConfigError, MemoryError, bdb.BdbQuit)

_OURS = str(Path(raypipe.__file__).parent) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")
# Libraries of transforms: an error in one of these is reported at its caller.
_LIBRARIES = {"albumentations", "albucore", "torch", "torchvision", "numpy", "cv2", "PIL", "scipy", "skimage"}


def failed(what: str, error: Exception) -> TransformError:
    """The error of a sample on which the user's code raised; `what` is the code, such as "the transform"."""
    reason = " ".join(str(error).split())  # libraries print whole tensors, over many lines
    return TransformError(f"{what} failed at {place_of(error)}: {type(error).__name__}: {reason:.500}")


def place_of(error: BaseException) -> str:
    """Where an error was raised, `file.py:12 in function`: the user's last frame, or the nearest to that code."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    nearest = min(map(_distance, frames))
    frame = [frame for frame in frames if _distance(frame) == nearest][-1]
    here = f"{Path.cwd()}{os.sep}"
    return f"{frame.filename.removeprefix(here)}:{frame.lineno} in {frame.name}"


def _distance(frame: traceback.FrameSummary) -> int:
    """From the user's own code, 0, over packages of others to the libraries and raypipe."""
    name = frame.filename
    parts = Path(name).parts
    if name.startswith(_OURS):
        return 3
    package = next((parts[at + 1] for at, part in enumerate(parts[:-1]) if part in _INSTALLED), None)
    if package is None:
        return 2 if name.startswith((_STANDARD, "<frozen ")) or name.endswith(".pyx") else 0
    return 2 if package in _LIBRARIES else 1


def rng_parameter(transform: Any) -> str | None:
    """The name by which a function takes a generator; None = it takes none."""
    try:
        parameters = inspect.signature(transform).parameters
    except ValueError:  # some built-in functions have no signature
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = (name for name in ("rng", "generator") if name in parameters and parameters[name].kind in by_name)
    return next(names, None)
