"""Which work in this process belongs to an execution of ours, so that a user's own Ray Data keeps what it has."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

KEY = "raypipe"
"""Of our settings in the context of an execution."""

_thread = threading.local()
_process_is_ours = False


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Within, Ray Data in this thread works for an execution of ours."""
    before = getattr(_thread, "is_ours", False)
    _thread.is_ours = True
    try:
        yield
    finally:
        _thread.is_ours = before


def take_process() -> None:
    """Note that this process has received our settings.

    Ray started it for an execution of ours, unless it is a trainer, which may run executions of its user's.
    """
    global _process_is_ours
    _process_is_ours = "ray.train" not in sys.modules


def is_ours() -> bool:
    """Whether Ray Data works for an execution of ours where this is called."""
    if _process_is_ours or getattr(_thread, "is_ours", False):
        return True
    from ray.data import DataContext  # there by now; a stream without Ray must not bring it

    # The thread of an execution has its context; one that makes a dataset has set it.
    running = getattr(threading.current_thread(), "_data_context", None)
    return has_settings(running or DataContext.get_current())


def has_settings(context: Any) -> bool:
    """Whether a context is that of an execution of ours."""
    return context.get_config(KEY) is not None
