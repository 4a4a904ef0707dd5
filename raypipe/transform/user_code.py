"""Errors of the user's code that make a bad sample, and what that code takes."""

from __future__ import annotations

import bdb
import inspect
from typing import Any

from raypipe.errors import ConfigError, SampleError, TransformError
from raypipe.importing import raised_at

# Errors on purpose, the machine's state, and the end of a debugger: no fault of the sample.
NOT_OF_A_SAMPLE = (SampleError, ConfigError, MemoryError, bdb.BdbQuit)


def failed(code_name: str, error: Exception | SystemExit) -> TransformError:
    """The error of a sample on which the user's code raised; `code_name` is the code, such as "the transform"."""
    # libraries print whole tensors, over many lines
    reason = " ".join(str(error).split())
    return TransformError(
        f"{code_name} failed at {raised_at(error)}: {type(error).__name__}: {reason:.500}"
    )


def rng_parameter(transform: Any) -> str | None:
    """The name by which a function takes a generator; None = it takes none."""
    try:
        parameters = inspect.signature(transform).parameters
    except ValueError:  # some built-in functions have no signature
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = (
        name
        for name in ("rng", "generator")
        if name in parameters and parameters[name].kind in by_name
    )
    return next(names, None)
