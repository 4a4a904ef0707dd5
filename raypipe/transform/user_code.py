"""Errors of the user's code that make a bad sample, and what that code takes."""

from __future__ import annotations

import bdb
import contextlib
import copy
import functools
import inspect
import io
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
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


@contextlib.contextmanager
def failing(code_name: str) -> Iterator[None]:
    """Context manager: an error of the user's code within is the error of a sample, see `failed`."""
    try:
        yield
    except NOT_OF_A_SAMPLE:
        raise
    except Exception as error:
        raise failed(code_name, error) from error


def rng_parameter(transform: Any) -> str | None:
    """The name by which a function takes a generator; None = it takes none."""
    try:
        parameters = inspect.signature(transform).parameters
    except ValueError:  # some built-in functions have no signature
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for name in ("rng", "generator"):
        if name in parameters and parameters[name].kind in by_name:
            return name
    return None


def copied(code: Any) -> Any:
    """A copy of a user's code with its own state, as far as it can be copied; else the code itself."""
    if isinstance(code, types.FunctionType) and code.__closure__:
        cells = tuple(types.CellType(copied(content)) for content in contents(code))
        twin = types.FunctionType(
            code.__code__, code.__globals__, code.__name__, code.__defaults__, cells
        )
        twin.__kwdefaults__ = code.__kwdefaults__
        twin.__annotations__ = code.__annotations__
        twin.__dict__ = dict(code.__dict__)
        return twin
    if isinstance(code, Mapping):
        return {name: copied(value) for name, value in code.items()}
    if type(code) in (list, tuple):
        return type(code)(map(copied, code))
    try:
        return copy.deepcopy(code)
    except Exception:  # a lock, an open file, …
        return code


class _Unpickler(pickle.Unpickler):
    """Loads what cloudpickle has written.

    cloudpickle finds the classes of a script, or of a notebook, that this process has. But it gives them the
    methods in the pickle, whose globals are copies: methods would no longer see what the script sets, nor draw
    from the generators that were found before.
    """

    _before: set[type] | None = None

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if name.startswith("_make_skeleton_") and self._before is None:
            # the first class is about to be made
            self._before = {*sys.modules[module]._DYNAMIC_CLASS_TRACKER_BY_CLASS}
        if name == "_class_setstate":
            return functools.partial(self._fill_if_new, found)
        return found

    def _fill_if_new(self, fill: Any, made: type, state: Any) -> type:
        if self._before and made in self._before:
            return made
        return fill(made, state)


def unpickled(pickled: bytes) -> Any:
    """Load what cloudpickle has written; classes that this process has stay as they are."""
    return _Unpickler(io.BytesIO(pickled)).load()


def contents(function: types.FunctionType) -> Iterator[Any]:
    """The values of a function's closure; None for a name that is bound later."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield None
