"""Ray's private names, found and replaced by their path; a missing one is a line in the log, with what is lost.

A release of Ray may lack a name, and raypipe then works without it, slower or with more lines. Names without which
a stream would be wrong are imported where they are used, so that their lack is an error. README.md lists both.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import ray

logger = logging.getLogger(__name__)

Function = Callable[..., Any]


@functools.cache  # each missing name is logged once by a process
def _resolve(path: str, loss: str) -> tuple[Any, str] | None:
    """Return the module or class that has the last name of a path, and that name; None = it is missing."""
    owner, _, name = path.rpartition(".")
    try:
        pkgutil.resolve_name(path)
        return pkgutil.resolve_name(owner), name
    except (ImportError, AttributeError):
        logger.warning("Ray %s has no %s: %s", ray.__version__, path, loss)
        return None


def find_private(path: str, loss: str) -> Any:
    """Return a private object of Ray by its path; None = this release of Ray lacks it, which is logged once.

    Args:
        path: module, class and name, with dots between them.
        loss: the consequence of a missing name, for the log.
    """
    target = _resolve(path, loss)
    return target and getattr(*target)


def replace(path: str, wrap: Callable[..., Any], *args: Any, loss: str) -> None:
    """Replace a function of Ray by `wrap(function, *args)`; without that function, only log the loss.

    Args:
        path, loss: see `find_private`.
    """
    target = _resolve(path, loss)
    if target:
        setattr(*target, wrap(getattr(*target), *args))


@contextlib.contextmanager
def replaced(
    path: str, wrap: Callable[..., Any], *args: Any, loss: str
) -> Iterator[None]:
    """Context manager: `replace`, and put Ray's function back at the end."""
    target = _resolve(path, loss)
    if not target:
        yield
        return
    before = getattr(*target)
    setattr(*target, wrap(before, *args))
    try:
        yield
    finally:
        setattr(*target, before)
